"""Names of entries of a state dict: as in the unsharded, uncompiled model.

An optimizer's state dict is keyed by ids (positions, as in `Optimizer.state_dict`) or by names, and
is nested or flat (`{"state.fc.weight.exp_avg": ...}`). The functions here only rename: values stay
the same objects, dicts are new.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal

from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from shardc.optim.first_state import parameters_of
from shardc.runtime.checks.arguments import checked, shown
from shardc.runtime.checks.words import plural

_WRAPPERS = ("_orig_mod", "_checkpoint_wrapped_module")
"""The parts that `torch.compile` and `checkpoint_wrapper` put into names."""


def canonical_name(model: nn.Module, key: str) -> str:
    """The name without the parts that wrappers add (`torch.compile`, `checkpoint_wrapper`, DDP)."""
    at: nn.Module | None = model
    kept = []
    for part in key.split("."):
        of_ddp = part == "module" and isinstance(at, DistributedDataParallel)
        if part not in _WRAPPERS and not of_ddp:
            kept.append(part)
        at = _child(at, part)
    return ".".join(kept)


def _child(module: nn.Module | None, name: str) -> nn.Module | None:
    """The submodule `name`, also inside a wrapper that leaves its own name out of keys."""
    while module is not None and name not in module._modules:
        module = next((module._modules[w] for w in _WRAPPERS if w in module._modules), None)
    return None if module is None else module._modules[name]


def parameter_names(model: nn.Module) -> dict[Tensor, list[str]]:
    """All names of every parameter, the first one first; a tied parameter has several."""
    names: dict[Tensor, list[str]] = {}
    for key, param in model.named_parameters(remove_duplicate=False):
        names.setdefault(param, []).append(canonical_name(model, key))
    return names


def prefixes_of(model: nn.Module, submodules: Iterable[nn.Module]) -> tuple[str, ...]:
    """The prefixes of the names of the entries of `submodules`."""
    wanted = set(submodules)
    return tuple(
        f"{canonical_name(model, name)}."
        for name, module in model.named_modules()
        if module in wanted
    )


# -- ids and names -------------------------------------------------------------------------------


@checked
def rekey_optimizer_state_dict(
    state_dict: Mapping[str, Any],
    keys: Literal["names", "ids"],
    model: nn.Module,
    optimizer: Optimizer | None = None,
) -> dict[str, Any]:
    """An optimizer's state dict keyed by parameter names, or by ids as `load_state_dict` takes it.

    FSDP1 calls it `rekey_optim_state_dict`. Neither the model nor the optimizer need be sharded.
    A tied parameter has one entry, under its first name; any of its names is understood.

    Args:
        state_dict: `{"state": ..., "param_groups": ...}`, keyed either way.
        keys: the kind of the result's keys.
        model: gives the names.
        optimizer: gives the ids; without it an id is a position in `model.parameters()`.

    Raises:
        ValueError: a key belongs to no parameter (the message names the key), a parameter is not in
            the model, or the dict lacks one of the two entries.
    """
    for entry in ("state", "param_groups"):
        if entry not in state_dict:
            raise ValueError(
                f"rekey_optimizer_state_dict: state_dict has no '{entry}', got "
                f"{shown(list(state_dict))}: give the result of optimizer.state_dict()"
            )
    if keys == ("ids" if is_keyed_by_id(state_dict) else "names"):
        return rekeyed(state_dict, _Same())
    names = parameter_names(model)
    params = list(model.parameters()) if optimizer is None else parameters_of(optimizer)
    check_in_model(params, names)
    table: dict[Any, Any] = {}
    for index, param in enumerate(params):
        for name in names[param]:
            if keys == "ids":
                table[name] = index
            else:
                table.setdefault(index, name)
    return rekeyed(state_dict, table)


class _Same(dict[Any, Any]):
    def __missing__(self, key: Any) -> Any:
        return key


def rekeyed(state_dict: Mapping[str, Any], table: Mapping[Any, Any]) -> dict[str, Any]:
    """`state_dict` with keys replaced by `table`; parameters that map to one key are merged."""

    def new(key: Any) -> Any:
        try:
            return table[key]
        except KeyError:
            raise ValueError(
                f"the optimizer state dict has an entry for {key!r}, which is not a parameter of "
                f"this model and optimizer ({plural(len(set(table.values())), 'parameter')}); "
                "rename or remove it"
            ) from None

    return {
        **state_dict,
        "state": {new(key): value for key, value in state_dict["state"].items()},
        "param_groups": [
            {**group, "params": list(dict.fromkeys(new(key) for key in group["params"]))}
            for group in state_dict["param_groups"]
        ],
    }


def is_keyed_by_id(state_dict: Mapping[str, Any]) -> bool:
    """Whether the keys are positions, as in `Optimizer.state_dict`."""
    keys = [*state_dict["state"], *(k for g in state_dict["param_groups"] for k in g["params"])]
    return any(isinstance(key, int) for key in keys)


def check_in_model(params: Sequence[Tensor], names: Mapping[Tensor, Any]) -> None:
    """Raise ValueError for a parameter without a name."""
    for index, param in enumerate(params):
        if param not in names:
            raise ValueError(
                f"parameter {index} of the optimizer, of shape {tuple(param.shape)}, is not in the "
                "model: give the whole model, and an optimizer made with its parameters (after "
                "fully_shard, if they are DTensors)"
            )


# -- flat and nested -----------------------------------------------------------------------------


def flattened(state_dict: Mapping[str, Any]) -> dict[str, Any]:
    """`{"state.NAME.KEY": ..., "param_groups.NAME.KEY": ...}`, as torch flattens it."""
    flat: dict[str, Any] = {}

    def add(prefix: str, value: Any) -> None:
        if isinstance(value, Mapping):
            for key, inner in value.items():
                add(f"{prefix}.{key}", inner)
        else:
            flat[prefix] = value

    for name, state in state_dict["state"].items():
        add(f"state.{name}", state)
    for group in state_dict["param_groups"]:
        for name in group["params"]:
            for key, value in group.items():
                if key not in ("params", "param_names"):
                    flat[f"param_groups.{name}.{key}"] = value
    return flat


def unflattened(flat: Mapping[str, Any], names: Iterable[str]) -> dict[str, Any]:
    """The nested form of a dict from `flattened`, with one group for each parameter in `names`.

    Entries of other parameters are left out.
    """
    known = set(names)
    state: dict[str, Any] = {}
    groups: dict[str, dict[str, Any]] = {}
    for key, value in flat.items():
        kind, _, rest = key.partition(".")
        parts = rest.split(".")
        lengths = range(len(parts) - 1, 0, -1)
        at = next((n for n in lengths if ".".join(parts[:n]) in known), None)
        if at is None:
            continue
        name, path = ".".join(parts[:at]), parts[at:]
        group = groups.setdefault(name, {"params": [name]})
        if kind == "param_groups":
            group[".".join(path)] = value
            continue
        inner = state.setdefault(name, {})
        for part in path[:-1]:
            inner = inner.setdefault(part, {})
        inner[path[-1]] = value
    return {"state": state, "param_groups": list(groups.values())}
