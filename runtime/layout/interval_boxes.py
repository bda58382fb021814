"""Intervals of a flattened tensor as boxes of the tensor, the unit in which DCP saves and loads.

The elements `[start, stop)` of a flattened n-d tensor are at most 2n-1 axis-aligned boxes: a ragged
head, whole rows, a ragged tail, and such boxes again inside head and tail. Each box is contiguous
in the flattened order, so a view of the local part serves it without a copy.
"""

import math
import operator
from collections.abc import Iterator
from typing import NamedTuple


class Box(NamedTuple):
    """An axis-aligned part of a tensor; `start` is its first element's place in the flat order."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    start: int

    @property
    def numel(self) -> int:
        return math.prod(self.sizes)

    def moved(self, by: tuple[int, ...]) -> "Box":
        """The same box of a larger tensor, in which this tensor starts at `by`."""
        return self._replace(offsets=tuple(map(operator.add, self.offsets, by)))


def boxes_of(shape: tuple[int, ...], start: int, stop: int) -> Iterator[Box]:
    """The boxes that make up elements `[start, stop)` of a flattened tensor of `shape`."""
    if start >= stop:
        return
    if not shape:
        yield Box((), (), start)
        return
    inner = math.prod(shape[1:])
    first, head = divmod(start, inner)
    if head:
        end = min(stop, (first + 1) * inner)
        yield from _within_row(shape, first, inner, start, end)
        start, first = end, first + 1
    last, tail = divmod(stop, inner)
    if last > first:
        zeros = (0,) * (len(shape) - 1)
        yield Box((first, *zeros), (last - first, *shape[1:]), first * inner)
    if tail and last >= first and start < stop:
        yield from _within_row(shape, last, inner, last * inner, stop)


def _within_row(
    shape: tuple[int, ...], row: int, inner: int, start: int, stop: int
) -> Iterator[Box]:
    base = row * inner
    for box in boxes_of(shape[1:], start - base, stop - base):
        yield Box((row, *box.offsets), (1, *box.sizes), base + box.start)
