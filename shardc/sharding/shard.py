"""`fully_shard`: turn a module's parameters into shards, in place.

It takes three steps: check the arguments and the model; plan the buckets and agree on the plan; cut
bucket by bucket. Nothing is changed before the first two steps have passed on every rank.
"""

from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, OffloadPolicy

from shardc.passes.estimate.hardware import current_profile
from shardc.runtime import compat
from shardc.runtime.checks.arguments import check_arguments
from shardc.runtime.checks.meta import units_in
from shardc.runtime.groups.ranks import Ranks, mesh_ranks
from shardc.runtime.modules.controls import Reshard
from shardc.runtime.modules.modules import make_unit
from shardc.runtime.tensor.extension import Extension
from shardc.runtime.tensor.quantised_state import shard_quantised_state
from shardc.runtime.tensor.tensor_parallel import Placed, Spmd, restore_ties
from shardc.runtime.unit.bucket import Bucket
from shardc.runtime.unit.params import take
from shardc.runtime.unit.precision import keep_buffers_in
from shardc.runtime.unit.unit import Unit
from shardc.runtime.watch.agreement import Statement, agree, decline
from shardc.sharding.checks import LeftAlone, check_ignored, check_model, check_modules
from shardc.sharding.first_values import FirstValues, compare_values, values_note
from shardc.sharding.materialize import InitFn, initialise
from shardc.sharding.mesh import MeshDims, data_parallel_mesh, spmd_of
from shardc.sharding.placement import check_devices, compute_device, move_buffers, new_segment
from shardc.sharding.placement_fn import PlacementFn, modules_on_other_meshes
from shardc.sharding.sync import (
    buffer_facts,
    can_scatter,
    sync_buffers,
    sync_copies,
    unsynced_buffers,
    what_has_values,
)
from shardc.sharding.unit_plan import UnitPlan, plan_units
from shardc.sharding.units import UNIT_OPTIONS, UnitPolicy


def fully_shard(
    module: Any,
    *,
    mesh: DeviceMesh | None = None,
    reshard_after_forward: Reshard = None,
    shard_placement_fn: PlacementFn | None = None,
    mp_policy: MixedPrecisionPolicy | None = None,
    offload_policy: OffloadPolicy | None = None,
    ignored_params: Any = None,
    dp_mesh_dims: MeshDims | None = None,
    units: UnitPolicy | None = None,
    param_init_fn: InitFn | None = None,
    sync_module_states: bool = False,
) -> Any:
    """Shard the parameters of `module` over the ranks of `mesh`, in place.

    The signature extends `torch.distributed.fsdp.fully_shard`. One call makes one unit of the
    parameters in `module` that no earlier call took. So calls go bottom-up, or one call with
    `units` makes all units.

    Args:
        module: a module, or a list of modules that form one unit.
        mesh: the ranks to shard over (default: all). With two dims, (replicate, shard), segments
            are cut along the second, and gradients are reduced over both (HSDP; `hybrid_mesh`
            makes such a mesh). A shard dim of 1 replicates (FSDP1's NO_SHARD). Parameters that are
            DTensors on other dims of the mesh (tensor parallelism: call `parallelize_module` first)
            are sharded too, and the forward reads them as DTensors. Such parameters become new
            objects: make the optimizer after this call.
        reshard_after_forward: True frees gathered parameters after the forward and gathers them
            again in the backward; False keeps them; None is True except for the outermost unit. A
            number N that divides the count of ranks: after the forward, each rank keeps one part in
            N of a bucket, and the backward gathers among N ranks only.
        shard_placement_fn: gives the `Shard` by which a parameter is cut, or None. `Shard(0)` cuts
            a parameter between rows, in equal parts but the last, as FSDP2 does; the parameter then
            has a bucket, and so a message, of its own. Any other dim is as None: an interval needs
            no dim that the ranks divide. torch's `ShardPlacementResult` names a mesh: modules whose
            parameters are all on another mesh than `mesh`, such as experts, become a unit there;
            its `Shard` changes nothing.
        mp_policy: precision (`shardc.MixedPrecisionPolicy`, or torch's); None casts nothing.
        offload_policy: torch's `CPUOffloadPolicy` keeps segments, gradients and so the optimizer's
            state on the host; None, or torch's `OffloadPolicy`, keeps them on the device.
        ignored_params: parameters that stay as they are, or modules whose parameters do.
        dp_mesh_dims: torch's `DataParallelMeshDims`, the names of the dims of `mesh` to shard and
            to replicate over. Every parameter must then be a DTensor on the whole mesh, replicated
            over these dims.
        units: inner modules that become units: "auto" (the elements of every `ModuleList` or
            `Sequential` of two or more modules of one class; on GPUs the vectors of large units
            stay with `module`'s unit), a class, a tuple of classes, or a callable
            `module -> bool | dict`, whose dict overrides options for that unit.
        param_init_fn: initialises a module that was built on meta, like `init_fn` of
            `shardc.materialize`. Without it, a model on meta stays there until it is materialised.
        sync_module_states: start from the parameters and buffers of rank 0 of the mesh; on other
            ranks the model may be on meta.

    Returns:
        `module` as it was given; each module given is now also a `ShardedModule`.

    Raises:
        ValueError: bad arguments, a module that is sharded already, aliased or cached parameters.
        TypeError: an argument of another type.
        NotImplementedError: an option that is not built yet, by name.
        RuntimeError: no process group, ranks that call with different models, another rank that
            refuses its model, or a `param_init_fn` that failed.
    """
    arguments = dict(locals())
    check_arguments(fully_shard, arguments, only=("mesh", "dp_mesh_dims"))
    options = {name: value for name, value in arguments.items() if name != "module"}
    given = {name: arguments[name] for name in UNIT_OPTIONS}
    spmd = spmd_of(mesh, dp_mesh_dims)
    mesh = data_parallel_mesh(mesh, dp_mesh_dims)
    ranks, what = mesh_ranks(mesh), "the parameters given to fully_shard"
    everyone = compat.resolve_group(ranks.everyone)
    try:
        modules = check_modules(module)
        check_arguments(fully_shard, arguments)
        alone = check_ignored(modules, ignored_params, whole_model=units is not None)
        for other, inner in modules_on_other_meshes(
            modules, mesh, shard_placement_fn, (*alone.params, *alone.modules)
        ).items():
            fully_shard(inner, **{**options, "mesh": other})
            units_in(inner[0], recurse=False)[0].joined = True
        world_size, profile = mesh.size(mesh.ndim - 1), current_profile(mesh.device_type)
        plans = plan_units(modules, units, given, alone, world_size, profile, shard_placement_fn)
        check_model(modules, _params(plans), mesh.mesh.flatten().tolist(), world_size, spmd)
        _check_devices(modules, plans, compute_device(mesh), mixed=sync_module_states)
        init, sync = param_init_fn is not None, sync_module_states
        buffers = list(unsynced_buffers(modules, alone.modules)) if sync else []
        facts = [*_facts(modules, plans, sync), *buffer_facts(buffers)]
        if sync:
            note = what_has_values(ranks, _params(plans), buffers, init)
        else:
            note = values_note(plans, ranks, init, compute_device(mesh))
    except Exception as error:
        decline(everyone, what, f"{type(error).__name__}: {error}")
        raise
    notes = agree(everyone, Statement(what, facts, note), every_time=True)
    scatter = sync and can_scatter(notes)
    first = FirstValues() if sync else compare_values(notes, plans)
    shard_quantised_state()
    made = []
    for place, plan in enumerate(plans):
        mixed, differs = place in first.mixed, first.differing.get(place, "")
        made.append(_apply(plan, mesh, ranks, alone, spmd, scatter, mixed, differs))
    if init and not scatter:
        initialise(modules, param_init_fn, seeds_may_differ=sync)
    if sync:
        if not scatter:
            sync_copies([bucket for unit in made for bucket in unit.buckets])
        sync_buffers(modules, alone.modules, ranks, compute_device(mesh))
    return module


# -- check ---------------------------------------------------------------------------------------


def _params(plans: list[UnitPlan]) -> list[nn.Parameter]:
    return [param for plan in plans for param in plan.params.values()]


def _check_devices(
    modules: tuple[nn.Module, ...], plans: list[UnitPlan], device: torch.device, mixed: bool
) -> None:
    """Raise for parameters that cannot move to `device` or, unless `mixed`, are on meta in part."""
    names = {p: n for root in modules for n, p in root.named_parameters(remove_duplicate=False)}
    for plan in plans:
        check_devices({names[param]: param for param in plan.params.values()}, device, mixed)


def _facts(modules: tuple[nn.Module, ...], plans: list[UnitPlan], synced: bool) -> list[str]:
    """Facts that must be equal on all ranks: the buckets, and whether rank 0 sends its values."""
    facts = [f"sync_module_states={synced}"]
    names = {module: name for root in modules for name, module in root.named_modules()}
    for plan in plans:
        unit = names[plan.modules[0]] or type(plan.modules[0]).__name__
        for layout in plan.layouts:
            facts.append(
                f"{unit}: {layout.dtype} bucket of {layout.numel}, "
                f"requires_grad={layout.requires_grad}: {layout.contents} ({plan.settings})"
            )
    return facts


# -- apply ---------------------------------------------------------------------------------------


def _apply(
    plan: UnitPlan,
    mesh: DeviceMesh,
    ranks: Ranks,
    alone: LeftAlone,
    spmd: Spmd | None,
    scatter: bool,
    mixed: bool,
    differs: str,
) -> Unit:
    """Make one unit: cut its buckets, free the full parameters, give its modules properties.

    With `scatter`, the segments come from rank 0. `mixed` and `differs` are the unit's entries in
    `FirstValues`.
    """
    device = compute_device(mesh)
    _forget_rnn_weights(plan)
    buckets = []
    for layout in plan.layouts:
        params = [plan.params.pop(slot.name) for slot in layout.slots]
        segment = new_segment(layout, params, plan.settings, device, ranks if scatter else None)
        placed = [Placed.of(param, spmd) for param in params]
        owner = plan.owners[layout.slots[0].name]
        extension = Extension.of(params[0], mesh, owner, plan.settings.precision)
        bucket = Bucket(layout, ranks, plan.settings, segment, device, placed, extension)
        take(bucket, params, filled=scatter)
        if mixed or differs:
            bucket.note_first()
        buckets.append(bucket)
        restore_ties(plan.modules)
    move_buffers(plan.modules, alone.modules, device)
    keep_buffers_in(plan.settings.precision.buffer_dtype, plan.modules, alone.modules)
    unit = Unit(
        plan.modules,
        tuple(buckets),
        mesh,
        plan.reshard_after_forward,
        plan.settings,
        device,
        alone.params,
        alone.modules,
        mixed=mixed,
        differs=differs,
    )
    make_unit(unit)
    return unit


def _forget_rnn_weights(plan: UnitPlan) -> None:
    """Drop the caches of recurrent layers that hold parameters of the unit."""
    taken = set(plan.params.values())
    for module in dict.fromkeys(module for root in plan.modules for module in root.modules()):
        if not taken.isdisjoint(module.parameters(recurse=False)):
            compat.forget_rnn_weights(module)
