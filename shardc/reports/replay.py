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
from collections import deque
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

from shardc.passes.schedule.timeline import Clock
from shardc.reports.record import KINDS, BucketRow, CollectiveRow, MemoryPoint, Op, Record

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
    ops = sorted((op.start, op.seconds) for op in record.ops)
    starts = [start for start, _ in ops]
    sums = [0.0, *itertools.accumulate(seconds for _, seconds in ops)]

    def computed(moment: float) -> float:
        """Seconds of compute that are done by `moment`: ops do not overlap."""
        last = bisect.bisect_left(starts, moment) - 1
        if last < 0:
            return 0.0
        return sums[last] + min(ops[last][1], moment - starts[last])

    events = [(row.issued, 0, number) for number, row in enumerate(record.collectives)]
    events += [(row.waited, 1, number) for number, row in enumerate(record.collectives)]
    times = list(map(carried, record.collectives))
    clock, done = Clock(), 0.0
    for moment, waits, number in sorted(events):
        until = computed(moment)
        clock.now += until - done
        done = until
        row, time = record.collectives[number], times[number]
        if waits:
            clock.wait(number)
            clock.now += time.computed if row.brings_parameters else 0.0
        else:
            clock.now += 0.0 if row.brings_parameters else time.computed
            clock.start(number, time.seconds, then=time.then)
    clock.now += record.compute_seconds - done
    return clock.end


def whole_step(record: _R, gather_ahead: bool = False) -> _R:
    """The record of the same step as one graph; a record without an optimizer stays as it is."""
    update = next((op for op in record.ops if op.phase == "optimizer"), None)
    if update is None:
        return record
    settings = {**record.settings, "step": "one graph"}
    ahead = gathered_ahead(record) if gather_ahead else []
    if gather_ahead:
        settings["gathered ahead"] = ", ".join(row.name for row in ahead) or "nothing"
        record = _found_gathered(record, ahead)
    end = _End(record, ahead)
    end.play()
    return replace(
        record,
        settings=settings,
        collectives=tuple(end.rows),
        ops=tuple(end.ops),
        memory=tuple(end.memory),
    )


def gathered_ahead(record: Record) -> list[BucketRow]:
    """The buckets that a step gathers for the next one, in the order of their updates.

    They are those of the first gather that may stay gathered, as in `shardc/step/ahead.py`.
    """
    first = next((row.buckets for row in record.collectives if row.kind == "all_gather"), ())
    order = [name for row in record.collectives if _reduces(row) for name in row.buckets]
    last = {name: place for place, name in enumerate(order)}
    found = [row for row in record.buckets if row.name in first and row.may_stay]
    return sorted(found, key=lambda row: last.get(row.name, -1))


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

    It is the order of `update_when_reduced`.

    Args:
        sizes: the bytes of the parameters whose gradients are there behind each wait.
        starts: the waits behind which gathers for the next step start.
    """
    before, after = [0] * len(sizes), [0] * len(sizes)
    reductions = len(sizes) - 1
    last = max(starts, default=0)
    first = min(starts, default=0)
    if first == reductions:
        first = 0
    for level, size in enumerate(sizes):
        place, late = max(level, first), 0
        if level in starts or not starts:
            before[level] += size
            continue
        if last == reductions > level:
            late = size // 2
        after[place] += size - late
        after[last] += late
    return before, after


def _found_gathered(record: _R, ahead: Sequence[BucketRow]) -> _R:
    """The record of the same step if it finds some buckets gathered, and keeps them so."""
    names = {row.name for row in ahead}
    given = record.collectives
    rows, moved = _sent_anew(given, [_without(row, names) for row in given])

    def held(point: MemoryPoint) -> tuple[int, ...]:
        more = sum(
            row.nbytes
            for row in ahead
            if not any(start <= point.seconds < end for start, end in row.gathered)
        )
        held = point.held
        return (*held[:_GATHERED], held[_GATHERED] + more, *held[_GATHERED + 1 :])

    ops = [replace(op, start=moved(op.start)) for op in record.ops]
    always = ((0.0, max(op.start + op.seconds for op in ops)),)
    return replace(
        record,
        collectives=tuple(rows),
        ops=tuple(ops),
        memory=tuple(
            replace(point, seconds=moved(point.seconds), held=held(point))
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
    old: Sequence[CollectiveRow], new: Sequence[CollectiveRow | None]
) -> tuple[list[CollectiveRow], Callable[[float], float]]:
    """Collectives in place of `old` ones, and the new moment of each moment.

    They are started and waited for at the same places; compute between these takes as long.
    """
    events = [(row.issued, 0, number) for number, row in enumerate(old)]
    events += [(row.waited, 1, number) for number, row in enumerate(old)]
    clock, played, rows = Clock(), 0.0, dict[int, CollectiveRow]()
    moments, clocks = [0.0], [0.0]
    for moment, waits, number in sorted(events):
        clock.now += max(0.0, moment - played)
        played = max(played, moment) + (old[number].exposed if waits else 0.0)
        row, before = new[number], clock.now
        if row is not None and waits:
            clock.wait(number)
            rows[number] = replace(rows[number], waited=before, exposed=clock.now - before)
        elif row is not None:
            seconds, then = _on_wires(old, number)
            start = clock.start(number, seconds, then=then)
            rows[number] = replace(row, issued=before, start=start, end=clock.arrived[number])
        moments.append(played)
        clocks.append(clock.now)

    def moved(moment: float) -> float:
        last = bisect.bisect_right(moments, moment) - 1
        later = clocks[last] + moment - moments[last]
        return min([later, *clocks[last + 1 : last + 2]])  # a stall may be shorter

    return [rows[number] for number in sorted(rows)], moved


def _on_wires(rows: Sequence[CollectiveRow], number: int) -> tuple[float, float]:
    """The seconds of a collective on the wire, and then inside of nodes.

    The next one starts when the wire is free.
    """
    row = rows[number]
    if not row.in_steps or number + 1 == len(rows):
        return row.seconds, 0.0
    seconds = min(row.seconds, max(0.0, rows[number + 1].start - row.start))
    return seconds, row.seconds - seconds


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
