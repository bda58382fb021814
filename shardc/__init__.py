"""shardc: a torch.compile backend that shards training.

from shardc import fully_shard
fully_shard(model, units="auto")
model.compile(backend="shardc")
"""

from torch.distributed.fsdp import CPUOffloadPolicy, OffloadPolicy

from shardc.calibrate import calibrate
from shardc.materialize import materialize
from shardc.mesh import hybrid_mesh
from shardc.passes.profiles import Profile, get_profile, set_profile
from shardc.runtime.controls import share_comm_ctx
from shardc.runtime.modules import ShardedModule
from shardc.runtime.policy import MixedPrecisionPolicy
from shardc.runtime.reduce_functions import compress_bf16, compress_fp16
from shardc.runtime.shard_tensor import ShardTensor
from shardc.same_values import check_same_values
from shardc.shard import fully_shard
from shardc.table import describe
from shardc.units import units_of

__all__ = [
    "CPUOffloadPolicy",
    "MixedPrecisionPolicy",
    "OffloadPolicy",
    "Profile",
    "ShardTensor",
    "ShardedModule",
    "calibrate",
    "check_same_values",
    "compress_bf16",
    "compress_fp16",
    "describe",
    "fully_shard",
    "get_profile",
    "hybrid_mesh",
    "materialize",
    "set_profile",
    "share_comm_ctx",
    "units_of",
]
