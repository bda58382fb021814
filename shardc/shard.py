"""`fully_shard`: turn a module's parameters into shards, in place.

Three steps, and nothing is changed before the first two have passed on every rank: check the
arguments and the model, plan the buckets and agree on the plan, then cut bucket by bucket.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, OffloadPolicy

from shardc.checks import (
    check_ignored,
    check_initialized,
    check_model,
    check_modules,
    check_placement,
    check_policies,
    ignored_by_units_inside,
)
from shardc.mesh import data_parallel_mesh, spmd_of
from shardc.passes.cost import bucket_grain
from shardc.passes.profiles import current_profile
from shardc.runtime import compat
from shardc.runtime.agreement import agree
from shardc.runtime.bucket import Bucket
from shardc.runtime.controls import check_reshard
from shardc.runtime.layout import BucketLayout, Param, plan_buckets
from shardc.runtime.modules import make_unit
from shardc.runtime.policy import MixedPrecisionPolicy as Precision
from shardc.runtime.policy import keep_buffers_in
from shardc.runtime.ranks import Ranks, ranks_of
from shardc.runtime.settings import Settings
from shardc.runtime.shard_tensor import ShardTensor
from shardc.runtime.tensor_parallel import Placed, Spmd, local_value, restore_ties
from shardc.runtime.unit import Unit
from shardc.units import UnitPolicy, UnitRequest, find_inner_units, owned_parameters

Ignored = Iterable[nn.Parameter] | Iterable[nn.Module]


@dataclass(frozen=True)
class _Plan:
    """One unit to be made: what it takes and how it is laid out."""

    modules: tuple[nn.Module, ...]
    params: dict[str, nn.Parameter]
    layouts: tuple[BucketLayout, ...]
    reshard_after_forward: bool | int | None
    settings: Settings


def fully_shard(
    module: Any,
    *,
    mesh: DeviceMesh | None = None,
    reshard_after_forward: bool | int | None = None,
    shard_placement_fn: Any = None,
    mp_policy: MixedPrecisionPolicy = MixedPrecisionPolicy(),  # noqa: B008
    offload_policy: OffloadPolicy = OffloadPolicy(),  # noqa: B008
    ignored_params: Ignored | None = None,
    dp_mesh_dims: Any = None,
    units: UnitPolicy | None = None,
) -> Any:
    """Shard the parameters of `module` over the ranks of `mesh`, in place.

    The signature of `torch.distributed.fsdp.fully_shard`. One call makes one unit of the parameters
    in `module` that no earlier call took, so it is called bottom-up; `units` does that in one call.

    Args:
        module: a module, or a list of modules that form one unit.
        mesh: the ranks to shard over (default: all). With two dims, (replicate, shard), segments
            are cut along the second, and gradients are reduced over both (HSDP; `hybrid_mesh`
            makes one). A shard dim of 1 replicates (FSDP1's NO_SHARD). Parameters that are DTensors
            on other dims of the mesh (tensor parallelism: call `parallelize_module` first) are
            sharded too, come back as DTensors in the forward, and are new objects: make the
            optimizer after this call.
        reshard_after_forward: True frees gathered parameters after the forward and gathers again
            in the backward; False keeps them; None is True except for the outermost unit. A number
            that divides the ranks: after the forward each keeps the part that so many ranks share,
            and the backward gathers among those only.
        shard_placement_fn: refused: flat segments have no dim to place.
        mp_policy: precision (`shardc.MixedPrecisionPolicy`, or torch's).
        offload_policy: torch's `CPUOffloadPolicy` keeps segments, gradients and so the optimizer's
            state on the host.
        ignored_params: parameters, or modules whose parameters, stay as they are.
        dp_mesh_dims: torch's `DataParallelMeshDims`, the names of the dims of `mesh` to shard and
            to replicate over. Every parameter is then a DTensor on the whole mesh, replicated over
            those.
        units: inner modules to make units of: "auto" (the elements of every `ModuleList` or
            `Sequential` of two or more modules of one class), a class, a tuple of classes, or a
            callable `module -> bool | dict`, whose dict overrides options for that unit.

    Returns:
        What was given, each module now also a `ShardedModule`.

    Raises:
        ValueError: bad arguments, a module that is sharded already, aliased or cached parameters.
        TypeError: `ignored_params` is not an iterable of parameters or of modules, or a policy is
            none.
        NotImplementedError: an option that is not built yet, by name.
        RuntimeError: no process group, or ranks that call with different models.
    """
    modules = check_modules(module)
    check_placement(shard_placement_fn)
    check_policies(mp_policy, offload_policy)
    spmd = spmd_of(mesh, dp_mesh_dims)
    mesh = data_parallel_mesh(mesh, dp_mesh_dims)
    ignored, skipped = check_ignored(modules, ignored_params)
    ignored |= ignored_by_units_inside(modules)
    check_initialized(modules)
    for root in modules:
        for child in root.modules():
            compat.forget_recomputed_weights(child)
    restore_ties(modules)
    requests = [
        *(request for root in modules for request in find_inner_units(root, units, skipped)),
        UnitRequest(modules, {}),
    ]
    given = {
        "reshard_after_forward": reshard_after_forward,
        "mp_policy": mp_policy,
        "offload_policy": offload_policy,
    }
    plans = _plan(requests, mesh, given, ignored, skipped)
    check_model(modules, [param for plan in plans for param in plan.params.values()], mesh, spmd)
    facts = [f"{_fact(layout)} ({plan.settings})" for plan in plans for layout in plan.layouts]
    ranks = ranks_of(mesh)
    everyone = compat.resolve_group(ranks.everyone)
    agree(everyone, "the parameters given to fully_shard", facts, every_time=True)
    for plan in plans:
        _apply(plan, mesh, ranks, ignored, spmd)
    return module


# -- plan ----------------------------------------------------------------------------------------


def _plan(
    requests: list[UnitRequest],
    mesh: DeviceMesh,
    given: dict[str, Any],
    ignored: set[nn.Parameter],
    skipped: set[nn.Module],
) -> list[_Plan]:
    plans: list[_Plan] = []
    taken = set(ignored)
    world = mesh.size(mesh.ndim - 1)
    grain = bucket_grain(world, current_profile(mesh.device_type))
    for request in requests:
        options = {**given, **request.options}
        mp, offload = options["mp_policy"], options["offload_policy"]
        check_policies(mp, offload)
        owned = owned_parameters(request.modules, skipped)
        params = {
            owners[0].name: param
            for param, owners in owned.items()
            if param not in taken and not isinstance(param, ShardTensor)
        }
        taken |= set(params.values())
        described = [
            Param(name, tuple(local_value(param).shape), param.dtype, param.requires_grad)
            for name, param in params.items()
        ]
        plans.append(
            _Plan(
                request.modules,
                params,
                plan_buckets(described, world, grain),
                check_reshard(options["reshard_after_forward"], world),
                Settings(precision=Precision.of(mp), offload=offload),
            )
        )
    return plans


def _fact(layout: BucketLayout) -> str:
    slots = ", ".join(f"{slot.name}{list(slot.shape)}" for slot in layout.slots)
    return f"{layout.dtype} bucket of {layout.numel}, requires_grad={layout.requires_grad}: {slots}"


# -- apply ---------------------------------------------------------------------------------------


def _apply(
    plan: _Plan,
    mesh: DeviceMesh,
    ranks: Ranks,
    ignored: set[nn.Parameter],
    spmd: Spmd | None,
) -> None:
    """Make one unit: cut its buckets, free the full parameters, give its modules properties."""
    device = _device(mesh)
    home = torch.device("cpu") if plan.settings.offloaded else device
    for root in plan.modules:
        for module in root.modules():
            compat.forget_rnn_weights(module)
    buckets = []
    for layout in plan.layouts:
        params = [plan.params.pop(slot.name) for slot in layout.slots]
        where = torch.device("meta") if any(param.is_meta for param in params) else home
        segment = torch.zeros(layout.segment, dtype=layout.dtype, device=where)
        if plan.settings.pinned and device.type != "cpu" and where.type == "cpu":
            segment = segment.pin_memory()
        placed = [Placed.of(param, spmd) for param in params]
        bucket = Bucket(layout, ranks, plan.settings, segment, plan.modules, device, placed)
        bucket.take(params)
        buckets.append(bucket)
        restore_ties(plan.modules)
    _move_buffers(plan.modules, device)
    keep_buffers_in(plan.settings.precision.buffer_dtype, plan.modules)
    unit = Unit(
        plan.modules,
        tuple(buckets),
        mesh,
        plan.reshard_after_forward,
        plan.settings,
        device,
        frozenset(ignored),
    )
    make_unit(unit)


def _device(mesh: DeviceMesh) -> torch.device:
    if mesh.device_type == "cpu":
        return torch.device("cpu")
    return torch.device(mesh.device_type, torch.accelerator.current_device_index())


def _move_buffers(modules: tuple[nn.Module, ...], device: torch.device) -> None:
    for root in modules:
        for module in root.modules():
            for name, buffer in module.named_buffers(recurse=False):
                if not buffer.is_meta and buffer.device != device:
                    setattr(module, name, buffer.to(device))
