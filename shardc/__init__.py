"""shardc: a torch.compile backend that shards training.

from shardc import fully_shard
fully_shard(model, units="auto")
model.compile(backend="shardc")

Each name is imported from its module at its first use: training needs no reports, and reports need
no state dicts.
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch.distributed.fsdp import CPUOffloadPolicy as CPUOffloadPolicy
    from torch.distributed.fsdp import OffloadPolicy as OffloadPolicy

    from shardc.backend.precompile import Precompiled as Precompiled
    from shardc.backend.precompile import precompile as precompile
    from shardc.backend.warmup import warmup as warmup
    from shardc.calibration import calibrate as calibrate
    from shardc.integrations.as_fsdp2 import as_fsdp2 as as_fsdp2
    from shardc.optim.whole_tensor import WholeTensorOptimizer as WholeTensorOptimizer
    from shardc.passes.estimate.hardware import Profile as Profile
    from shardc.passes.estimate.hardware import get_profile as get_profile
    from shardc.passes.estimate.hardware import set_profile as set_profile
    from shardc.planning.explain import explain as explain
    from shardc.planning.fit import Fit as Fit
    from shardc.planning.fit import fewest_ranks as fewest_ranks
    from shardc.planning.fit import fit as fit
    from shardc.reports.live import report as report
    from shardc.reports.report import Report as Report
    from shardc.reports.table import describe as describe
    from shardc.reports.trace import compare_with_profile as compare_with_profile
    from shardc.runtime.comm.reduce_functions import compress_bf16 as compress_bf16
    from shardc.runtime.comm.reduce_functions import compress_fp16 as compress_fp16
    from shardc.runtime.modules.controls import share_comm_ctx as share_comm_ctx
    from shardc.runtime.modules.forward_method import (
        register_fsdp_forward_method as register_fsdp_forward_method,
    )
    from shardc.runtime.modules.modules import ShardedModule as ShardedModule
    from shardc.runtime.modules.summon import summon_full_params as summon_full_params
    from shardc.runtime.tensor.shard_gathers import strict as strict
    from shardc.runtime.tensor.shard_spec import FlatShard as FlatShard
    from shardc.runtime.tensor.shard_tensor import ShardTensor as ShardTensor
    from shardc.runtime.unit.precision import MixedPrecisionPolicy as MixedPrecisionPolicy
    from shardc.sharding.materialize import materialize as materialize
    from shardc.sharding.mesh import hierarchical_mesh as hierarchical_mesh
    from shardc.sharding.mesh import hybrid_mesh as hybrid_mesh
    from shardc.sharding.same_values import check_same_values as check_same_values
    from shardc.sharding.shard import fully_shard as fully_shard
    from shardc.sharding.units import units_of as units_of
    from shardc.state.names import rekey_optimizer_state_dict as rekey_optimizer_state_dict
    from shardc.state.pretrained import load_pretrained as load_pretrained
    from shardc.state.state_dict import StateDictOptions as StateDictOptions
    from shardc.state.state_dict import get_model_state_dict as get_model_state_dict
    from shardc.state.state_dict import get_optimizer_state_dict as get_optimizer_state_dict
    from shardc.state.state_dict import get_state_dict as get_state_dict
    from shardc.state.state_dict import set_model_state_dict as set_model_state_dict
    from shardc.state.state_dict import set_optimizer_state_dict as set_optimizer_state_dict
    from shardc.state.state_dict import set_state_dict as set_state_dict
    from shardc.step.compile_step import compile_step as compile_step

__version__ = "0.1.0"

_HOMES = {
    "torch.distributed.fsdp": "CPUOffloadPolicy OffloadPolicy",
    "shardc.backend.precompile": "Precompiled precompile",
    "shardc.backend.warmup": "warmup",
    "shardc.calibration": "calibrate",
    "shardc.integrations.as_fsdp2": "as_fsdp2",
    "shardc.optim.whole_tensor": "WholeTensorOptimizer",
    "shardc.passes.estimate.hardware": "Profile get_profile set_profile",
    "shardc.planning.explain": "explain",
    "shardc.planning.fit": "Fit fewest_ranks fit",
    "shardc.reports.live": "report",
    "shardc.reports.report": "Report",
    "shardc.reports.table": "describe",
    "shardc.reports.trace": "compare_with_profile",
    "shardc.runtime.comm.reduce_functions": "compress_bf16 compress_fp16",
    "shardc.runtime.unit.precision": "MixedPrecisionPolicy",
    "shardc.runtime.modules.controls": "share_comm_ctx",
    "shardc.runtime.modules.forward_method": "register_fsdp_forward_method",
    "shardc.runtime.modules.modules": "ShardedModule",
    "shardc.runtime.modules.summon": "summon_full_params",
    "shardc.runtime.tensor.shard_gathers": "strict",
    "shardc.runtime.tensor.shard_spec": "FlatShard",
    "shardc.runtime.tensor.shard_tensor": "ShardTensor",
    "shardc.sharding.materialize": "materialize",
    "shardc.sharding.mesh": "hierarchical_mesh hybrid_mesh",
    "shardc.sharding.same_values": "check_same_values",
    "shardc.sharding.shard": "fully_shard",
    "shardc.sharding.units": "units_of",
    "shardc.step.compile_step": "compile_step",
    "shardc.state.names": "rekey_optimizer_state_dict",
    "shardc.state.pretrained": "load_pretrained",
    "shardc.state.state_dict": "StateDictOptions get_model_state_dict get_optimizer_state_dict "
    "get_state_dict set_model_state_dict set_optimizer_state_dict set_state_dict",
}
_HOME_OF = {name: home for home, names in _HOMES.items() for name in names.split()}
__all__ = sorted(_HOME_OF)
_ROOMS = ("weights",)
"""Packages with names of their own, imported at the first use of the attribute."""


def __getattr__(name: str) -> object:
    if name in _ROOMS:
        return import_module(f"shardc.{name}")
    home = _HOME_OF.get(name)
    if home is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = globals()[name] = getattr(import_module(home), name)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__, *_ROOMS})
