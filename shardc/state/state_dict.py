"""State dicts of sharded models and their optimizers, as `torch.distributed.checkpoint.state_dict`.

The module has torch's six functions, signatures and options, for models of `fully_shard`. Every
rank calls the functions, in the same order. Keys are the names of the unsharded, uncompiled model;
values are sharded (for DCP, at any world size), full (on every rank, or with `cpu_offload` on rank
0 only), or local.

A load is checked first, on every rank; unless all ranks can load, all raise and nothing is changed.
Differences to torch: another dtype is an error and not cast; an optimizer that has not stepped
stays without state; `dsd_fqn_modifiers` is not needed, as names are those of `state_dict()`.
"""

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions as TorchOptions
from torch.optim import Optimizer

from shardc.runtime.checks.arguments import check_value, checked
from shardc.state.model_state import ModelLoad, model_state
from shardc.state.names import flattened, prefixes_of
from shardc.state.optimizer_state import OptimizerLoad, existing_state, optimizer_state
from shardc.state.ranks import ModelRanks
from shardc.state.values import Tree, Values, full_values, local_parts, on_host

Optimizers = Optimizer | Iterable[Optimizer]
LOCAL = "_shardc_local"
"""The entry of a local state dict that names the rank of its parts."""


@dataclass
class StateDictOptions(TorchOptions):
    """torch's `StateDictOptions` with one option more; the functions here take torch's class, too.

    Attributes:
        local: this rank's parts as plain 1-D tensors, for `torch.save`: FSDP1's LOCAL_STATE_DICT.
            They load only on the rank that saved them, at the same world size.
    """

    local: bool = False


# -- get -----------------------------------------------------------------------------------------


@checked
def get_model_state_dict(
    model: nn.Module,
    *,
    submodules: set[nn.Module] | None = None,
    options: TorchOptions | None = None,
) -> dict[str, Any]:
    """The parameters and persistent buffers of `model` by name.

    Sharded tensors share memory with the model; full and offloaded tensors are copies. With
    `full_state_dict` and `cpu_offload` rank 0 gets all values and the other ranks get `{}`; one
    full tensor at a time is on the device. Tied parameters stay one tensor under several names.

    Args:
        submodules: take only the entries of these modules.
        options: torch's options, or `StateDictOptions` for local parts.

    Raises:
        ValueError: options exclude each other.
    """
    asked = _checked(options)
    state = model_state(model, asked.ignore_frozen_params)
    if submodules:
        state = _below(state, prefixes_of(model, submodules), asked.keep_submodule_prefixes)
    return _converted(state, ModelRanks.of(model), asked)


@checked
def get_optimizer_state_dict(
    model: nn.Module,
    optimizers: Optimizers,
    *,
    submodules: set[nn.Module] | None = None,
    options: TorchOptions | None = None,
    optim_state_dict: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """The state of one or more optimizers: `{"state": {name: ...}, "param_groups": [...]}`.

    An optimizer that has not stepped gives the state of a first step with zero gradients and step
    count 0, so that DCP has tensors to load into. The optimizer and the gradients do not change.

    Args:
        submodules: take only the state of parameters in these modules.
        options: as for the model; `flatten_optimizer_state_dict` gives one flat dict.
        optim_state_dict: a state dict to convert in place of the optimizer's own: an earlier
            `optimizer.state_dict()`, as it was or changed by hand.

    Raises:
        ValueError: a parameter is not in the model, or options exclude each other.
    """
    asked = _checked(options)
    tree = optimizer_state(model, _listed(optimizers), optim_state_dict)
    if submodules:
        prefixes = prefixes_of(model, submodules)
        tree["state"] = _below(tree["state"], prefixes, keep=True)
        for group in tree["param_groups"]:
            group["params"] = [name for name in group["params"] if name.startswith(prefixes)]
    if asked.flatten_optimizer_state_dict:
        tree = flattened(tree)
    return _converted(tree, ModelRanks.of(model), asked)


@checked
def get_state_dict(
    model: nn.Module,
    optimizers: Optimizers,
    *,
    submodules: set[nn.Module] | None = None,
    options: TorchOptions | None = None,
) -> tuple[dict[str, Any], dict[str, Any]]:
    """The state of a model and of its optimizers: (model state, optimizer state)."""
    return (
        get_model_state_dict(model, submodules=submodules, options=options),
        get_optimizer_state_dict(model, optimizers, submodules=submodules, options=options),
    )


# -- set -----------------------------------------------------------------------------------------


@checked
def set_model_state_dict(
    model: nn.Module,
    model_state_dict: Mapping[str, Any] | None,
    *,
    options: TorchOptions | None = None,
) -> Any:
    """Load a model's state: a dict of `get_model_state_dict`, or of an unsharded or FSDP2 model.

    Every value may be sharded (by shardc or as a DTensor) or full. With `broadcast_from_rank0` (and
    `full_state_dict`) only rank 0's dict counts (other ranks may give None), and one full tensor at
    a time is sent. With `strict=False` names may be missing or unknown.

    Returns:
        `missing_keys` and `unexpected_keys`, as `nn.Module.load_state_dict`.

    Raises:
        RuntimeError: names are missing or unknown, a shape or dtype differs, a parameter is on the
            meta device, or another rank cannot load.
        ValueError: options exclude each other.
    """
    return _load(model, (), {"model": model_state_dict}, options)


@checked
def set_optimizer_state_dict(
    model: nn.Module,
    optimizers: Optimizers,
    optim_state_dict: Mapping[str, Any] | None,
    *,
    options: TorchOptions | None = None,
) -> None:
    """Load an optimizer's state: of `get_optimizer_state_dict`, or of an unsharded or FSDP2 one.

    The dict may be keyed by names or ids, nested or flat, its tensors sharded or full, and may hold
    the state of other parameters, too. A parameter without state in the dict has none afterwards.
    The optimizer keeps the form of its state. An optimizer without state takes a step with zero
    gradients and learning rate, which shows the form.

    Raises:
        RuntimeError: a parameter is in no group (with `strict`), one group's parameters were saved
            with different settings, a shape differs, or another rank cannot load.
        ValueError: a parameter is not in the model, or options exclude each other.
    """
    _load(model, _listed(optimizers), {"optimizer": optim_state_dict}, options)


@checked
def set_state_dict(
    model: nn.Module,
    optimizers: Optimizers,
    *,
    model_state_dict: Mapping[str, Any] | None,
    optim_state_dict: Mapping[str, Any] | None,
    options: TorchOptions | None = None,
) -> Any:
    """Load the state of a model and its optimizers; nothing changes if a rank cannot load both."""
    given = {"model": model_state_dict, "optimizer": optim_state_dict}
    return _load(model, _listed(optimizers), given, options)


def _load(
    model: nn.Module,
    optimizers: tuple[Optimizer, ...],
    given: Mapping[str, Mapping[str, Any] | None],
    options: TorchOptions | None,
) -> Any:
    """Check everything on every rank, agree, then write."""
    asked, ranks = _checked(options), ModelRanks.of(model)
    existing = [(each, existing_state(each)) for each in optimizers]
    error: Exception | None = None
    loads: list[ModelLoad | OptimizerLoad] = []
    try:
        # All messages come before any rank may stop for a reason of its own.
        values = {kind: _values(tree, ranks, asked) for kind, tree in given.items()}
        loads += [
            OptimizerLoad(model, optimizer, state, values["optimizer"], asked.strict, asked.local)
            for optimizer, state in existing
        ]
        if "model" in given:
            loads.append(ModelLoad(model, values["model"], asked.strict, asked.local))
    except Exception as raised:
        error = raised
    ranks.agree(error)
    report = None
    for load in loads:
        report = load.apply()
    return report


# -- options and forms ---------------------------------------------------------------------------


def _checked(options: TorchOptions | None) -> StateDictOptions:
    asked = StateDictOptions(**asdict(options or StateDictOptions()))
    if asked.broadcast_from_rank0 and not asked.full_state_dict:
        raise ValueError("broadcast_from_rank0=True needs full_state_dict=True: rank 0 sends those")
    if asked.local and asked.full_state_dict:
        raise ValueError("local=True (a part) and full_state_dict=True (all of it) exclude another")
    return asked


def _listed(optimizers: Optimizers) -> tuple[Optimizer, ...]:
    if isinstance(optimizers, Optimizer):
        return (optimizers,)
    each = tuple(optimizers)
    for optimizer in each:
        check_value("optimizers: each", optimizer, Optimizer)
    return each


def _below(state: Mapping[str, Any], prefixes: tuple[str, ...], keep: bool) -> dict[str, Any]:
    """The entries under the prefixes; without `keep`, names lose the prefix."""
    return {
        name if keep else name.removeprefix(prefix): value
        for name, value in state.items()
        for prefix in prefixes
        if name.startswith(prefix)
    }


def _converted(tree: Tree, ranks: ModelRanks, asked: StateDictOptions) -> Any:
    if asked.full_state_dict:
        return full_values(tree, ranks, asked.cpu_offload)
    if asked.local:
        tree = {LOCAL: _origin(ranks), **local_parts(tree)}
    return on_host(tree) if asked.cpu_offload else tree


def _origin(ranks: ModelRanks) -> str:
    return ", ".join(f"rank {group.rank()} of {group.size()}" for group in ranks.groups)


def _values(tree: Mapping[str, Any] | None, ranks: ModelRanks, asked: StateDictOptions) -> Values:
    """The dict to load; an error is raised on all ranks, or before any message."""
    if asked.broadcast_from_rank0:
        values = Values.from_first(tree, ranks)
        check_value("the state dict to load", values.tree, Mapping)
        return values
    check_value("the state dict to load", tree, Mapping)
    assert tree is not None
    origin = tree.get(LOCAL)
    if asked.local and origin != _origin(ranks):
        raise RuntimeError(
            f"a local state dict loads on the rank it is from only: this is "
            f"'{_origin(ranks)}', it is from {origin!r}. For another world size save the sharded "
            "state dict with torch.distributed.checkpoint"
        )
    if origin is not None and not asked.local:
        raise RuntimeError(
            f"the state dict holds the local parts of '{origin}': load it with "
            "StateDictOptions(local=True)"
        )
    return Values({key: value for key, value in tree.items() if key != LOCAL}, ranks)
