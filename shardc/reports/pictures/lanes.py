"""Additions to a record's rows for pictures: lanes, and which op each collective is for."""

from bisect import bisect_left
from collections.abc import Iterable
from operator import attrgetter

from shardc.reports.record import CollectiveRow, Op, Record

SLACK = 2e-9
"""Seconds below which two times count as one: sums of floats differ in their last digits, and
traces round to 1 ns."""


def lanes_of(spans: Iterable[tuple[float, float]]) -> list[int]:
    """For each span (start, end) a lane, such that those of one lane do not overlap.

    The first lane that is free is taken, so spans that follow one another share lane 0.
    """
    spans = list(spans)
    lanes = [0] * len(spans)
    free: list[float] = []  # when each lane is free again
    for index in sorted(range(len(spans)), key=lambda i: spans[i]):
        start, end = spans[index]
        lane = next((i for i, time in enumerate(free) if time <= start + SLACK), len(free))
        free[lane : lane + 1] = [end]
        lanes[index] = lane
    return lanes


def resumed(collective: CollectiveRow) -> float:
    """When compute goes on after the wait for a collective."""
    return collective.waited + collective.exposed


def op_indices(record: Record) -> list[int | None]:
    """For each collective the index of the op that is computed first after the wait for it."""
    order = sorted(range(len(record.ops)), key=lambda i: record.ops[i].start)
    starts = [record.ops[i].start for i in order]
    places = [bisect_left(starts, resumed(c) - SLACK) for c in record.collectives]
    return [order[place] if place < len(order) else None for place in places]


def stalls(record: Record) -> list[CollectiveRow]:
    """The collectives that compute stands still for, as it comes to them."""
    return sorted((c for c in record.collectives if c.exposed > SLACK), key=attrgetter("waited"))


def label_of(op: Op) -> str:
    """An op and where it comes from, in one line."""
    return f"{op.name} {op.module}".rstrip()
