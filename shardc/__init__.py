"""shardc: a torch.compile backend that shards training.

from shardc import fully_shard
fully_shard(model, units="auto")
model.compile(backend="shardc")
"""

from torch.distributed.fsdp import CPUOffloadPolicy, OffloadPolicy

from shardc.backend.precompile import Precompiled, precompile
from shardc.backend.warmup import warmup
from shardc.calibrate import calibrate
from shardc.optim.whole_tensor import WholeTensorOptimizer
from shardc.passes.hardware import Profile, get_profile, set_profile
from shardc.reports import plan_text  # noqa: F401 (it listens for finished plans)
from shardc.reports.explain import explain
from shardc.reports.fit import Fit, fewest_ranks, fit
from shardc.reports.live import report
from shardc.reports.report import Report
from shardc.reports.table import describe
from shardc.reports.trace import compare_with_profile
from shardc.runtime.comm.reduce_functions import compress_bf16, compress_fp16
from shardc.runtime.eager.precision import MixedPrecisionPolicy
from shardc.runtime.modules.controls import share_comm_ctx
from shardc.runtime.modules.forward_method import register_fsdp_forward_method
from shardc.runtime.modules.modules import ShardedModule
from shardc.runtime.modules.summon import summon_full_params
from shardc.runtime.tensor.shard_gathers import strict
from shardc.runtime.tensor.shard_spec import FlatShard
from shardc.runtime.tensor.shard_tensor import ShardTensor
from shardc.sharding.materialize import materialize
from shardc.sharding.mesh import hierarchical_mesh, hybrid_mesh
from shardc.sharding.same_values import check_same_values
from shardc.sharding.shard import fully_shard
from shardc.sharding.units import units_of
from shardc.state.names import rekey_optimizer_state_dict
from shardc.state.pretrained import load_pretrained
from shardc.state.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    get_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
    set_state_dict,
)

__all__ = [
    "CPUOffloadPolicy",
    "Fit",
    "FlatShard",
    "MixedPrecisionPolicy",
    "OffloadPolicy",
    "Precompiled",
    "Profile",
    "Report",
    "ShardTensor",
    "ShardedModule",
    "StateDictOptions",
    "WholeTensorOptimizer",
    "calibrate",
    "check_same_values",
    "compare_with_profile",
    "compress_bf16",
    "compress_fp16",
    "describe",
    "explain",
    "fewest_ranks",
    "fit",
    "fully_shard",
    "get_model_state_dict",
    "get_optimizer_state_dict",
    "get_profile",
    "get_state_dict",
    "hierarchical_mesh",
    "hybrid_mesh",
    "load_pretrained",
    "materialize",
    "precompile",
    "register_fsdp_forward_method",
    "rekey_optimizer_state_dict",
    "report",
    "set_model_state_dict",
    "set_optimizer_state_dict",
    "set_profile",
    "set_state_dict",
    "share_comm_ctx",
    "strict",
    "summon_full_params",
    "units_of",
    "warmup",
]
