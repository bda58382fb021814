"""Every private torch API that shardc uses; `versions.py` names the versions it was seen in.

Nothing else in the project imports a name with a leading underscore from torch (the functional
collectives, `torch.ops._c10d_functional`, are the one documented exception). When a torch release
moves something, this folder is the one to mend. The rest of the project says `compat.name`.
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
