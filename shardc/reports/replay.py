"""Replays of a step: collectives take other times, or the step is one graph.

In `replay`, ops keep their order and their times, and each collective starts and is waited for
between the same ops. No new schedule is made for the other times.

In `whole_step`, the last reductions travel while the optimizer updates the parameters whose
gradients are there (`passes/schedule/update_when_reduced.py`). A bucket is updated once its last
reduction has arrived, and its gradient is freed. Quantised messages are waited for before
(`passes/rewrite/cut_tail.py`). Gradients are not clipped: a norm of all of them needs every
reduction first. With `gather_ahead`, a step finds the buckets of its first gather, and gathers them
for the next one behind their updates. It copies them into the memory that the next one reads.
"""

import bisect
import itertools
import math
from collections import Counter, deque
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

from shardc.passes.schedule.timeline import Clock
from shardc.passes.schedule.update_when_reduced import levels_behind
from shardc.reports.record import KINDS, BucketRow, CollectiveRow, MemoryPoint, Op, Record
from shardc.runtime.checks.words import some

_R = TypeVar("_R", bound=Record)
_STATES, _GRADIENTS, _GATHERED = map(KINDS.index, ("optimizer", "gradients", "gathered"))


@dataclass(frozen=True)
class Carried:
    """The seconds of a collective.

    Attributes:
        seconds: on the wire.
        then: on the wire inside of nodes, after `seconds`.
        computed: of compute, to make its message (a reduction) or to read its message (a gather).
    """

    seconds: float
    then: float = 0.0
    computed: float = 0.0


def replay(record: Record, carried: Callable[[CollectiveRow], Carried]) -> float:
    """The seconds of the step if each collective takes the seconds that `carried` gives."""
    rows = record.collectives
    _, moved, clock = _sent_anew(rows, rows, list(map(carried, rows)))
    return max(clock.end, moved(max((op.start + op.seconds for op in record.ops), default=0.0)))


def whole_step(
    record: _R, gather_ahead: bool = False, micro_batches: int = 1, gathered_bytes: int = 0
) -> _R:
    """The record of the same step as one graph; a record without an optimizer stays as it is."""
    if not any(op.phase == "optimizer" for op in record.ops):
        return record
    settings = {**record.settings, "step": "one graph"}
    ahead = gathered_ahead(record) if gather_ahead else []
    kept = _kept(record, micro_batches, gathered_bytes)
    if gather_ahead:
        settings["gathered ahead"] = ", ".join(row.name for row in ahead) or "nothing"
        record = _found_gathered(record, ahead)
    first = later = record
    if micro_batches > 1:
        settings["micro-batches"] = str(micro_batches)
        settings["kept gathered"] = some([row.name for row in kept], 3) or "nothing"
        names = {row.name for row in kept}
        rows = [row for row in record.buckets if row.name in names]
        first = _found_gathered(record, rows, until_update=True, is_first=True)
        later = _found_gathered(record, rows, until_update=True)
    end = _End(later, ahead)
    end.play()
    last = replace(
        later,
        settings=settings,
        collectives=tuple(end.rows),
        ops=tuple(end.ops),
        memory=tuple(end.memory),
    )
    if micro_batches == 1:
        return last
    return _in_a_row([first, *[later] * (micro_batches - 2), last])


def gathered_ahead(record: Record) -> list[BucketRow]:
    """The buckets that a step gathers for the next one, in the order of their updates.

    They are those of the first gather that may stay gathered, as in `shardc/step/ahead.py`.
    """
    first = next((row.buckets for row in record.collectives if row.kind == "all_gather"), ())
    order = [name for row in record.collectives if _reduces(row) for name in row.buckets]
    last = {name: place for place, name in enumerate(order)}
    found = [row for row in record.buckets if row.name in first and row.may_stay]
    return sorted(found, key=lambda row: last.get(row.name, -1))


def _kept(record: Record, micro_batches: int, most: int) -> list[BucketRow]:
    """The buckets that stay gathered between micro-batches, of `most` bytes.

    They are those of the units with most seconds of the wire a byte, as in
    `shardc/step/accumulation.py`.
    """
    gathers = (row.buckets for row in record.collectives if row.kind == "all_gather")
    sent = Counter(name for names in gathers for name in names)
    units: dict[str, list[BucketRow]] = {}
    for row in record.buckets:
        units.setdefault(row.unit, []).append(row)

    def seconds(unit: list[BucketRow]) -> float:
        often = [micro_batches * sent[row.name] - 1 for row in unit]
        if min(often) < 1 or not all(row.may_stay for row in unit):
            return 0.0
        return sum(times * row.seconds for times, row in zip(often, unit, strict=True))

    sizes = {name: sum(row.nbytes for row in unit) for name, unit in units.items()}
    kept: list[BucketRow] = []
    for name in sorted(units, key=lambda name: -seconds(units[name]) / max(sizes[name], 1)):
        if seconds(units[name]) > 0 and sizes[name] <= most:
            kept += units[name]
            most -= sizes[name]
    return kept


def _in_a_row(parts: Sequence[_R]) -> _R:
    """The record of micro-batches, of which the last one is followed by the update.

    Gradients of earlier ones are held beside the others.
    """
    waiting = sum(row.segment for row in parts[0].buckets if row.trained)
    rows, ops, memory = list[CollectiveRow](), list[Op](), list[MemoryPoint]()
    begin = 0.0
    for number, part in enumerate(parts):
        is_last = part is parts[-1]
        for row in part.collectives:
            moments = {name: getattr(row, name) + begin for name in _MOMENTS}
            rows.append(replace(row, **moments))
        own = [op for op in part.ops if is_last or op.phase != "optimizer"]
        ops += [replace(op, start=op.start + begin) for op in own]
        for point in part.memory:
            more = 0 if not number or point.where == "optimizer" else waiting
            if is_last or point.where != "optimizer":
                held = _with_more(point.held, _GRADIENTS, more)
                memory.append(replace(point, seconds=point.seconds + begin, held=held))
        begin += next(op.start for op in part.ops if op.phase == "optimizer")
    return replace(
        parts[-1],
        collectives=tuple(rows),
        ops=tuple(ops),
        memory=tuple(memory),
        tokens=len(parts) * parts[-1].tokens,
        flops=len(parts) * parts[-1].flops,
    )


_MOMENTS = ("issued", "start", "end", "waited")
"""The fields of a collective that are moments."""


def _with_more(held: tuple[int, ...], kind: int, more: int) -> tuple[int, ...]:
    """Held bytes, with so many more of a kind."""
    return (*held[:kind], held[kind] + more, *held[kind + 1 :])


class _End:
    """The end of a step as one graph: the last reductions, updates, gathers for the next step.

    Attributes:
        rows, ops, memory: those of the record, and of the end as far as it was played.
    """

    def __init__(self, record: Record, ahead: Sequence[BucketRow]) -> None:
        self.rows = list(record.collectives)
        sent = _last_send(self.rows)
        self._update = next(op for op in record.ops if op.phase == "optimizer")
        self.ops = [op for op in record.ops if op.start < sent]
        late = [op for op in record.ops if op.start >= sent and op is not self._update]
        self._behind = deque(late)
        self.memory = [point for point in record.memory if point.seconds <= sent]
        self._late = [
            number
            for number, row in enumerate(self.rows)
            if _reduces(row) and row.waited >= sent and row.dtype != "int8"
        ]
        names = ((name, n) for n, at in enumerate(self._late, 1) for name in self.rows[at].buckets)
        levels = dict(names)
        self._sizes = [0] * (len(self._late) + 1)
        for row in (row for row in record.buckets if row.trained):
            self._sizes[levels.get(row.name, 0)] += row.segment
        self._starts = [(levels.get(row.name, 0), row) for row in ahead]
        self._held, self._now = list(record.memory[-1].held), sent

    def play(self) -> None:
        """Play the end of the step."""
        before, after = _order(self._sizes, {level for level, _ in self._starts})
        untils = [*(self.rows[number].waited for number in self._late), math.inf]
        sent: list[tuple[int, BucketRow]] = []
        for level, until in enumerate(untils):
            if level:
                self._wait(self._late[level - 1])
            while self._behind and self._behind[0].start < until:
                op = self._behind.popleft()
                self._compute(op, op.seconds)
            self._step(before[level])
            for bucket in (bucket for own, bucket in self._starts if own == level):
                sent.append((self._gather(bucket), bucket))
            self._step(after[level])
        for number, bucket in sent:
            self._wait(number)
            self._compute(replace(self._update, name="copy"), self._seconds(2 * bucket.nbytes))
            self._hold(_GATHERED, -bucket.nbytes)
        self._hold(_GRADIENTS, 0)

    def _wait(self, number: int) -> None:
        row = self.rows[number]
        exposed = max(0.0, row.end - self._now)
        self.rows[number] = replace(row, waited=self._now, exposed=exposed)
        self._now += exposed

    def _compute(self, op: Op, seconds: float) -> None:
        self.ops.append(replace(op, start=self._now, seconds=seconds))
        self._now += seconds

    def _step(self, nbytes: int) -> None:
        """Update parameters of so many bytes, and free their gradients."""
        if nbytes:
            self._hold(_GRADIENTS, 0)
            self._compute(self._update, self._update.seconds * nbytes / sum(self._sizes))
            self._held[_GRADIENTS] -= nbytes

    def _gather(self, bucket: BucketRow) -> int:
        """Start to gather a bucket that is updated; the number of its row."""
        start = max([self._now, *(row.end for row in self.rows)])
        self._hold(_GATHERED, bucket.nbytes)
        like = next(row for row in self.rows if row.kind == "reduce_scatter")
        row = CollectiveRow(
            phase=self._update.phase,
            kind="all_gather",
            buckets=(bucket.name,),
            ranks=like.ranks,
            nbytes=bucket.nbytes,
            before=self._update.name,
            needed_by="(next step)",
            issued=self._now,
            start=start,
            end=start + bucket.seconds,
            waited=start,
            exposed=0.0,
            dtype=bucket.gathered_dtype,
        )
        self.rows.append(row)
        return len(self.rows) - 1

    def _hold(self, kind: int, more: int) -> None:
        """Note the bytes that are held from now on, so many more of a kind."""
        self._held[kind] += more
        self.memory.append(MemoryPoint(self._now, tuple(self._held), self._update.phase))

    def _seconds(self, nbytes: int) -> float:
        """Seconds to read or write so many bytes, at the rate of the update.

        The update reads parameters, gradients and states, and writes parameters and states.
        """
        return self._update.seconds * nbytes / (3 * sum(self._sizes) + 2 * self._held[_STATES])


def _order(sizes: Sequence[int], starts: Collection[int]) -> tuple[list[int], list[int]]:
    """The bytes that are updated behind each wait: before the gathers there, and behind them.

    Args:
        sizes: the bytes of the parameters whose gradients are there behind each wait.
        starts: the waits behind which gathers for the next step start.
    """
    before, after = [0] * len(sizes), [0] * len(sizes)
    for level, size in enumerate(sizes):
        if level in starts or not starts:
            before[level] += size
            continue
        first, *behind = levels_behind(level, starts, len(sizes) - 1)
        late = size // 2 if behind else 0
        after[first] += size - late
        after[max(starts)] += late
    return before, after


def _found_gathered(
    record: _R, held: Sequence[BucketRow], until_update: bool = False, is_first: bool = False
) -> _R:
    """The record of the same step if it finds some buckets gathered, and keeps them so.

    Args:
        until_update: free them before the update.
        is_first: gather them in the forward, and keep them from there on.
    """
    names = {row.name for row in held}
    given = record.collectives
    new = [row if is_first and row.phase == "forward" else _without(row, names) for row in given]
    rows, moved, _ = _sent_anew(given, new, _on_wires(given))

    def more(point: MemoryPoint, row: BucketRow) -> int:
        is_freed = until_update and point.where == "optimizer"
        starts = min((start for start, _ in row.gathered), default=0.0)
        is_before = is_first and point.seconds < starts
        counts = any(start <= point.seconds < end for start, end in row.gathered)
        return 0 if is_freed or is_before or counts else row.nbytes

    ops = [replace(op, start=moved(op.start)) for op in record.ops]
    always = ((0.0, max(op.start + op.seconds for op in ops)),)
    return replace(
        record,
        collectives=tuple(rows),
        ops=tuple(ops),
        memory=tuple(
            replace(
                point,
                seconds=moved(point.seconds),
                held=_with_more(point.held, _GATHERED, sum(more(point, row) for row in held)),
            )
            for point in record.memory
        ),
        buckets=tuple(
            replace(row, reshard=False, gathered=always)
            if row.name in names
            else replace(row, gathered=tuple((moved(a), moved(b)) for a, b in row.gathered))
            for row in record.buckets
        ),
    )


def _without(row: CollectiveRow, names: set[str]) -> CollectiveRow | None:
    """A collective that does not gather some buckets; None if it has no others."""
    if row.kind != "all_gather" or names.isdisjoint(row.buckets):
        return row
    left = tuple(name for name in row.buckets if name not in names)
    share = len(left) / len(row.buckets)
    return replace(row, buckets=left, nbytes=int(row.nbytes * share)) if left else None


def _sent_anew(
    old: Sequence[CollectiveRow], new: Sequence[CollectiveRow | None], times: Sequence[Carried]
) -> tuple[list[CollectiveRow], Callable[[float], float], Clock]:
    """Collectives in place of `old` ones, the new moment of each moment, and the clock after them.

    They are started and waited for at the same places; compute between these takes as long.
    """
    events = [(row.issued, 0, number) for number, row in enumerate(old)]
    events += [(row.waited, 1, number) for number, row in enumerate(old)]
    clock, played, rows = Clock(), 0.0, dict[int, CollectiveRow]()
    moments, clocks = [0.0], [0.0]
    for moment, waits, number in sorted(events):
        clock.now += max(0.0, moment - played)
        played = max(played, moment) + (old[number].exposed if waits else 0.0)
        row, time, before = new[number], times[number], clock.now
        if row is not None and waits:
            clock.wait(number)
            rows[number] = replace(rows[number], waited=before, exposed=clock.now - before)
        elif row is not None:
            clock.now += 0.0 if row.brings_parameters else time.computed
            start = clock.start(number, time.seconds, then=time.then)
            rows[number] = replace(row, issued=before, start=start, end=clock.arrived[number])
        if row is not None and waits and row.brings_parameters:
            clock.now += time.computed
        moments.append(played)
        clocks.append(clock.now)

    def moved(moment: float) -> float:
        last = bisect.bisect_right(moments, moment) - 1
        later = clocks[last] + moment - moments[last]
        return min([later, *clocks[last + 1 : last + 2]])  # a stall may be shorter

    return [rows[number] for number in sorted(rows)], moved, clock


def _on_wires(rows: Sequence[CollectiveRow]) -> list[Carried]:
    """The seconds of collectives on the wire, and then inside of nodes.

    The next one starts when the wire is free.
    """
    times = [Carried(row.seconds) for row in rows]
    for number, (row, following) in enumerate(itertools.pairwise(rows)):
        if row.in_steps:
            seconds = min(row.seconds, max(0.0, following.start - row.start))
            times[number] = Carried(seconds, then=row.seconds - seconds)
    return times


def _last_send(rows: Sequence[CollectiveRow]) -> float:
    """When the last bucket's reduction is started; its second step, among copies, is left out."""
    begun, sent = set[str](), 0.0
    for row in filter(_reduces, rows):
        if begun.isdisjoint(row.buckets):
            sent = max(sent, row.issued)
        begun |= {*row.buckets}
    return sent


def _reduces(row: CollectiveRow) -> bool:
    return row.phase == "backward" and not row.brings_parameters
