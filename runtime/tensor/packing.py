"""A packing lays out a weight of several tensors in bytes: NF4's values, scales and their scales.

Some inner tensors go along the rows, in blocks that end where a row ends. The other inner tensors
are small and belong to all rows. A group has the smallest number of rows for which every inner
tensor along the rows has whole elements. The packed weight is `(groups, bytes)` of uint8. Each
group has its part of each inner tensor along the rows, and a copy of each other inner tensor. So
any stretch of groups is a weight again, on any number of ranks.
"""

import math
from dataclasses import dataclass, fields, is_dataclass, replace

import torch
from torch import Tensor, nn

from shardc.runtime import compat


@dataclass(frozen=True)
class Part:
    """An inner tensor's part in a group; `shape` has the group's share of dim 0, or all of it."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    along_rows: bool

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True)
class Packing:
    """The layout in bytes of a weight with several inner tensors: groups of `rows` rows each."""

    groups: int
    rows: int
    parts: tuple[Part, ...]

    @property
    def nbytes(self) -> int:
        """The bytes of a group."""
        return sum(part.nbytes for part in self.parts)

    @classmethod
    def of(cls, weight: compat.Subclass) -> "Packing | None":
        """The packing of a weight of plain inner tensors; None if it cannot be split by rows."""
        names, _ = weight.__tensor_flatten__()
        inner = {name: getattr(weight, name) for name in names}
        if any(type(value) not in (Tensor, nn.Parameter) for value in inner.values()):
            return None
        rows = weight.shape[0]
        counts = (count for count in range(2, rows + 1) if rows % count == 0)
        firsts = (_first(weight, count) for count in counts)
        first = next((found for found in firsts if found is not None), None)
        if first is None:
            return None
        along = [name for name in names if getattr(first, name).shape != inner[name].shape]
        groups = math.gcd(rows, *(inner[name].shape[0] for name in along))
        if not along or _first(weight, groups) is None:
            return None
        parts = []
        for name, value in inner.items():
            share = value.shape[0] // groups if name in along else 0
            shape = (share, *value.shape[1:]) if name in along else tuple(value.shape)
            parts.append(Part(name, value.dtype, shape, name in along))
        return cls(groups, rows // groups, tuple(parts))

    def pack(self, weight: compat.Subclass) -> Tensor:
        """Pack the weight into `(groups, bytes)` of uint8."""
        columns = []
        for part in self.parts:
            value = getattr(weight, part.name).detach().contiguous()
            rows = value.view(self.groups if part.along_rows else 1, -1).view(torch.uint8)
            columns.append(rows.expand(self.groups, -1))
        return torch.cat(columns, dim=1)

    def unpack(self, packed: Tensor) -> dict[str, Tensor]:
        """The inner tensors of packed groups, `(number of groups, bytes)`."""
        columns = packed.split([part.nbytes for part in self.parts], dim=1)
        inner = {}
        for part, column in zip(self.parts, columns, strict=True):
            taken = column if part.along_rows else column[:1]
            flat = taken.reshape(-1).clone().view(part.dtype)
            shape = (-1, *part.shape[1:]) if part.along_rows else part.shape
            inner[part.name] = flat.view(shape)
        return inner


def on_device(context: compat.Context, device: torch.device) -> compat.Context:
    """Replace each device in `context`, a subclass's state beside inner tensors, by `device`."""
    if isinstance(context, torch.device):
        return device
    if isinstance(context, dict):
        return {key: on_device(value, device) for key, value in context.items()}
    if type(context) in (list, tuple):
        return type(context)(on_device(value, device) for value in context)
    if is_dataclass(context) and not isinstance(context, type):
        own = {each.name: getattr(context, each.name) for each in fields(context) if each.init}
        return replace(context, **{key: on_device(value, device) for key, value in own.items()})
    return context


def first_rows(weight: Tensor, count: int) -> compat.Subclass:
    """The first of `count` equal parts of a weight along dim 0."""
    return torch.chunk(weight.detach(), count)[0]


def _first(weight: Tensor, count: int) -> compat.Subclass:
    """The result of `first_rows`; None if the subclass cannot split the weight."""
    try:
        return first_rows(weight, count)
    except (AssertionError, NotImplementedError, RuntimeError, TypeError):
        return None
