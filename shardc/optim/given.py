"""The parameters that a user gave, for an optimizer that gets other parameters in their place."""

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from torch import Tensor, nn

Params = nn.Module | Iterable[Any]

OWN = ("params", "param_names")
"""Entries of a group about its parameters; the rest are settings."""


class _Named(nn.Module):
    """Some parameters of a model under their names, for optimizers that take a model."""

    def __init__(self, named: Mapping[str, nn.Parameter]) -> None:
        super().__init__()
        self._named = dict(named)

    def named_parameters(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, nn.Parameter]]:
        yield from self._named.items()


class GivenParams:
    """Groups of parameters or of (name, parameter) pairs, or a model with named parameters."""

    def __init__(self, params: Params) -> None:
        self.is_model = isinstance(params, nn.Module)
        self.is_flat = False
        listed = list(params.named_parameters() if isinstance(params, nn.Module) else params)
        if listed and not isinstance(listed[0], dict):
            self.is_flat, listed = True, [{"params": listed}]
        self.groups: list[dict[str, Any]] = []
        for group in listed:
            inside = group["params"]
            one = isinstance(inside, Tensor) or (isinstance(inside, tuple) and len(inside) == 2)
            self.groups.append({**group, "params": [inside] if one else list(inside)})
        self.params: list[Tensor] = [
            entry[1] if isinstance(entry, tuple) else entry
            for group in self.groups
            for entry in group["params"]
        ]

    def replaced(self, by: Mapping[Tensor, nn.Parameter]) -> Any:
        """The same structure with other parameters; parameters that `by` lacks are left out."""
        groups = []
        for group in self.groups:
            entries = [
                (entry[0], by[entry[1]]) if isinstance(entry, tuple) else by[entry]
                for entry in group["params"]
                if (entry[1] if isinstance(entry, tuple) else entry) in by
            ]
            if entries:
                groups.append({**group, "params": entries})
        if self.is_model:
            return _Named(dict(entry for group in groups for entry in group["params"]))
        return groups[0]["params"] if self.is_flat else groups
