"""Replays of a step: collectives take other times, or the step is one graph.

In `replay`, ops keep their order and their times, and each collective starts and is waited for
between the same ops. No new schedule is made for the other times.

In `whole_step`, the last reductions travel while the optimizer updates the parameters whose
gradients are there (`passes/schedule/update_when_reduced.py`). A bucket is updated once its last
reduction has arrived, and its gradient is freed. Quantised messages are waited for before
(`passes/rewrite/cut_tail.py`). Gradients are not clipped: a norm of all of them needs every
reduction first.
"""

import bisect
import itertools
import math
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

from shardc.passes.schedule.timeline import Clock
from shardc.reports.record import KINDS, CollectiveRow, MemoryPoint, Record

_R = TypeVar("_R", bound=Record)
_GRADIENTS = KINDS.index("gradients")


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


def whole_step(record: _R) -> _R:
    """The record of the same step as one graph; a record without an optimizer stays as it is."""
    update = next((op for op in record.ops if op.phase == "optimizer"), None)
    if update is None:
        return record
    rows = list(record.collectives)
    sent = _last_send(rows)
    ends = [_reduces(row) and row.waited >= sent and row.dtype != "int8" for row in rows]
    late = [number for number, is_late in enumerate(ends) if is_late]
    last = {name: number for number in late for name in rows[number].buckets}
    sizes = {row.name: row.segment for row in record.buckets if row.trained}
    total = sum(sizes.values())
    ops = [op for op in record.ops if op.start < sent]
    behind = deque(op for op in record.ops if op.start >= sent and op is not update)
    memory = [point for point in record.memory if point.seconds <= sent]
    held, clock = record.memory[-1].held, sent
    untils = [*(rows[number].waited for number in late), math.inf]
    for number, until in zip([None, *late], untils, strict=True):
        if number is not None:
            end = rows[number].end
            rows[number] = replace(rows[number], waited=clock, exposed=max(0.0, end - clock))
            clock = max(clock, end)
        while behind and behind[0].start < until:
            ops.append(replace(behind.popleft(), start=clock))
            clock += ops[-1].seconds
        size = sum(sizes[name] for name in sizes if last.get(name) == number)
        if size:
            ops.append(replace(update, start=clock, seconds=update.seconds * size / total))
            memory.append(MemoryPoint(clock, held, update.phase))
            clock += ops[-1].seconds
            held = (*held[:_GRADIENTS], held[_GRADIENTS] - size, *held[_GRADIENTS + 1 :])
    return replace(
        record,
        settings={**record.settings, "step": "one graph"},
        collectives=tuple(rows),
        ops=tuple(ops),
        memory=(*memory, MemoryPoint(clock, held, update.phase)),
    )


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
