"""An optimizer's state by parameter names, and its load into the form that the optimizer uses.

The optimizer chooses whether a state is sharded as its parameter, or whole on every rank. A full
tensor does not always show the choice (a scalar parameter's step count). So a load writes into
existing state. An optimizer without state takes a step with zero gradients and learning rate, which
makes a state of the right form.
"""

from collections.abc import Iterable, Mapping
from typing import Any

from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from shardc.optim.first_state import first_state, map_leaves, parameters_of
from shardc.optim.given import OWN
from shardc.optim.whole_tensor import WholeTensorOptimizer
from shardc.runtime.checks.words import plural
from shardc.runtime.tensor.shard_tensor import ShardTensor
from shardc.state.model_state import differences, raise_for
from shardc.state.names import (
    canonical_name,
    check_in_model,
    is_keyed_by_id,
    parameter_names,
    rekeyed,
    unflattened,
)
from shardc.state.values import Values, part_like, whole, write_value

# -- get -----------------------------------------------------------------------------------------


def optimizer_state(
    model: nn.Module, optimizers: Iterable[Optimizer], given: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """The state of all optimizers in one dict, by canonical names.

    `given` replaces the state dict of a single optimizer.

    Raises:
        ValueError: a parameter is not in the model, or `given` comes with several optimizers.
    """
    optimizers = tuple(optimizers)
    if given is not None and len(optimizers) != 1:
        raise ValueError(
            f"optim_state_dict= is the state dict of one optimizer, got "
            f"{plural(len(optimizers), 'optimizer')}; call it for each"
        )
    merged: dict[str, Any] = {"state": {}, "param_groups": []}
    for optimizer in optimizers:
        named = by_name(given if given is not None else _state_dict(optimizer), model, optimizer)
        merged["state"].update(named.pop("state"))
        merged["param_groups"] += named.pop("param_groups")
        merged.update(named)
    return merged


def _state_dict(optimizer: Optimizer) -> dict[str, Any]:
    if isinstance(optimizer, WholeTensorOptimizer):
        return optimizer.first_or_state_dict()
    if optimizer.state:
        return optimizer.state_dict()
    first = first_state(optimizer)
    optimizer.state.update(first.state)
    try:
        made = optimizer.state_dict()
    finally:
        optimizer.state.clear()
    for group, added in zip(made["param_groups"], first.settings, strict=True):
        group.update(added)
    return made


def existing_state(optimizer: Optimizer) -> Mapping[Any, Any]:
    """The optimizer's state to load into, or the state of a first step. Every rank must call it."""
    if isinstance(optimizer, WholeTensorOptimizer):
        return optimizer.first_or_state()[0]
    return optimizer.state or first_state(optimizer).state


def by_name(state: Mapping[str, Any], model: nn.Module, optimizer: Optimizer) -> dict[str, Any]:
    """A state dict of `optimizer` keyed by canonical names, from ids or from other names."""
    names, params = parameter_names(model), parameters_of(optimizer)
    check_in_model(params, names)
    if is_keyed_by_id(state):
        table: dict[Any, str] = {index: names[param][0] for index, param in enumerate(params)}
        table |= {key: key for key in state["state"] if not isinstance(key, int)}
    else:
        keys = [*state["state"], *(key for g in state["param_groups"] for key in g["params"])]
        first = {name: several[0] for several in names.values() for name in several}
        clean = {key: canonical_name(model, key) for key in keys}
        table = {key: first.get(name, name) for key, name in clean.items()}
    named = rekeyed(state, table)
    for group in named["param_groups"]:
        if "param_names" in group:
            group["param_names"] = [canonical_name(model, name) for name in group["param_names"]]
    return named


# -- set -----------------------------------------------------------------------------------------


class OptimizerLoad:
    """A checked state dict of an optimizer, ready to load.

    Args:
        existing: the optimizer's state, or its `first_state`; the load writes to it.
        values: the state dict of all optimizers, keyed by names or ids, nested or flat.

    Raises:
        RuntimeError: the optimizer cannot load it; the message tells the entries and the reasons.
        ValueError: a parameter is not in the model.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer,
        existing: Mapping[Any, Any],
        values: Values,
        strict: bool,
        local: bool,
    ) -> None:
        self.model, self.optimizer, self.existing = model, optimizer, existing
        self.values, self.strict, self.local = values, strict, local
        self.params = parameters_of(optimizer)
        self.names = parameter_names(model)
        check_in_model(self.params, self.names)
        tree = values.tree
        if not tree:
            raise RuntimeError(
                "the optimizer state dict is empty; if rank 0 has it, use full_state_dict=True and "
                "broadcast_from_rank0=True"
            )
        if "state" not in tree:
            known = [name for param in self.params for name in self.names[param]]
            tree = unflattened(tree, known)
        self.tree = by_name(tree, model, optimizer)
        self.group_of = {
            name: group for group in self.tree["param_groups"] for name in group["params"]
        }
        what = f"loading the state of {type(optimizer).__name__}"
        raise_for(what, self._problems())

    def _name(self, param: Tensor) -> str:
        return self.names[param][0]

    def _problems(self) -> list[str]:
        found: list[str] = []
        missing = [self._name(p) for p in self.params if self._name(p) not in self.group_of]
        if self.strict and missing:
            found.append(
                f"no parameter group has '{missing[0]}' ({len(missing)} in all are missing; "
                "strict=False leaves them without state)"
            )
        for number, group in enumerate(self.optimizer.param_groups):
            found += self._contradictions(number, self._sources(group))
        for param in self.params:
            name = self._name(param)
            given = self.tree["state"].get(name, {})
            found += self._misfits(name, self.existing.get(param, {}), given)
        return found

    def _sources(self, group: Mapping[str, Any]) -> list[Mapping[str, Any]]:
        """The given groups that hold parameters of `group`, each once."""
        named = [self._name(p) for p in group["params"]]
        found = {id(self.group_of[n]): self.group_of[n] for n in named if n in self.group_of}
        return list(found.values())

    def _contradictions(self, number: int, sources: list[Mapping[str, Any]]) -> list[str]:
        for source in sources[1:]:
            for key, value in source.items():
                first = sources[0].get(key)
                plain = not isinstance(value, Tensor) and not isinstance(first, Tensor)
                if key not in OWN and plain and value != first:
                    return [
                        f"parameter group {number} takes parameters from groups with {key}={first} "
                        f"('{sources[0]['params'][0]}') and {key}={value} "
                        f"('{source['params'][0]}'): build the optimizer with groups as saved"
                    ]
        return []

    def _misfits(self, path: str, existing: Any, given: Any) -> list[str]:
        if isinstance(given, (Mapping, list, tuple)):
            pairs = _beside(existing, given)
            return [t for key, old, new in pairs for t in self._misfits(f"{path}.{key}", old, new)]
        if isinstance(existing, (ShardTensor, DTensor)):
            return differences(path, existing, given, self.local)
        return []

    def apply(self) -> None:
        """Load the state. Every rank must call it."""
        state: dict[Any, Any] = {}
        given = self.tree["state"]
        for index, param in enumerate(self.params):
            if self._name(param) in given:
                existing = self.existing.get(param, {})
                fitted = self._fitted(param, existing, given[self._name(param)])
                if not _has_not_stepped(fitted):
                    state[index] = fitted
        for key in self.existing:
            if not isinstance(key, Tensor) and key in given:
                state[key] = map_leaves(self.values.fetch, given[key])
        loaded: dict[str, Any] = {"state": state, "param_groups": self._groups()}
        own = self.optimizer.state_dict()
        if not is_keyed_by_id(own) and own["param_groups"]:  # it has names for its parameters
            loaded = rekeyed(loaded, self._own_names(own))
        self.optimizer.load_state_dict(loaded)

    def _own_names(self, own: Mapping[str, Any]) -> dict[int, str]:
        """The names that an optimizer itself has for its parameters, by position."""
        keys = [key for group in own["param_groups"] for key in group["params"]]
        called = {canonical_name(self.model, key): key for key in keys}
        return {
            index: called[name]
            for index, param in enumerate(self.params)
            for name in self.names[param]
            if name in called
        }

    def _groups(self) -> list[dict[str, Any]]:
        index = {param: number for number, param in enumerate(self.params)}
        groups = []
        for group in self.optimizer.param_groups:
            new = {key: value for key, value in group.items() if key not in OWN}
            for source in self._sources(group)[:1]:
                for key, value in source.items():
                    if key not in OWN:
                        value = map_leaves(self.values.fetch, value)
                        like = new.get(key)
                        if isinstance(like, Tensor) and isinstance(value, Tensor):
                            value = value.to(like.device)
                        new[key] = value
            groups.append({**new, "params": [index[param] for param in group["params"]]})
        return groups

    def _fitted(self, param: Tensor, existing: Any, given: Any) -> Any:
        """`given` in the form of `existing`; tensors are written into the tensors of `existing`."""
        if isinstance(given, (Mapping, list, tuple)):
            new = {k: self._fitted(param, *pair) for k, *pair in _beside(existing, given)}
            return new if isinstance(given, Mapping) else type(given)(new.values())
        value = self.values.fetch(given)
        if isinstance(existing, Tensor) and isinstance(value, Tensor):
            return self._written(existing, value)
        if self.local and isinstance(value, Tensor):
            return self._local_like(param, value)
        return part_like(param, value)

    def _written(self, existing: Tensor, value: Tensor) -> Tensor:
        if not isinstance(existing, (ShardTensor, DTensor)):
            value = whole(value, existing.device)
            if value.shape != existing.shape or value.dtype != existing.dtype:
                return value.to(existing.device, copy=True)
        write_value(existing, value, self.local)
        return existing

    def _local_like(self, param: Tensor, value: Tensor) -> Tensor:
        if isinstance(param, ShardTensor) and value.shape == param._local.shape:
            return ShardTensor(value.clone(), tuple(param.shape), param._shard_spec)
        return value


def _has_not_stepped(state: Any) -> bool:
    """Whether `state` is from before the parameter's first step, when a parameter has no state.

    A state from `first_state` has the right form, but not always the values of a start (Rprop
    starts with the learning rate, which was zero).
    """
    step = state.get("step") if isinstance(state, Mapping) else None
    return step is not None and float(step) == 0


def _beside(existing: Any, given: Any) -> list[tuple[Any, Any, Any]]:
    """(key, existing value, given value) for the entries of a given dict, list or tuple."""
    if isinstance(given, Mapping):
        there: Any = existing if isinstance(existing, Mapping) else {}
        return [(key, there.get(key), value) for key, value in given.items()]
    same = isinstance(existing, (list, tuple)) and len(existing) == len(given)
    old = existing if same else [None] * len(given)
    return [(index, *pair) for index, pair in enumerate(zip(old, given, strict=True))]
