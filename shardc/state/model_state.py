"""A model's state by name, and its load: checked as a whole, then written value by value.

A load writes straight into the tensors that `model.state_dict()` shares with the model, so it needs
no second copy of the segments. `model.load_state_dict` then gets the same tensors: it runs hooks,
loads extra state and reports keys.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from shardc.runtime import compat
from shardc.runtime.checks.words import some
from shardc.runtime.tensor.shard_tensor import ShardTensor
from shardc.state.names import canonical_name, parameter_names
from shardc.state.values import Announced, Values, write_value

_SHOWN = 8


def model_state(model: nn.Module, ignore_frozen: bool = False) -> dict[str, Any]:
    """`model.state_dict()` by canonical names, sharing memory.

    `ignore_frozen` leaves frozen parameters out.
    """
    state = {canonical_name(model, key): value for key, value in model.state_dict().items()}
    for param, names in parameter_names(model).items():
        for name in names:
            if ignore_frozen and not param.requires_grad:
                state.pop(name, None)
            elif name in state and _same_memory(state[name], state.get(names[0])):
                state[name] = state[names[0]]
    return state


def _same_memory(one: Any, other: Any) -> bool:
    """Whether two entries are one tensor; all ranks answer alike, also a rank without a part."""
    if isinstance(one, ShardTensor) and isinstance(other, ShardTensor):
        return one._shard_spec == other._shard_spec and one.shape == other.shape
    return type(one) is Tensor and type(other) is Tensor and one.data_ptr() == other.data_ptr()


class ModelLoad:
    """A checked state dict of a model, ready to load.

    Raises:
        RuntimeError: the model cannot load it; the message tells the entries and the reasons.
    """

    def __init__(self, model: nn.Module, values: Values, strict: bool, local: bool) -> None:
        self.model, self.values, self.strict, self.local = model, values, strict, local
        self.own = model.state_dict()
        self.keys = {canonical_name(model, key): key for key in self.own}
        self.rewritten = any(compat.rewrites_loaded_state(module) for module in model.modules())
        raise_for(f"loading the state of {type(model).__name__}", self._problems())

    def _problems(self) -> list[str]:
        given: Mapping[str, Any] = self.values.tree
        found: list[str] = []
        if self.strict and not self.rewritten:
            missing = [name for name in self.keys if name not in given]
            unknown = [str(name) for name in given if name not in self.keys]
            hint = " (strict=False leaves them as they are)"
            if not given:
                hint = (
                    " (the dict is empty; if rank 0 has it, use full_state_dict=True and "
                    "broadcast_from_rank0=True)"
                )
            found += [f"missing: {listing(missing)}{hint}"] if missing else []
            found += [f"unknown: {listing(unknown)} (strict=False skips them)"] if unknown else []
        for name, key in self.keys.items():
            target = self.own[key]
            if name in given and isinstance(target, Tensor) and not _is_extra(name):
                found += differences(name, target, given[name], self.local, check_dtype=True)
        return found

    def apply(self) -> Any:
        """Write the values; gives the report of `load_state_dict`. Every rank must call it."""
        given, loaded = self.values.tree, {}
        for name, key in self.keys.items():
            if name not in given:
                continue
            value, target = self.values.fetch(given[name]), self.own[key]
            if isinstance(target, Tensor) and not _is_extra(name):
                write_value(target, value, self.local)
                value = target
            loaded[key] = value
        for name, value in given.items():
            if name not in self.keys:
                loaded[name] = self._unknown(value)
        report = self.model.load_state_dict(loaded, strict=self.strict)
        for names in report:
            names[:] = [canonical_name(self.model, key) for key in names]
        return report

    def _unknown(self, value: Any) -> Any:
        """The value of an unknown name: fetched if a module's code may load it, else on meta."""
        if self.rewritten or not isinstance(value, Announced):
            return self.values.fetch(value)
        return torch.empty(value.shape, dtype=value.dtype, device="meta")


def differences(
    name: str, target: Tensor, value: Any, local: bool, check_dtype: bool = False
) -> list[str]:
    """The reason why `value` cannot be written into `target`; empty if it can."""
    if not isinstance(value, (Tensor, Announced)):
        return [f"'{name}' must be a tensor, got {type(value).__name__}"]
    if target.is_meta:
        return [
            f"'{name}' is on the meta device: give the model memory first, "
            "model.to_empty(device=...)"
        ]
    shape = tuple(target.shape)
    if local and isinstance(target, (ShardTensor, DTensor)):
        own = target._local if isinstance(target, ShardTensor) else target.to_local()
        shape = tuple(own.shape)
    if tuple(value.shape) != shape:
        part = " (this rank's part)" if local else ""
        return [f"size mismatch for '{name}': it has shape {shape}{part}, got {tuple(value.shape)}"]
    if check_dtype and value.dtype != target.dtype:
        return [
            f"dtype mismatch for '{name}': it is {target.dtype}, got {value.dtype}; convert it, "
            f"value.to({target.dtype})"
        ]
    return []


def raise_for(what: str, problems: list[str]) -> None:
    """Raise one RuntimeError that lists the problems, if there are any."""
    if problems:
        more = len(problems) - _SHOWN
        lines = problems[:_SHOWN] + ([f"and {more} more"] if more > 0 else [])
        raise RuntimeError(f"{what}: " + "\n    ".join(lines))


def listing(names: list[str]) -> str:
    """The first names in quotes, and the number of others."""
    return some([f"'{name}'" for name in names], _SHOWN)


def _is_extra(name: str) -> bool:
    return name.rpartition(".")[2] == "_extra_state"
