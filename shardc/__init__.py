"""shardc: a torch.compile backend that shards training.

from shardc import fully_shard
fully_shard(model, units="auto")
model.compile(backend="shardc")
"""

from torch.distributed.fsdp import CPUOffloadPolicy, OffloadPolicy

from shardc.calibrate import calibrate
from shardc.explain import explain
from shardc.materialize import materialize
from shardc.mesh import hybrid_mesh
from shardc.passes.profiles import Profile, get_profile, set_profile
from shardc.reports.live import report
from shardc.reports.profile import compare_with_profile
from shardc.reports.report import Report
from shardc.runtime.controls import share_comm_ctx
from shardc.runtime.forward_method import register_fsdp_forward_method
from shardc.runtime.modules import ShardedModule
from shardc.runtime.policy import MixedPrecisionPolicy
from shardc.runtime.reduce_functions import compress_bf16, compress_fp16
from shardc.runtime.shard_tensor import ShardTensor
from shardc.runtime.summon import summon_full_params
from shardc.same_values import check_same_values
from shardc.shard import fully_shard
from shardc.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    get_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
    set_state_dict,
)
from shardc.state_names import rekey_optimizer_state_dict
from shardc.table import describe
from shardc.units import units_of

__all__ = [
    "CPUOffloadPolicy",
    "MixedPrecisionPolicy",
    "OffloadPolicy",
    "Profile",
    "Report",
    "ShardTensor",
    "ShardedModule",
    "StateDictOptions",
    "calibrate",
    "check_same_values",
    "compare_with_profile",
    "compress_bf16",
    "compress_fp16",
    "describe",
    "explain",
    "fully_shard",
    "get_model_state_dict",
    "get_optimizer_state_dict",
    "get_profile",
    "get_state_dict",
    "hybrid_mesh",
    "materialize",
    "register_fsdp_forward_method",
    "rekey_optimizer_state_dict",
    "report",
    "set_model_state_dict",
    "set_optimizer_state_dict",
    "set_profile",
    "set_state_dict",
    "share_comm_ctx",
    "summon_full_params",
    "units_of",
]
