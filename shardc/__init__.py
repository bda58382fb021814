"""shardc: a torch.compile backend that shards training.

from shardc import fully_shard
fully_shard(model, units="auto")
model.compile(backend="shardc")
"""

from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy

from shardc.runtime.modules import ShardedModule
from shardc.runtime.shard_tensor import ShardTensor
from shardc.shard import fully_shard
from shardc.table import describe
from shardc.units import units_of

__all__ = [
    "CPUOffloadPolicy",
    "MixedPrecisionPolicy",
    "OffloadPolicy",
    "ShardTensor",
    "ShardedModule",
    "describe",
    "fully_shard",
    "units_of",
]
