"""The pure plan of one rank: from names, shapes and intervals to the boxes that it sends and gets.

Trainers hold intervals of flattened tensors; receivers want rectangles. The cut of both is a few
boxes. A box that several receivers want travels once from its holder: slices of it go to some of
the receivers, which pass them on in a second phase. So no holder sends a box twice, and every
receiver gets each byte once. Where trainers hold copies (HSDP), each copy sends an equal share of
the interval. A receiver that holds a box itself copies it.

Both ends of a pair walk the same sources, rectangles, parts and boxes in the same order, so that a
message needs no header. A rank walks only the sources that it holds or wants.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch

from shardc.runtime.layout.interval_boxes import boxes_of
from shardc.weights.layouts import Layout, Piece, Shape

RELAY_BYTES = 2**18
"""The least bytes of a slice, where a box is cut among the receivers that pass it on."""


@dataclass(frozen=True)
class Part:
    """A box of a source, flattened and cut over ranks.

    Attributes:
        offsets, shape: the box.
        start, segment: as in `ShardSpec`: the place in a flat bucket, and its elements a rank.
        holders: for each segment, the ranks that hold a copy of it.
        spread: whether the copies share the sending; else one rank sends for all.
    """

    offsets: Shape
    shape: Shape
    start: int
    segment: int
    holders: tuple[tuple[int, ...], ...]
    spread: bool = True


@dataclass(frozen=True)
class Source:
    """A tensor of the trainers; a tied tensor has one `name` under all of its names."""

    name: str
    shape: Shape
    dtype: torch.dtype
    parts: tuple[Part, ...]


class Target(NamedTuple):
    """A place in a receiver's tensor."""

    name: str
    at: Shape


class Chunk(NamedTuple):
    """A box of a source on its way, `[start, start + sizes)`.

    Attributes:
        source, part: the source, and the number of the part that holds the box.
        wire: the dtype in which the box travels.
        targets: the places of the box in the tensors of this rank, if it is a receiver.
    """

    source: str
    part: int
    start: Shape
    sizes: Shape
    wire: torch.dtype
    targets: tuple[Target, ...]

    @property
    def bytes(self) -> int:
        return math.prod(self.sizes) * self.wire.itemsize


Messages = dict[int, list[Chunk]]
"""The chunks from, or for, each rank."""


@dataclass
class RankPlan:
    """The plan of one rank.

    Attributes:
        sends, receives: the messages of both phases.
        copies: boxes that the rank holds and wants.
    """

    rank: int
    sends: tuple[Messages, Messages] = field(default_factory=lambda: ({}, {}))
    receives: tuple[Messages, Messages] = field(default_factory=lambda: ({}, {}))
    copies: list[Chunk] = field(default_factory=list)

    def traffic(self) -> tuple[tuple[int, int, int], ...]:
        """For each phase, the bytes sent, the bytes received and the peers."""
        return tuple(
            (_bytes(sent), _bytes(got), len(sent.keys() | got.keys()))
            for sent, got in zip(self.sends, self.receives, strict=True)
        )


def _bytes(messages: Messages) -> int:
    return sum(chunk.bytes for chunks in messages.values() for chunk in chunks)


def plan_rank(rank: int, sources: Mapping[str, Source], layouts: Mapping[int, Layout]) -> RankPlan:
    """Plan one rank from metadata alone.

    Args:
        rank: the rank to plan, among trainers and receivers.
        sources: the trainers' tensors by name, equal on all ranks.
        layouts: the layouts of the receivers, by rank.

    Raises:
        ValueError: this rank's layout names an unknown source, or a piece that does not fit.
    """
    check_layout(layouts.get(rank, Layout({})), sources)
    return _Planner(rank, sources, layouts).plan()


def check_layout(layout: Layout, sources: Mapping[str, Source]) -> None:
    """Raise ValueError for a piece that lies outside of its source or its destination."""
    for name, wanted in layout.tensors.items():
        for piece in wanted.pieces:
            source = sources.get(piece.source)
            if source is None:
                raise ValueError(
                    f"'{name}' takes '{piece.source}', which no trainer has: give a name of the "
                    "trainers' state dict"
                )
            if wanted.dtype.is_floating_point != source.dtype.is_floating_point:
                raise ValueError(
                    f"'{name}' is {wanted.dtype} and takes '{piece.source}', which is "
                    f"{source.dtype}: only dtypes of one kind convert"
                )
            _check_piece(name, wanted.shape, piece, source.shape)


def _check_piece(name: str, shape: Shape, piece: Piece, source: Shape) -> None:
    slices = list(zip(piece.start, piece.stop, strict=True))
    inside = len(slices) == len(source) and all(
        0 <= a < b <= size for (a, b), size in zip(slices, source, strict=True)
    )
    sizes = fitted(tuple(b - a for a, b in slices), len(shape))
    fits = (
        sizes is not None
        and len(piece.at) == len(shape)
        and all(
            at >= 0 and at + size <= room
            for at, size, room in zip(piece.at, sizes, shape, strict=True)
        )
    )
    if not inside or not fits:
        raise ValueError(
            f"'{name}' of shape {shape} takes {piece} of a source of shape {source}: the slices "
            "must lie in the source, and in the destination from 'at' on"
        )


def fitted(sizes: Shape, dims: int) -> Shape | None:
    """`sizes` with `dims` dims, by leading ones; None if that cannot be."""
    if len(sizes) <= dims:
        return (1,) * (dims - len(sizes)) + sizes
    lead = len(sizes) - dims
    return sizes[lead:] if all(size == 1 for size in sizes[:lead]) else None


# -- wants ---------------------------------------------------------------------------------------

Rectangle = tuple[Shape, Shape]


def intersection(one: Rectangle, other: Rectangle) -> Rectangle | None:
    """The common part of two rectangles; None if there is none."""
    start = tuple(map(max, one[0], other[0]))
    stop = tuple(map(min, one[1], other[1]))
    return (start, stop) if all(a < b for a, b in zip(start, stop, strict=True)) else None


def _without(rectangle: Rectangle, hole: Rectangle) -> Iterator[Rectangle]:
    """The rest of `rectangle` around `hole`, which lies in it."""
    start, stop = list(rectangle[0]), list(rectangle[1])
    for dim in range(len(start)):
        for a, b in ((start[dim], hole[0][dim]), (hole[1][dim], stop[dim])):
            if a < b:
                yield (*start[:dim], a, *start[dim + 1 :]), (*stop[:dim], b, *stop[dim + 1 :])
        start[dim], stop[dim] = hole[0][dim], hole[1][dim]


def disjoint(wants: Sequence[Rectangle]) -> list[Rectangle]:
    """Disjoint rectangles of which every want is made up."""
    found: list[Rectangle] = []
    for want in wants:
        rest, cut = [want], list[Rectangle]()
        for have in found:
            common = intersection(have, want)
            if common is None:
                cut.append(have)
                continue
            cut += [common, *_without(have, common)]
            rest = [left for piece in rest for left in _outside(piece, common)]
        found = cut + rest
    return found


def _outside(piece: Rectangle, hole: Rectangle) -> Iterator[Rectangle]:
    common = intersection(piece, hole)
    return iter([piece]) if common is None else _without(piece, common)


def wire_dtype(source: torch.dtype, wanted: torch.dtype) -> torch.dtype:
    """The dtype on the way: the narrower one, so that the sender casts where that is smaller."""
    return wanted if wanted.itemsize <= source.itemsize else source


# -- one rank ------------------------------------------------------------------------------------


class _Wanted(NamedTuple):
    """A rectangle of a source that some receivers want in one dtype."""

    rectangle: Rectangle
    wire: torch.dtype
    ranks: list[int]


class _Planner:
    """The walk of one rank over the sources that it holds or wants."""

    def __init__(
        self, rank: int, sources: Mapping[str, Source], layouts: Mapping[int, Layout]
    ) -> None:
        self.rank, self.sources, self.layouts = rank, sources, layouts
        self.found = RankPlan(rank)
        self._segments: dict[int, list[int]] = {}
        self._places: dict[tuple[str, torch.dtype], list[tuple[Rectangle, Target]]] = {}
        for name, wanted in layouts.get(rank, Layout({})).tensors.items():
            for piece in wanted.pieces:
                source = sources[piece.source]
                key = source.name, wire_dtype(source.dtype, wanted.dtype)
                place = (piece.start, piece.stop), Target(name, piece.at)
                self._places.setdefault(key, []).append(place)

    def plan(self) -> RankPlan:
        once = {source.name: source for source in self.sources.values()}
        mine = {name for name, _ in self._places}
        relevant = {
            name
            for name, source in once.items()
            if name in mine or any(self._holds(part) for part in source.parts)
        }
        wants = self._wants(relevant)
        for number, (name, source) in enumerate(once.items()):
            if name in relevant:
                for wanted in wants.get(name, ()):
                    self._walk(number, source, wanted)
        for messages in (*self.found.sends, *self.found.receives):
            for chunks in messages.values():
                chunks.sort(key=lambda chunk: -chunk.wire.itemsize)  # aligned in the message
        return self.found

    def _own_segments(self, part: Part) -> list[int]:
        key = id(part.holders)
        if key not in self._segments:
            held = enumerate(part.holders)
            self._segments[key] = [number for number, ranks in held if self.rank in ranks]
        return self._segments[key]

    def _holds(self, part: Part) -> bool:
        stop = part.start + math.prod(part.shape)
        return any(
            number * part.segment < stop and (number + 1) * part.segment > part.start
            for number in self._own_segments(part)
        )

    def _wants(self, relevant: set[str]) -> dict[str, list[_Wanted]]:
        """For each relevant source, the rectangles that receivers want, in one order on all."""
        by_source: dict[str, dict[tuple[Rectangle, torch.dtype], list[int]]] = {}
        for receiver in sorted(self.layouts):
            own: dict[tuple[str, torch.dtype], list[Rectangle]] = {}
            for wanted in self.layouts[receiver].tensors.values():
                for piece in wanted.pieces:
                    source = self.sources.get(piece.source)
                    if source is not None and source.name in relevant:
                        key = source.name, wire_dtype(source.dtype, wanted.dtype)
                        own.setdefault(key, []).append((piece.start, piece.stop))
            for (name, wire), rectangles in own.items():
                cells = rectangles if len(rectangles) == 1 else disjoint(rectangles)
                for cell in cells:
                    by_source.setdefault(name, {}).setdefault((cell, wire), []).append(receiver)
        return {
            name: [
                _Wanted(cell, wire, ranks)
                for (cell, wire), ranks in sorted(
                    cells.items(), key=lambda item: (item[0][0], str(item[0][1]))
                )
            ]
            for name, cells in by_source.items()
        }

    # -- boxes of one source -----------------------------------------------------------------

    def _walk(self, number: int, source: Source, wanted: _Wanted) -> None:
        mine = self.rank in wanted.ranks
        for index, part in enumerate(source.parts):
            box = part.offsets, tuple(map(sum, zip(part.offsets, part.shape, strict=True)))
            common = intersection(box, wanted.rectangle)
            if common is None:
                continue
            for place in self._segments_in(part, common, mine):
                holders = part.holders[place]
                for share, (first, last) in enumerate(_shares(part, place)):
                    sender = holders[(share + number) % len(holders)]
                    if mine or sender == self.rank:
                        for rectangle in _boxes_in(part, first, last, common):
                            chunk = self._chunk(source, index, wanted, rectangle)
                            self._send(chunk, number, sender, holders, wanted.ranks)

    def _segments_in(self, part: Part, common: Rectangle, mine: bool) -> Iterator[int]:
        """The segments that may have elements of `common`: of all ranks, or this rank's."""
        first = part.start + _flat(part, common[0])
        last = part.start + _flat(part, tuple(stop - 1 for stop in common[1]))
        low, high = first // part.segment, last // part.segment
        places = range(low, high + 1) if mine else self._own_segments(part)
        return (place for place in places if low <= place <= high)

    def _chunk(self, source: Source, index: int, wanted: _Wanted, rectangle: Rectangle) -> Chunk:
        start, stop = rectangle
        sizes = tuple(b - a for a, b in zip(start, stop, strict=True))
        return Chunk(source.name, index, start, sizes, wanted.wire, ())

    def _placed(self, chunk: Chunk) -> Chunk:
        """The chunk with its places in this rank's tensors."""
        own = chunk.start, tuple(map(sum, zip(chunk.start, chunk.sizes, strict=True)))
        targets = []
        for (start, stop), target in self._places[chunk.source, chunk.wire]:
            if intersection(own, (start, stop)) is not None:
                moved = tuple(a - b for a, b in zip(chunk.start, start, strict=True))
                targets.append(Target(target.name, shifted(target.at, moved)))
        return chunk._replace(targets=tuple(targets))

    def _send(
        self, chunk: Chunk, number: int, sender: int, holders: tuple[int, ...], ranks: list[int]
    ) -> None:
        """Enter the chunk into the messages of this rank: copied, sent, passed on, received."""
        rank, found = self.rank, self.found
        if rank in ranks and rank in holders:
            found.copies.append(self._placed(chunk))
        others = [one for one in ranks if one not in holders]
        if not others or (sender != rank and rank not in others):
            return
        for place, piece in enumerate(_slices(chunk, len(others))):
            relay = others[(number + place) % len(others)]
            if sender == rank:
                found.sends[0].setdefault(relay, []).append(piece)
            if relay == rank:
                piece = self._placed(piece)
                found.receives[0].setdefault(sender, []).append(piece)
                for other in others:
                    if other != rank:
                        found.sends[1].setdefault(other, []).append(piece)
            elif rank in others:
                found.receives[1].setdefault(relay, []).append(self._placed(piece))


def shifted(at: Shape, moved: Shape) -> Shape:
    """`at` moved by an offset in the source; leading dims that only one of the two has count 0."""
    lead = len(at) - len(moved)
    by = (0,) * lead + moved if lead >= 0 else moved[-lead:]
    return tuple(a + b for a, b in zip(at, by, strict=True))


def _flat(part: Part, at: Shape) -> int:
    """The place of an element of the source in the part's flattened box."""
    place = 0
    for index, offset, size in zip(at, part.offsets, part.shape, strict=True):
        place = place * size + index - offset
    return place


def _shares(part: Part, place: int) -> Iterator[tuple[int, int]]:
    """The intervals of the flattened box that the copies of a segment send, one each."""
    copies = len(part.holders[place]) if part.spread else 1
    share, numel = -(-part.segment // copies), math.prod(part.shape)
    end = (place + 1) * part.segment
    for copy in range(copies):
        first = place * part.segment + copy * share
        last = min(first + share, end)
        yield max(first - part.start, 0), min(last - part.start, numel)


def _boxes_in(part: Part, first: int, last: int, common: Rectangle) -> Iterator[Rectangle]:
    """The boxes of elements `[first, last)` of the flattened part that lie in `common`."""
    for box in boxes_of(part.shape, first, last):
        start = tuple(map(sum, zip(part.offsets, box.offsets, strict=True)))
        stop = tuple(map(sum, zip(start, box.sizes, strict=True)))
        found = intersection((start, stop), common)
        if found is not None:
            yield found


def _slices(chunk: Chunk, receivers: int) -> list[Chunk]:
    """The chunk cut along its longest dim, for receivers that pass slices on."""
    count = min(receivers, chunk.bytes // RELAY_BYTES)
    if receivers == 1 or count < 2:
        return [chunk]
    dim = max(range(len(chunk.sizes)), key=chunk.sizes.__getitem__)
    length = chunk.sizes[dim]
    count = min(count, length)
    found = []
    for number in range(count):
        a, b = length * number // count, length * (number + 1) // count
        start = (*chunk.start[:dim], chunk.start[dim] + a, *chunk.start[dim + 1 :])
        sizes = (*chunk.sizes[:dim], b - a, *chunk.sizes[dim + 1 :])
        found.append(chunk._replace(start=start, sizes=sizes))
    return found
