"""`plan_units`: the units that a model is cut into, and the layouts of their buckets.

`fully_shard` applies the plan, and `shardc plan` prints it. The plan depends on shapes, dtypes,
options, the number of ranks and a hardware profile only. So it needs no mesh and no process group.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import nn
from torch.distributed.fsdp import OffloadPolicy

from shardc.passes.estimate.cost import bucket_grain
from shardc.passes.estimate.hardware import Profile
from shardc.runtime import compat
from shardc.runtime.layout.layout import BucketLayout, Param, plan_buckets
from shardc.runtime.modules.controls import check_reshard
from shardc.runtime.tensor.shard_tensor import ShardTensor
from shardc.runtime.tensor.tensor_parallel import restore_ties, stored_as
from shardc.runtime.unit.precision import MixedPrecisionPolicy as Precision
from shardc.runtime.unit.settings import Settings
from shardc.sharding.checks import LeftAlone, check_initialized, check_policies
from shardc.sharding.placement_fn import PlacementFn, is_cut_by_rows
from shardc.sharding.units import UnitPolicy, UnitRequest, find_inner_units, owned_parameters


@dataclass(frozen=True)
class UnitPlan:
    """One unit to make: its parameters, the module that holds each, and the layouts of buckets."""

    modules: tuple[nn.Module, ...]
    params: dict[str, nn.Parameter]
    owners: dict[str, nn.Module]
    layouts: tuple[BucketLayout, ...]
    reshard_after_forward: bool | int | None
    settings: Settings


def plan_units(
    modules: tuple[nn.Module, ...],
    units: UnitPolicy | None,
    options: Mapping[str, Any],
    alone: LeftAlone,
    world_size: int,
    profile: Profile,
    placement_fn: PlacementFn | None = None,
) -> list[UnitPlan]:
    """Plan the units of `modules`: inner units first, the unit of `modules` itself last.

    Where "auto" chooses the units and devices have memory of their own, the last unit takes the
    vectors of large inner units, in one bucket. Buckets of matrices alone have the sizes of
    gradients and, often, activations, so a tensor fits the memory that another tensor leaves.

    Args:
        units: chooses the inner modules that become units.
        options: the `UNIT_OPTIONS` of the call.
        world_size: ranks that share each bucket.
        profile: the hardware; its links bound the size of the buckets from below.
        placement_fn: chooses the parameters that are cut by rows.

    Raises:
        TypeError, ValueError: bad options, or a lazy module that has no shapes yet.
        NotImplementedError: a placement that no bucket can have.
    """
    check_initialized(modules)
    for root in modules:
        for child in root.modules():
            compat.forget_recomputed_weights(child)
    restore_ties(modules)
    requests = [
        *(request for root in modules for request in find_inner_units(root, units, alone.modules)),
        UnitRequest(modules, {}),
    ]
    plans: list[UnitPlan] = []
    taken, left = set(alone.params), set[nn.Parameter]()
    grain = bucket_grain(world_size, profile)
    for request in requests:
        asked = {**options, **request.options}
        mp = _policy(asked["mp_policy"], Precision)
        offload = _policy(asked["offload_policy"], OffloadPolicy)
        check_policies(mp, offload)
        owned = owned_parameters(request.modules, alone.modules)
        params = {
            owners[0].name: param
            for param, owners in owned.items()
            if param not in taken and not isinstance(param, ShardTensor)
        }
        if request is not requests[-1] and units == "auto" and profile.host_bandwidth:
            left |= _vectors_of_large(params)
            params = {name: param for name, param in params.items() if param not in left}
        taken |= set(params.values())
        described = [
            Param(
                name,
                *stored_as(param),
                param.requires_grad,
                by_rows=is_cut_by_rows(name, param, placement_fn),
                is_table=any(isinstance(each.module, nn.Embedding) for each in owned[param]),
                apart=param in left,
            )
            for name, param in params.items()
        ]
        precision = Precision.of(mp)
        plans.append(
            UnitPlan(
                request.modules,
                params,
                {owned[param][0].name: owned[param][0].module for param in params.values()},
                plan_buckets(described, world_size, grain, precision.blocks),
                check_reshard(asked["reshard_after_forward"], world_size),
                Settings(precision=precision, offload=offload),
            )
        )
    return plans


def _policy(asked: Any, default: type) -> Any:
    """The policy of a call; None is the default policy, as in FSDP2."""
    return default() if asked is None else asked


_LARGE = 2**19
"""Elements of a large unit: at two bytes each, its buckets come from the large blocks of torch's
allocator (c10/cuda/CUDACachingAllocator.cpp, kSmallSize)."""
_VECTOR = 2**16
"""Elements of the longest vector that the last unit takes: more than any norm has."""


def _vectors_of_large(params: Mapping[str, nn.Parameter]) -> set[nn.Parameter]:
    """The vectors of a unit, unless the unit is small."""
    vectors = {each for each in params.values() if each.ndim < 2 and each.numel() <= _VECTOR}
    rest = sum(each.numel() for each in params.values() if each not in vectors)
    return vectors if rest >= _LARGE else set()
