"""Every private torch API that shardc uses, seen in the versions that `versions.py` lists.

Nothing else in the project imports a name with a leading underscore from torch (the functional
collectives, `torch.ops._c10d_functional`, are the one documented exception). When a torch release
moves an API, only this folder changes. The rest of the project writes `compat.name`.
"""

from shardc.runtime.compat.aot import *
from shardc.runtime.compat.aot_cache import *
from shardc.runtime.compat.aot_devices import *
from shardc.runtime.compat.autograd import *
from shardc.runtime.compat.bodies import *
from shardc.runtime.compat.cpp_kernels import *
from shardc.runtime.compat.dtensors import *
from shardc.runtime.compat.dynamo import *
from shardc.runtime.compat.gloo import *
from shardc.runtime.compat.groups import *
from shardc.runtime.compat.hf_writer import *
from shardc.runtime.compat.inductor import *
from shardc.runtime.compat.modules import *
from shardc.runtime.compat.regions import *
from shardc.runtime.compat.tensors import *
from shardc.runtime.compat.torchao import *
from shardc.runtime.compat.versions import *
