"""The state of owners, shown on every rank, for checkpoints.

Ranks tell each other their entries. A tensor becomes a ShardTensor that lies on its owner as a
whole: functions that save, gather and load sharded tensors need no other form. Tensors of one
element and values that are no tensors are small, and every rank gets them.
"""

from collections import ChainMap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from shardc.optim.first_state import first_state, map_leaves
from shardc.optim.given import OWN
from shardc.optim.owners import on_owner
from shardc.runtime.tensor.shard_tensor import ShardTensor
from shardc.runtime.watch.entering import told


@dataclass(frozen=True)
class _Held:
    """The shape, dtype and device of a tensor that another rank owns."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    device: str


@dataclass(frozen=True)
class OwnerState:
    """The state of one optimizer, on this rank.

    Attributes:
        inners: the stock optimizers, each with the numbers of the groups that its groups stand for.
        whole: the tensors that the stock optimizers update, by parameter.
        owners: the owner of each sharded parameter.
        params: all parameters, in the order of the groups.
        groups: the process groups that cut parameters.
    """

    inners: Sequence[tuple[Optimizer, Sequence[int]]]
    whole: Mapping[Tensor, nn.Parameter]
    owners: Mapping[Tensor, int]
    params: Sequence[Tensor]
    groups: Sequence[dist.ProcessGroup]

    def states(self, first: bool) -> tuple[dict[Tensor, Any], dict[int, dict[str, Any]]]:
        """The state by parameter, and the settings that a first step adds, by number of a group.

        Every rank must call it. With `first`, and no state yet: the state that a first step makes.
        """
        mine = self._of_params([inner.state for inner, _ in self.inners])
        shown = self._from_all(mine)
        added: dict[int, dict[str, Any]] = {}
        if first and not shown:
            made = [first_state(inner) for inner, _ in self.inners]
            mine = self._of_params([each.state for each in made])
            for each, (_, numbers) in zip(made, self.inners, strict=True):
                added |= dict(zip(numbers, each.settings, strict=True))
            shown = self._from_all(mine)
            added = {**self._from_all(added), **added}
        return self._by_param(mine, shown), added

    def _by_param(self, mine: Mapping[int, Any], shown: Mapping[int, Any]) -> dict[Tensor, Any]:
        states = {**shown, **mine}
        return {p: self._placed(p, states[n]) for n, p in enumerate(self.params) if n in states}

    def settings_of_all(self) -> dict[int, dict[str, Any]]:
        """The settings of each group from a rank that updates it, by number of the group.

        Every rank must call it.
        """
        own = {
            number: {key: value for key, value in group.items() if key not in OWN}
            for inner, numbers in self.inners
            for number, group in zip(numbers, inner.param_groups, strict=True)
        }
        return {**self._from_all(own), **own}

    def taken(self, given: Mapping[Tensor, Any]) -> dict[Tensor, Any]:
        """This rank's share of the given state, as plain tensors. Every rank must call it."""
        local: dict[Tensor, Any] = {}
        for param, tree in given.items():
            value = map_leaves(partial(self._unplaced, param), tree)
            if param in self.whole:
                local[param] = value
        return local

    def _of_params(self, states: Sequence[Mapping[Any, Any]]) -> dict[int, Any]:
        """The state of this rank's parameters, by position of the parameter."""
        found, state = {}, ChainMap(*map(dict, states))
        for number, param in enumerate(self.params):
            tree = state.get(self.whole[param]) if param in self.whole else None
            if tree:
                found[number] = tree
        return found

    def _from_all(self, mine: Mapping[int, Any]) -> dict[int, Any]:
        """The entries of all ranks, merged, in the form in which ranks get them."""
        shown = {number: map_leaves(_small, tree) for number, tree in mine.items()}
        merged: dict[int, Any] = {}
        for group in self.groups:
            for each in reversed(told(shown, "the entries of an optimizer's state", group)):
                merged.update(each)
        return merged or shown

    def _placed(self, param: Tensor, tree: Any) -> Any:
        """The state of `param` as every rank shows it; a plain parameter's state is unchanged."""
        if not isinstance(param, ShardTensor):
            return tree

        def place(value: Any) -> Any:
            if isinstance(value, Tensor) and value.numel() > 1:
                part = value.detach()
            elif isinstance(value, _Held):
                kind = param.device if value.device == param.device.type else value.device
                part = torch.empty(0, dtype=value.dtype, device=kind)
            else:
                return value
            return on_owner(part, value.shape, self.owners[param], param)

        return map_leaves(place, tree)

    def _unplaced(self, param: Tensor, value: Any) -> Any:
        if not isinstance(value, ShardTensor):
            return value
        if isinstance(param, ShardTensor):
            owner, spec = self.owners[param], value._shard_spec
            parts = map(spec.interval, range(spec.world_size))
            if all(rank == owner or start == stop for rank, (start, stop) in enumerate(parts)):
                return value._local.view(value.shape) if param in self.whole else None
        return value.full_tensor()


def _small(value: Any) -> Any:
    if not isinstance(value, Tensor):
        return value
    if value.numel() > 1:
        return _Held(tuple(value.shape), value.dtype, value.device.type)
    return value.detach().cpu()
