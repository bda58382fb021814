"""What `fully_shard` refuses, and why: checks that only read, before anything is changed."""

import gc
import warnings
import weakref
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy, OffloadPolicy
from torch.distributed.tensor import DTensor

from shardc.runtime import compat
from shardc.runtime.modules import ShardedModule
from shardc.runtime.tensor_parallel import Spmd, unsupported


def check_modules(module: Any) -> tuple[nn.Module, ...]:
    """The modules of one unit. Raises where they are none, sharded already, or given twice."""
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


def check_placement(placement: Any) -> None:
    """Raise NotImplementedError for a placement, which flat segments do not have."""
    if placement is not None:
        raise NotImplementedError(
            "shard_placement_fn is not supported: shardc shards flat segments, which have no "
            "tensor dim to place"
        )


def check_policies(mp: Any, offload: Any) -> None:
    """Raise TypeError or ValueError for what is no policy."""
    if not isinstance(mp, MixedPrecisionPolicy):
        raise TypeError(
            "mp_policy must be a MixedPrecisionPolicy (shardc's or torch.distributed.fsdp's), "
            f"got {type(mp).__name__}"
        )
    for name, value in vars(mp).items():
        if name.endswith("_dtype") and value is not None and not value.is_floating_point:
            raise ValueError(f"mp_policy: {name} must be a floating-point dtype, got {value}")
    if not isinstance(offload, OffloadPolicy):
        raise TypeError(
            f"offload_policy must be an OffloadPolicy or CPUOffloadPolicy, "
            f"got {type(offload).__name__}"
        )


def check_initialized(modules: tuple[nn.Module, ...]) -> None:
    """Raise ValueError for the parameters of a lazy module."""
    for root in modules:
        for name, param in root.named_parameters():
            if isinstance(param, nn.parameter.UninitializedParameter):
                raise ValueError(
                    f"parameter '{name}' of a lazy module is not initialized: run a forward first"
                )


@dataclass(frozen=True)
class LeftAlone:
    """The parameters and modules below those given to `fully_shard` that stay as they are."""

    params: frozenset[nn.Parameter]
    modules: frozenset[nn.Module]


def check_ignored(modules: tuple[nn.Module, ...], ignored: Any) -> LeftAlone:
    """What `ignored` says to leave alone (FSDP1's checks), and what is left to others anyway.

    That is what an earlier call on an inner module ignored, and modules that DDP or torch's
    `replicate` keeps equal by itself.

    Raises:
        TypeError: `ignored` is not an iterable of parameters or of modules.
        ValueError: it contains a sharded module, or one of `modules` itself is replicated.
    """
    params, skipped = _read_ignored(modules, ignored)
    for module in (m for root in modules for m in root.modules()):
        if isinstance(module, ShardedModule):
            params |= module._shardc_unit.ignored
            skipped |= module._shardc_unit.skipped
        elif compat.is_replicated(module):
            if module in modules:
                raise ValueError(
                    f"the {type(module).__name__} given to fully_shard is replicated by DDP or "
                    "replicate() already: use one of the two"
                )
            skipped |= set(module.modules())
            params |= set(module.parameters())
    return LeftAlone(frozenset(params), frozenset(skipped))


def _read_ignored(
    modules: tuple[nn.Module, ...], ignored: Any
) -> tuple[set[nn.Parameter], set[nn.Module]]:
    """The parameters, and the modules, that `ignored` names."""
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
            stacklevel=4,
        )
    return {param for item in inside for param in item.parameters(recurse=False)}, inside


def check_model(
    modules: tuple[nn.Module, ...],
    params: list[nn.Parameter],
    ranks: Sequence[int],
    spmd: Spmd | None,
) -> None:
    """Raise where parameters cannot be cut over global `ranks`, or something else holds them."""
    names = {p: n for root in modules for n, p in root.named_parameters(remove_duplicate=False)}
    known = {
        id(ref)
        for root in modules
        for m in root.modules()
        for ref in compat.rnn_weight_references(m)
    }
    for param in params:
        _check_parameter(names[param], param, ranks, spmd)
        if _is_held(param, known) and _is_held_after_collection(param, known):
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


def _is_held(param: nn.Parameter, known: Collection[int]) -> bool:
    """Whether a live graph leads to `param`, or a weak reference that is not `known` by id."""
    foreign = [ref for ref in weakref.getweakrefs(param) if id(ref) not in known]
    return bool(foreign) or compat.is_in_graph(param)


def _is_held_after_collection(param: nn.Parameter, known: Collection[int]) -> bool:
    """The same, but not by garbage: whether that was found yet is chance."""
    gc.collect()
    return _is_held(param, known)


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


def _check_parameter(
    name: str, param: nn.Parameter, ranks: Sequence[int], spmd: Spmd | None
) -> None:
    kind = type(param.data).__name__
    if isinstance(param, DTensor):
        why = unsupported(param, ranks, spmd)
        if why is not None:
            raise NotImplementedError(
                f"parameter '{name}' is a {kind} and cannot be sharded: {why}"
            )
    elif type(param.data) is not Tensor:
        gathers = any(hasattr(param, f"fsdp_{when}_all_gather") for when in ("pre", "post"))
        extra = ", and calls no fsdp_pre_all_gather or fsdp_post_all_gather" if gathers else ""
        raise NotImplementedError(
            f"parameter '{name}' is a {kind}; shardc shards plain tensors and DTensors{extra}"
        )
    elif spmd is not None:
        raise ValueError(
            f"parameter '{name}' is a plain tensor; with dp_mesh_dims all must be DTensors on the "
            "whole mesh: use torch.distributed.tensor.distribute_module"
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
