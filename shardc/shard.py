"""`fully_shard`: turn a module's parameters into shards, in place.

Three steps, and nothing is changed before the first two have passed on every rank: check the
arguments and the model, plan the buckets and agree on the plan, then cut bucket by bucket.
"""

import warnings
import weakref
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy

from shardc.passes.cost import bucket_grain
from shardc.passes.profiles import current_profile
from shardc.runtime import compat
from shardc.runtime.agreement import agree
from shardc.runtime.bucket import Bucket
from shardc.runtime.layout import BucketLayout, Param, plan_buckets
from shardc.runtime.modules import ShardedModule, Unit, make_unit
from shardc.runtime.shard_tensor import ShardTensor
from shardc.units import UnitPolicy, UnitRequest, find_inner_units, owned_parameters

Ignored = Iterable[nn.Parameter] | Iterable[nn.Module]


@dataclass(frozen=True)
class _Plan:
    """One unit to be made: what it takes and how it is laid out."""

    modules: tuple[nn.Module, ...]
    params: dict[str, nn.Parameter]
    layouts: tuple[BucketLayout, ...]
    reshard_after_forward: bool | None


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
        mesh: a 1-D mesh of the ranks to shard over (default: all ranks).
        reshard_after_forward: True frees gathered parameters after the forward and gathers again
            in the backward; False keeps them; None is True except for the outermost unit.
        shard_placement_fn: refused: flat segments have no dim to place.
        mp_policy, offload_policy: torch's policy classes; only their defaults are built yet.
        ignored_params: parameters, or modules whose parameters, stay as they are.
        dp_mesh_dims: not built yet.
        units: inner modules to make units of: "auto" (the elements of every `ModuleList` or
            `Sequential` of two or more modules of one class), a class, a tuple of classes, or a
            callable `module -> bool | dict`, whose dict overrides options for that unit.

    Returns:
        What was given, each module now also a `ShardedModule`.

    Raises:
        ValueError: bad arguments, a module that is sharded already, aliased or cached parameters.
        TypeError: `ignored_params` is not an iterable of parameters or of modules.
        NotImplementedError: an option that is not built yet, by name.
        RuntimeError: no process group, or ranks that call with different models.
    """
    modules = _check_modules(module)
    _check_unbuilt(shard_placement_fn, mp_policy, offload_policy, dp_mesh_dims)
    mesh = _check_mesh(mesh)
    ignored, skipped = _check_ignored(modules, ignored_params)
    ignored |= _ignored_by_units_inside(modules)
    _check_initialized(modules)
    for root in modules:
        for child in root.modules():
            compat.forget_recomputed_weights(child)
    requests = [
        *(request for root in modules for request in find_inner_units(root, units, skipped)),
        UnitRequest(modules, {}),
    ]
    plans = _plan(requests, mesh, reshard_after_forward, ignored, skipped)
    _check_model(modules, [param for plan in plans for param in plan.params.values()])
    facts = [_fact(layout) for plan in plans for layout in plan.layouts]
    agree(mesh.get_group(), "the parameters given to fully_shard", facts)
    for plan in plans:
        _apply(plan, mesh, ignored)
    return module


# -- checks: nothing is changed ------------------------------------------------------------------


def _check_modules(module: Any) -> tuple[nn.Module, ...]:
    modules = tuple(module) if isinstance(module, (list, tuple)) else (module,)
    if not modules:
        raise ValueError("fully_shard got an empty list of modules")
    for item in modules:
        if not isinstance(item, nn.Module):
            raise TypeError(f"fully_shard takes modules, got {type(item).__name__}")
        if isinstance(item, ShardedModule):
            raise ValueError(
                f"fully_shard was already called on this {item._shardc_class.__name__}; "
                "call it once a module, inner modules first"
            )
    if len(set(modules)) != len(modules):
        raise ValueError("fully_shard got the same module twice in one list")
    return modules


def _check_unbuilt(placement: Any, mp: Any, offload: Any, mesh_dims: Any) -> None:
    if placement is not None:
        raise NotImplementedError(
            "shard_placement_fn is not supported: shardc shards flat segments, which have no "
            "tensor dim to place"
        )
    if mesh_dims is not None:
        raise NotImplementedError("dp_mesh_dims is not supported by shardc yet")
    if mp != MixedPrecisionPolicy():
        raise NotImplementedError(f"mp_policy is not supported by shardc yet, got {mp}")
    if isinstance(offload, CPUOffloadPolicy) or offload != OffloadPolicy():
        raise NotImplementedError(f"offload_policy is not supported by shardc yet, got {offload}")


def _check_initialized(modules: tuple[nn.Module, ...]) -> None:
    for root in modules:
        for name, param in root.named_parameters():
            if isinstance(param, nn.parameter.UninitializedParameter):
                raise ValueError(
                    f"parameter '{name}' of a lazy module is not initialized: run a forward first"
                )


def _check_reshard(value: Any, world_size: int) -> bool | None:
    if value is None or isinstance(value, bool):
        return value
    if not isinstance(value, int) or value < 1 or world_size % value:
        raise ValueError(
            f"reshard_after_forward must be a bool, None or a divisor of the world size "
            f"{world_size}, got {value!r}"
        )
    if value not in (1, world_size):
        raise NotImplementedError(
            f"reshard_after_forward={value} (a smaller mesh for the backward) is not supported "
            "by shardc yet; use True or False"
        )
    return value == world_size


_default_meshes: weakref.WeakKeyDictionary[dist.ProcessGroup, DeviceMesh]
_default_meshes = weakref.WeakKeyDictionary()  # one for each life of the process group


def _check_mesh(mesh: DeviceMesh | None) -> DeviceMesh:
    if not dist.is_initialized():
        raise RuntimeError(
            "fully_shard needs a process group: start the script with torchrun and call "
            "torch.distributed.init_process_group() first"
        )
    if mesh is None:
        device = torch.accelerator.current_accelerator()
        kind = "cuda" if device is not None and "nccl" in dist.get_backend() else "cpu"
        world = dist.distributed_c10d.GroupMember.WORLD
        assert world is not None
        if world not in _default_meshes:
            _default_meshes[world] = init_device_mesh(kind, (dist.get_world_size(),))
        mesh = _default_meshes[world]
    if mesh.ndim == 2:
        raise NotImplementedError(
            f"a 2-D mesh (HSDP) is not supported by shardc yet, got shape {tuple(mesh.shape)}"
        )
    if mesh.ndim != 1:
        raise ValueError(f"fully_shard takes a 1-D mesh, got shape {tuple(mesh.shape)}")
    if mesh.device_type not in ("cpu", "cuda"):
        raise NotImplementedError(
            f"shardc runs on 'cpu' and 'cuda' meshes, got '{mesh.device_type}'"
        )
    if mesh.get_coordinate() is None:
        raise ValueError(f"rank {dist.get_rank()} is not part of the mesh {mesh}")
    return mesh


def _check_ignored(
    modules: tuple[nn.Module, ...], ignored: Any
) -> tuple[set[nn.Parameter], set[nn.Module]]:
    """The parameters and modules to leave alone; FSDP1's checks."""
    if ignored is None:
        return set(), set()
    if isinstance(ignored, (nn.Module, Tensor)) or not isinstance(ignored, Iterable):
        raise TypeError(
            f"ignored_params must be an iterable of parameters or modules, got {type(ignored)}"
        )
    items = list(ignored)
    if all(isinstance(item, nn.Parameter) for item in items):
        return set(items), set()
    if not all(isinstance(item, nn.Module) for item in items):
        kinds = sorted({type(item).__name__ for item in items})
        raise TypeError(f"ignored_params must be all parameters or all modules, got {kinds}")
    inside = {m for item in items for m in item.modules()}
    for item in inside:
        if isinstance(item, ShardedModule):
            raise ValueError(
                f"ignored_params contains {item._shardc_class.__name__}, which is sharded already"
            )
    for module in inside & set(modules):
        warnings.warn(
            f"ignored_params contains the {type(module).__name__} given to fully_shard: none of "
            "its parameters will be sharded",
            stacklevel=3,
        )
    return {param for item in inside for param in item.parameters(recurse=False)}, inside


def _ignored_by_units_inside(modules: tuple[nn.Module, ...]) -> set[nn.Parameter]:
    """What an earlier call on an inner module ignored stays ignored."""
    inner = [m for root in modules for m in root.modules() if isinstance(m, ShardedModule)]
    return {param for module in inner for param in module._shardc_unit.ignored}


def _check_model(modules: tuple[nn.Module, ...], params: list[nn.Parameter]) -> None:
    names = {p: n for root in modules for n, p in root.named_parameters(remove_duplicate=False)}
    rnn_refs = [
        id(ref)
        for root in modules
        for m in root.modules()
        for ref in compat.rnn_weight_references(m)
    ]
    for param in params:
        _check_parameter(names[param], param)
        foreign = [ref for ref in weakref.getweakrefs(param) if id(ref) not in rnn_refs]
        if foreign or compat.is_in_use(param):
            raise ValueError(
                f"parameter '{names[param]}' is in use by an autograd graph, a weak reference or a "
                "compiled function: shard before the model's first forward, or drop its outputs"
            )
    managed: dict[int, nn.Parameter] = {}
    for param in params:
        managed.setdefault(compat.storage_id(param) or -1, param)
    for root in modules:
        for prefix, module in root.named_modules():
            for attribute, tensor, registered in _held_tensors(module):
                _check_sole_owner(
                    f"{prefix}.{attribute}".lstrip("."), tensor, registered, managed, names
                )


def _check_sole_owner(
    name: str,
    tensor: Tensor,
    registered: bool,
    managed: dict[int, nn.Parameter],
    names: dict[nn.Parameter, str],
) -> None:
    storage = compat.storage_id(tensor)
    param = managed.get(storage) if storage is not None else None
    if param is None:
        return
    if param is not tensor:
        raise ValueError(
            f"'{name}' shares its storage with parameter '{names[param]}': sharding would part "
            "them. Register one of them only, or clone it"
        )
    if not registered:
        raise ValueError(
            f"'{name}' keeps a reference to parameter '{names[param]}' outside the module's "
            "parameters, which would not see gathered values: read it from its module instead"
        )


def _check_parameter(name: str, param: nn.Parameter) -> None:
    if type(param.data) is not Tensor:
        raise NotImplementedError(
            f"parameter '{name}' is a {type(param.data).__name__}; shardc shards plain tensors"
        )
    if param.layout != torch.strided or not param.is_contiguous():
        raise NotImplementedError(
            f"parameter '{name}' is not contiguous (stride {tuple(param.stride())}); make it so: "
            "param.data = param.data.contiguous()"
        )


def _held_tensors(module: nn.Module) -> Iterable[tuple[str, Tensor, bool]]:
    """(name, tensor, whether registered): parameters, buffers, tensors in plain attributes."""
    for name, param in module.named_parameters(recurse=False):
        yield name, param, True
    for name, buffer in module.named_buffers(recurse=False):
        yield name, buffer, True
    if isinstance(module, nn.RNNBase):  # keeps `_flat_weights`, which gets a property of its own
        return
    for name, value in vars(module).items():
        if name in ("_parameters", "_buffers"):
            continue
        entries = value.values() if isinstance(value, dict) else value
        for entry in entries if isinstance(value, (list, tuple, dict, set)) else [value]:
            if isinstance(entry, Tensor):
                yield name, entry, False


# -- plan ----------------------------------------------------------------------------------------


def _plan(
    requests: list[UnitRequest],
    mesh: DeviceMesh,
    reshard: bool | int | None,
    ignored: set[nn.Parameter],
    skipped: set[nn.Module],
) -> list[_Plan]:
    plans: list[_Plan] = []
    taken = set(ignored)
    grain = bucket_grain(mesh.size(), current_profile(mesh.device_type))
    for request in requests:
        options = {"reshard_after_forward": reshard, **request.options}
        mp, offload = options.get("mp_policy"), options.get("offload_policy")
        _check_unbuilt(None, mp or MixedPrecisionPolicy(), offload or OffloadPolicy(), None)
        owned = owned_parameters(request.modules, skipped)
        params = {
            owners[0].name: param
            for param, owners in owned.items()
            if param not in taken and not isinstance(param, ShardTensor)
        }
        taken |= set(params.values())
        described = [
            Param(name, tuple(param.shape), param.dtype, param.requires_grad)
            for name, param in params.items()
        ]
        plans.append(
            _Plan(
                request.modules,
                params,
                plan_buckets(described, mesh.size(), grain),
                _check_reshard(options["reshard_after_forward"], mesh.size()),
            )
        )
    return plans


def _fact(layout: BucketLayout) -> str:
    slots = ", ".join(f"{slot.name}{list(slot.shape)}" for slot in layout.slots)
    return f"{layout.dtype} bucket of {layout.numel}, requires_grad={layout.requires_grad}: {slots}"


# -- apply ---------------------------------------------------------------------------------------


def _apply(plan: _Plan, mesh: DeviceMesh, ignored: set[nn.Parameter]) -> None:
    """Make one unit: cut its buckets, free the full parameters, give its modules properties."""
    device = _device(mesh)
    for root in plan.modules:
        for module in root.modules():
            compat.forget_rnn_weights(module)
    buckets = []
    for layout in plan.layouts:
        params = [plan.params[slot.name] for slot in layout.slots]
        where = torch.device("meta") if any(param.is_meta for param in params) else device
        segment = torch.zeros(layout.segment, dtype=layout.dtype, device=where)
        group = compat.group_name(mesh.get_group())
        bucket = Bucket(layout, group, mesh.get_local_rank(), segment, plan.modules)
        bucket.take(params)
        buckets.append(bucket)
    _move_buffers(plan.modules, device)
    flag = plan.reshard_after_forward
    unit = Unit(plan.modules, tuple(buckets), mesh, flag, frozenset(ignored))
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
