"""Replay of a step in which collectives take other times.

Ops keep their order and their times, and each collective starts and is waited for between the same
ops. No new schedule is made for the other times.
"""

import bisect
import itertools
from collections.abc import Callable
from dataclasses import dataclass

from shardc.passes.schedule.timeline import Clock
from shardc.reports.record import CollectiveRow, Record


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
