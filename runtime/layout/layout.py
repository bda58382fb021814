"""The layout planner: it places every parameter of a unit in flat buckets.

A bucket is the concatenation of its parameters in registration order, cut into `world_size` equal
segments, one a rank. Starts and segments are 16-byte aligned, so that a view of a gathered bucket
goes into a matmul as it is and NCCL stays on its fast path (pytorch#195450). A rank boundary
prefers to fall between two rows of the parameter it cuts, which makes the local part one box of
the tensor (short checkpoints, row-wise tools); where that costs more padding than
`MAX_ROW_PADDING` the boundary may fall anywhere.

Every layout is a pure function of names, shapes, dtypes and world size: it is equal on all ranks,
and needs neither a process group nor real tensors.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from itertools import accumulate

import torch

ALIGN_BYTES = 16
MIN_COMPUTE_ITEMSIZE = 2
"""Bytes of the narrowest dtype a floating-point bucket may be cast to before its gather (bf16,
fp16): starts are aligned for it too, so `.bfloat16()` or a param dtype never needs a new layout."""
MAX_ROW_PADDING = 0.004
"""The share of a bucket that may be spent on letting rank boundaries fall between rows."""
MAX_TABLE_PADDING = 0.05
"""The same share for a table alone in its bucket: rows of a table are fetched only where segments
hold whole rows."""


@dataclass(frozen=True)
class Param:
    """A parameter as the layout planner knows it.

    Attributes:
        by_rows: whether it is cut between rows only, in a bucket of its own.
        is_table: whether rows of it are looked up.
        apart: whether it is a vector, and the unit's vectors have a bucket of their own.
    """

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype = torch.float32
    requires_grad: bool = True
    by_rows: bool = False
    is_table: bool = False
    apart: bool = False

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    @property
    def row(self) -> int:
        return row_of(self.shape)


@dataclass(frozen=True)
class Slot:
    """A parameter's place in its bucket, in elements: `[start, start + numel)`."""

    name: str
    shape: tuple[int, ...]
    start: int

    @cached_property
    def numel(self) -> int:
        return math.prod(self.shape)

    @property
    def stop(self) -> int:
        return self.start + self.numel


@dataclass(frozen=True)
class BucketLayout:
    """The frozen plan of one bucket; all positions and sizes in elements of `dtype`.

    Rank r holds the segment `[r * segment, (r + 1) * segment)` of the flat bucket, whose length is
    `world_size * segment`.

    Attributes:
        block: the number of neighbours that share a scale on the wire; segments are whole blocks.
            0: the bucket is not made to travel in fewer bits.
        exact: the number of elements at the start of every segment that are not quantised even so.
            In the first segment they are the parameters that must not be quantised.
    """

    slots: tuple[Slot, ...]
    dtype: torch.dtype
    requires_grad: bool
    world_size: int
    segment: int
    block: int = 0
    exact: int = 0

    @property
    def contents(self) -> str:
        """The parameters of the bucket in one line, by name and shape."""
        return ", ".join(f"{s.name}[{'x'.join(map(str, s.shape))}]" for s in self.slots)

    @property
    def numel(self) -> int:
        """Elements of the whole bucket, padding included."""
        return self.world_size * self.segment

    @cached_property
    def used(self) -> int:
        """Elements that belong to parameters."""
        return sum(slot.numel for slot in self.slots)

    @property
    def padding(self) -> int:
        """Elements that belong to no parameter."""
        return self.numel - self.used

    @property
    def padding_fraction(self) -> float:
        """Padding as a share of the whole bucket (0 for an empty one)."""
        return self.padding / self.numel if self.numel else 0.0

    @property
    def cut_inside_rows(self) -> list[str]:
        """The names of parameters that some rank boundary cuts inside a row."""
        return [
            slot.name
            for slot in self.slots
            if not has_whole_rows(slot.start, slot.numel, self.segment, row_of(slot.shape))
        ]

    def split_sizes(self) -> Iterator[tuple[int, int | None]]:
        """The bucket as consecutive pieces: (elements, slot index, or None for padding)."""
        cursor = 0
        for index, slot in enumerate(self.slots):
            if slot.start > cursor:
                yield slot.start - cursor, None
            yield slot.numel, index
            cursor = slot.stop
        if self.numel > cursor:
            yield self.numel - cursor, None


def row_of(shape: Sequence[int]) -> int:
    """Elements between two neighbours along dim 0 (1 for vectors, scalars, empty tensors)."""
    return max(1, math.prod(shape[1:]))


def interval(start: int, numel: int, segment: int, rank: int) -> tuple[int, int]:
    """`[start, stop)` of a flattened parameter at bucket offset `start` that `rank` holds."""
    first = min(max(rank * segment - start, 0), numel)
    last = min(max((rank + 1) * segment - start, 0), numel)
    return first, last


def split_of(layout: BucketLayout, rank: int) -> tuple[list[int], list[int]]:
    """A rank's segment as consecutive pieces: their sizes, and the number of each slot's piece.

    The last piece is empty: the piece of slots of which the rank holds nothing.
    """
    sizes, places, cursor = [], [], rank * layout.segment
    for slot in layout.slots:
        start, stop = interval(slot.start, slot.numel, layout.segment, rank)
        if stop > start:
            if slot.start + start > cursor:
                sizes.append(slot.start + start - cursor)
            cursor = slot.start + stop
            sizes.append(stop - start)
        places.append(len(sizes) - 1 if stop > start else -1)
    rest = (rank + 1) * layout.segment - cursor
    return [*sizes, rest, 0], places


def plan_buckets(
    params: Sequence[Param], world_size: int, grain: int = 0, block: int = 0
) -> tuple[BucketLayout, ...]:
    """Plan the buckets of a unit, per (dtype, requires_grad) in order of first appearance.

    Parameters that are cut by rows come last, each in a bucket of its own.

    Args:
        params: a unit's parameters in registration order.
        world_size: the number of ranks that share each bucket.
        grain: the least bytes of a bucket where there are several; 0 for one bucket only.
        block: the number of neighbours that share a scale on the wire; 0 where nothing is
            quantised.

    Raises:
        ValueError: `world_size` is not positive.
    """
    if world_size < 1:
        raise ValueError(f"world_size must be at least 1, got {world_size}")
    groups: dict[tuple[torch.dtype, bool], list[Param]] = {}
    for param in params:
        if not param.by_rows:
            groups.setdefault((param.dtype, param.requires_grad), []).append(param)
    return (
        *(
            plan_bucket(part, world_size, own)
            for (dtype, _), group in groups.items()
            for own in [block if dtype in _QUANTISED else 0]
            for whole in _split(group, grain, 1 if own else dtype.itemsize)
            for part in (_apart(whole, world_size) if own else [whole])
        ),
        *(plan_rows(param, world_size) for param in params if param.by_rows),
    )


_QUANTISED = (torch.float32, torch.bfloat16, torch.float16)
"""Dtypes of buckets that may travel in fewer bits."""
_SMALL = 1024
"""Elements from which on a parameter is quantised."""
_MOST_EXACT = 1 / 8
"""The share of a segment that parameters may fill without being quantised; if they fill more, they
get a bucket of their own."""


def _split(params: list[Param], grain: int, itemsize: int) -> list[list[Param]]:
    """Parts of at least `grain` bytes each, so that the first can be used while others travel.

    Vectors (norms, biases) all go into the first part, or into a part of their own: they are small,
    modules register them in any order, and the forward of a block reads its first norm first. A
    large table has a part of its own: graphs that fetch rows of the table do not gather it.
    """
    place = {param.name: index for index, param in enumerate(params)}
    vectors = [p for p in params if len(p.shape) < 2]
    matrices = [p for p in params if len(p.shape) > 1]
    apart = any(vector.apart for vector in vectors)
    tables = [p for p in matrices if p.is_table and grain and p.numel * itemsize >= _LARGE * grain]
    others = [p for p in matrices if p not in tables]
    runs = _cut_evenly(tuple(param.numel * itemsize for param in others), grain)
    parts = [others[start:stop] for start, stop in runs]
    if apart or not parts:
        parts.insert(0, vectors)
    else:
        parts[0] = sorted((*vectors, *parts[0]), key=lambda param: place[param.name])
    parts += [[table] for table in tables]
    return sorted(filter(None, parts), key=lambda part: place[part[0].name])


_LARGE = 0.5
"""Grains from which on a table has a part of its own: so many bytes take as long to send as the
fixed cost of a message."""


@lru_cache
def _cut_evenly(sizes: tuple[int, ...], least: int) -> list[tuple[int, int]]:
    """Cut `sizes` into as many runs of at least `least` as possible, and as equal as possible.

    There is one run if all sizes together are less than `least`, or if `least` is 0. Buckets of one
    size leave holes of one size in the device's memory, which later buckets fill.
    """
    ends = list(accumulate(sizes, initial=0))
    if not sizes or not 0 < least <= ends[-1]:
        return [(0, len(sizes))] if sizes else []
    best: list[tuple[int, int, int] | None] = [(0, 0, 0)]  # runs, minus their squares, last start
    for stop in range(1, len(ends)):
        cuts = (
            (before[0] + 1, before[1] - (ends[stop] - ends[start]) ** 2, start)
            for start, before in enumerate(best)
            if before and ends[stop] - ends[start] >= least
        )
        best.append(max(cuts, default=None))
    runs, stop = [], len(sizes)
    while stop:
        start = best[stop][2]  # type: ignore[index]  # all of them together are enough
        runs.append((start, stop))
        stop = start
    return runs[::-1]


def _apart(params: list[Param], world_size: int) -> list[list[Param]]:
    """Split off parameters that are not quantised, if they would fill much of every segment."""
    exact = [param for param in params if not _is_quantised(param)]
    others = [param for param in params if _is_quantised(param)]
    size, whole = (sum(param.numel for param in some) for some in (exact, params))
    if exact and others and size * world_size > _MOST_EXACT * whole:
        return [exact, others]
    return [params]


def plan_bucket(params: Sequence[Param], world_size: int, block: int = 0) -> BucketLayout:
    """Plan one bucket from parameters of one dtype.

    Tries segments that are multiples of the parameters' rows, coarsest first, and takes the one
    that cuts the fewest rows within the padding allowed; the tight layout is always a candidate.
    With a `block`, vectors and small parameters, which are not to be quantised, come first; without
    other parameters, nothing of the bucket is quantised.
    """
    if block and any(map(_is_quantised, params)):
        exact = _end([param for param in params if not _is_quantised(param)], block)
        quantised = _plan_bucket(sorted(params, key=_is_quantised), world_size, block)
        return replace(quantised, block=block, exact=exact)
    return _plan_bucket(params, world_size)


def _is_quantised(param: Param) -> bool:
    return len(param.shape) > 1 and param.numel >= _SMALL


def _end(params: Sequence[Param], multiple: int) -> int:
    """The end of `params` at the start of a bucket, rounded up to `multiple`."""
    end = _place(params, _align(params[0].dtype))[1] if params else 0
    return round_up(end, multiple)


def _plan_bucket(params: Sequence[Param], world_size: int, block: int = 1) -> BucketLayout:
    dtype, requires_grad = params[0].dtype, params[0].requires_grad
    align = _align(dtype)
    step = math.lcm(align, block)
    tight_starts, tight_end = _place(params, align, block=block)
    tight = round_up(tight_end, step * world_size) // world_size
    padding = MAX_TABLE_PADDING if len(params) == 1 and params[0].is_table else MAX_ROW_PADDING
    allowed = (1 + padding) * sum(p.numel for p in params)
    best = (_cut_rows(params, tight_starts, tight), tight, tight_starts)
    for grain in _grains(params, step):
        if best[0] == 0:
            break
        segment = round_up(tight, grain)
        if segment * world_size > max(allowed, tight * world_size):
            continue
        starts, end = _place(params, align, segment, block)
        if end <= segment * world_size:
            best = min(best, (_cut_rows(params, starts, segment), segment, starts))
    _, segment, starts = best
    slots = tuple(Slot(p.name, p.shape, start) for p, start in zip(params, starts, strict=True))
    return BucketLayout(slots, dtype, requires_grad, world_size, segment)


def plan_rows(param: Param, world_size: int) -> BucketLayout:
    """The bucket of a parameter that is cut along dim 0 as FSDP2 does: equal parts but the last.

    Neither the start nor the size of a segment is aligned: an extension gathers other tensors.
    """
    segment = -(-math.prod(param.shape[:1]) // world_size) * math.prod(param.shape[1:])
    slots = (Slot(param.name, param.shape, 0),)
    return BucketLayout(slots, param.dtype, param.requires_grad, world_size, segment)


def _align(dtype: torch.dtype) -> int:
    """Elements per 16 bytes, in the narrowest dtype the bucket may travel in."""
    itemsize = dtype.itemsize
    if dtype.is_floating_point:
        itemsize = min(itemsize, MIN_COMPUTE_ITEMSIZE)
    return max(1, ALIGN_BYTES // itemsize)


def round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple


def _grains(params: Sequence[Param], align: int) -> list[int]:
    """Candidate grains of a segment, coarsest first: the rows' common multiple, then each row."""
    rows = {math.lcm(p.row, align) for p in params if len(p.shape) > 1 and p.numel}
    return sorted(rows | {math.lcm(*rows)}, reverse=True) if rows else []


def _place(
    params: Sequence[Param], align: int, segment: int | None = None, block: int = 1
) -> tuple[list[int], int]:
    """Starts of the parameters and the end of the last one; quantised ones start with a block.

    With a segment, a parameter that a rank boundary would cut inside a row moves up so that its
    first boundary falls between rows (so do later boundaries, if the segment is whole rows).
    """
    starts, cursor = [], 0
    for param in params:
        begins = math.lcm(align, block) if block > 1 and _is_quantised(param) else align
        start = round_up(cursor, begins)
        if segment and param.row > 1:
            boundary = round_up(start + 1, segment)
            shift = (boundary - start) % param.row
            if boundary < start + param.numel and shift % begins == 0:
                start += shift
        starts.append(start)
        cursor = start + param.numel
    return starts, cursor


def _cut_rows(params: Sequence[Param], starts: Sequence[int], segment: int) -> int:
    """The number of parameters that some rank boundary cuts inside a row."""
    return sum(
        not has_whole_rows(start, param.numel, segment, param.row)
        for param, start in zip(params, starts, strict=True)
    )


def has_whole_rows(start: int, numel: int, segment: int, row: int) -> bool:
    """Whether no rank boundary cuts a parameter at bucket offset `start` inside a row."""
    if row == 1 or not numel:
        return True
    first = round_up(start + 1, segment)
    last = (start + numel - 1) // segment * segment
    return first > last or not ((first - start) % row or (first != last and segment % row))
