"""Refusals of `fully_shard`: checks that only read, before anything is changed."""

import gc
import weakref
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Annotated, Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy, OffloadPolicy

from shardc.runtime import compat
from shardc.runtime.checks.arguments import Dtype, Must, check_value, shown
from shardc.runtime.checks.telling import warn
from shardc.runtime.checks.values import Microscaled
from shardc.runtime.modules.modules import ShardedModule
from shardc.runtime.tensor.extension import extends_gather, why_not_extended
from shardc.runtime.tensor.shard_tensor import ShardTensor
from shardc.runtime.tensor.tensor_parallel import Spmd, unsupported


def check_modules(module: Any) -> tuple[nn.Module, ...]:
    """The modules of one unit. Raises for no module, a sharded module, or one given twice."""
    modules = tuple(module) if isinstance(module, (list, tuple)) else (module,)
    if not modules:
        raise ValueError(f"fully_shard: module must be a module or a list of some, got {module}")
    for item in modules:
        if not isinstance(item, nn.Module):
            raise TypeError(
                f"fully_shard: module must be a module or a list of modules, got {shown(item)}"
            )
        if isinstance(item, ShardedModule):
            raise ValueError(
                f"fully_shard was already called on this {item._shardc_class.__name__}; "
                "call it once a module, inner modules first"
            )
        around = _unit_around(item)
        if around is not None:
            raise ValueError(
                f"fully_shard was already called on the {type(around).__name__} around this "
                f"{type(item).__name__}, whose parameters are in that unit: call it on inner "
                "modules first, or once with units="
            )
    if len(set(modules)) != len(modules):
        raise ValueError("fully_shard got the same module twice in one list")
    return modules


def _unit_around(module: nn.Module) -> nn.Module | None:
    """The module of a unit around `module`, if all parameters of `module` are sharded; or None."""
    params = list(module.parameters())
    if not all(isinstance(param, ShardTensor) for param in params):
        return None
    roots = {root for param in params for root in param._slot.bucket.owner.modules}  # type: ignore[attr-defined]
    return next((root for root in roots if module in set(root.modules())), None)


def check_policies(mp: Any, offload: Any) -> None:
    """Raise TypeError, ValueError or NotImplementedError for a policy that shardc cannot take."""
    if getattr(mp, "param_dtype_override_fn", None) is not None:  # torch 2.15
        raise NotImplementedError(
            "mp_policy has a param_dtype_override_fn, and a unit of shardc has one param_dtype: "
            "put the parameters that keep their dtype into a unit of their own (units=, or another "
            "fully_shard) with another mp_policy"
        )
    for policy, given, kind in (
        ("mp_policy", mp, MixedPrecisionPolicy),
        ("offload_policy", offload, OffloadPolicy),
    ):
        check_value(policy, given, kind)
        for name, value in vars(given).items():
            hint = _WIRE.get(name, Dtype | None if "dtype" in name else bool)
            check_value(f"{policy}: {name}", value, hint)
    form = getattr(mp, "gather_wire_dtype", None)
    if isinstance(form, str) and getattr(mp, "wire_seed", None) is not None:
        raise ValueError(
            f"mp_policy: wire_seed={mp.wire_seed} rounds at random, and gather_wire_dtype={form!r} "
            "is a format that rounds to the nearest: leave wire_seed out, or gather in torch.int8 "
            "or torch.float8_e4m3fn"
        )


_FLOAT8 = torch.float8_e4m3fn
_WIRE: dict[str, object] = {
    "gather_wire_dtype": Annotated[
        torch.dtype, Must("torch.int8, torch.float8_e4m3fn", (torch.int8, _FLOAT8).__contains__)
    ]
    | Microscaled
    | None,
    "reduce_wire_dtype": Annotated[torch.dtype, Must("torch.int8", (torch.int8,).__contains__)]
    | None,
    "wire_block": Annotated[
        int, Must("a multiple of 16 from 16 to 4096", lambda n: n % 16 == 0 and 16 <= n <= 4096)
    ],
    "wire_seed": Annotated[int, Must("a whole number of at least 0", lambda n: n >= 0)] | None,
}
"""The values that the fields of `MixedPrecisionPolicy` for the wire may have."""


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
    """Parameters and modules that `fully_shard` leaves as they are, below the modules given."""

    params: frozenset[nn.Parameter]
    modules: frozenset[nn.Module]


def check_ignored(
    modules: tuple[nn.Module, ...], ignored: Any, whole_model: bool = False
) -> LeftAlone:
    """Collect the parameters and modules that stay as they are, with FSDP1's checks of `ignored`.

    Three kinds stay: the parts in `ignored`, the parts that an earlier call on an inner module
    ignored, and modules that DDP or torch's `replicate` keeps equal. A call on one part of a model
    is often given the ignored parts of the whole model. So a part outside `modules` is an error
    only where `modules` are the `whole_model`.

    Raises:
        TypeError: `ignored` is not an iterable of parameters or of modules.
        ValueError: `ignored` contains a sharded module, or a part that is not in the model; or one
            of `modules` is itself replicated.
    """
    params, skipped = _read_ignored(modules, ignored)
    if whole_model:
        _check_known(modules, params, skipped)
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
    if isinstance(ignored, (nn.Module, Tensor, str)) or not isinstance(ignored, Iterable):
        raise TypeError(
            f"ignored_params must be a list of parameters or of modules, got {shown(ignored)}"
        )
    items = list(ignored)
    if all(isinstance(item, nn.Parameter) for item in items):
        return set(items), set()
    if not all(isinstance(item, nn.Module) for item in items):
        kinds = sorted({type(item).__name__ for item in items})
        raise TypeError(
            f"ignored_params must be all parameters or all modules, got {kinds}: look names up by "
            "model.get_parameter(name) or model.get_submodule(name)"
        )
    inside = {m for item in items for m in item.modules()}
    for item in inside:
        if isinstance(item, ShardedModule):
            raise ValueError(
                f"ignored_params contains {item._shardc_class.__name__}, which is sharded already"
            )
    for module in inside & set(modules):
        warn(
            f"ignored_params contains the {type(module).__name__} given to fully_shard: none of "
            "its parameters will be sharded"
        )
    return {param for item in inside for param in item.parameters(recurse=False)}, inside


def _check_known(
    modules: tuple[nn.Module, ...], params: Iterable[nn.Parameter], skipped: Iterable[nn.Module]
) -> None:
    inside = {m for root in modules for m in root.modules()}
    held = {param for module in inside for param in module.parameters(recurse=False)}
    for item in (*(m for m in skipped if m not in inside), *(p for p in params if p not in held)):
        raise ValueError(
            f"ignored_params contains {shown(item)} that is not in the "
            f"{type(modules[0]).__name__} given to fully_shard: take it out"
        )


def check_model(
    modules: tuple[nn.Module, ...],
    params: list[nn.Parameter],
    ranks: Sequence[int],
    world_size: int,
    spmd: Spmd | None,
) -> None:
    """Raise where parameters cannot be cut, or something else holds them.

    `ranks` are numbers in the whole job, copies included; `world_size` of them share a parameter.
    """
    names = {p: n for root in modules for n, p in root.named_parameters(remove_duplicate=False)}
    known = {
        id(ref)
        for root in modules
        for m in root.modules()
        for ref in compat.rnn_weight_references(m)
    }
    for param in params:
        _check_parameter(names[param], param, ranks, world_size, spmd)
        if _is_held(param, known):
            gc.collect()  # garbage may hold it by chance
            if _is_held(param, known):
                raise ValueError(
                    f"parameter '{names[param]}' is in use by an autograd graph, a weak reference "
                    "or a compiled function: shard before the model's first forward, or drop its "
                    "outputs"
                )
    _check_tables(modules, names, set(params))
    _check_sole_owners(modules, params, names)


def _is_held(param: nn.Parameter, known: Collection[int]) -> bool:
    """Whether an autograd graph or a weak reference, except `known` ids, leads to `param`."""
    foreign = [ref for ref in weakref.getweakrefs(param) if id(ref) not in known]
    return bool(foreign) or compat.is_in_graph(param)


def _check_sole_owners(
    modules: tuple[nn.Module, ...], params: list[nn.Parameter], names: dict[nn.Parameter, str]
) -> None:
    managed: dict[int, nn.Parameter] = {}
    for param in params:
        managed.setdefault(compat.storage_id(param) or -1, param)
    for name, tensor, registered in _held_tensors(modules):
        storage = compat.storage_id(tensor)
        owner = managed.get(storage) if storage is not None else None
        if owner is not None and owner is not tensor:
            raise ValueError(
                f"'{name}' shares its storage with parameter '{names[owner]}': sharding would part "
                "them. Register one of them only, or clone it"
            )
        if owner is not None and not registered:
            raise ValueError(
                f"'{name}' keeps a reference to parameter '{names[owner]}' outside the module's "
                "parameters, which would not see gathered values: read it from its module instead"
            )


def _check_parameter(
    name: str, param: nn.Parameter, ranks: Sequence[int], world_size: int, spmd: Spmd | None
) -> None:
    kind = type(param.data).__name__
    why: str | None = None
    if compat.is_dtensor(param):
        reason = unsupported(param, ranks, spmd)
        why = reason and f"is a {kind} and cannot be sharded: {reason}"
    elif extends_gather(param) and spmd is None:
        reason = why_not_extended(param, world_size)
        why = reason and f"is a {kind} and cannot be sharded: {reason}"
    elif type(param).__module__.startswith("bitsandbytes."):
        why = (
            f"is a {type(param).__name__} of bitsandbytes: packed bytes, whose scales lie beside "
            "them. Name it in ignored_params: every rank keeps it whole"
        )
    elif type(param.data) is not Tensor:
        why = (
            f"is a {kind}; shardc shards plain tensors, DTensors and subclasses with "
            "fsdp_pre_all_gather and fsdp_post_all_gather: name it in ignored_params"
        )
    elif spmd is not None:
        raise ValueError(
            f"parameter '{name}' is a plain tensor; with dp_mesh_dims all must be DTensors on the "
            "whole mesh: use torch.distributed.tensor.distribute_module"
        )
    if why is None and param.layout != torch.strided:
        why = (
            f"has the layout {param.layout}; shardc shards torch.strided ones: name it in "
            "ignored_params"
        )
    elif why is None and not param.is_contiguous():
        why = (
            f"is not contiguous (stride {tuple(param.stride())}); make it so: "
            "param.data = param.data.contiguous()"
        )
    if why is not None:
        raise NotImplementedError(f"parameter '{name}' {why}")


def _check_tables(
    modules: Iterable[nn.Module], names: dict[nn.Parameter, str], params: Collection[nn.Parameter]
) -> None:
    """Raise for embeddings with sparse gradients, or with a forward that writes to the table."""
    for module in (module for root in modules for module in root.modules()):
        if not isinstance(module, (nn.Embedding, nn.EmbeddingBag)):
            continue
        # `module.weight` is not read: it would compute a weight with a parametrization.
        table = dict(module.named_parameters(recurse=False)).get("weight")
        if table is None or table not in params:
            continue
        why = None
        if module.sparse:
            why = (
                "sparse=True, and shardc reduces dense gradients: set sparse=False. Compiled, rows "
                "of a large table are fetched and returned (option 'embedding_rows')"
            )
        elif module.max_norm is not None:
            why = (
                f"max_norm={module.max_norm}, which its forward writes to the table, of which each "
                "rank keeps a part: set max_norm=None"
            )
        if why is not None:
            raise NotImplementedError(
                f"parameter '{names[table]}' is the table of a {type(module).__name__} "
                f"with {why}; or name it in ignored_params"
            )


def _held_tensors(modules: Iterable[nn.Module]) -> Iterator[tuple[str, Tensor, bool]]:
    """The parameters, buffers and tensors in attributes: (name, tensor, whether registered)."""
    for prefix, module in (named for root in modules for named in root.named_modules()):
        start = prefix and f"{prefix}."
        for name, param in module.named_parameters(recurse=False):
            yield start + name, param, True
        for name, buffer in module.named_buffers(recurse=False):
            yield start + name, buffer, True
        if isinstance(module, nn.RNNBase):  # its `_flat_weights` becomes a property
            continue
        for name, value in vars(module).items():
            if name not in ("_parameters", "_buffers"):
                yield from ((start + name, tensor, False) for tensor in _tensors_in(value, set()))


def _tensors_in(value: Any, seen: set[int]) -> Iterator[Tensor]:
    """The tensors in `value`, also in nested containers."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, (list, tuple, dict, set)) and id(value) not in seen:
        seen.add(id(value))
        for entry in value.values() if isinstance(value, dict) else value:
            yield from _tensors_in(entry, seen)
