"""Additions to a record's rows for pictures: lanes, and the op that needs each collective."""

from bisect import bisect_left
from collections.abc import Iterable
from operator import attrgetter

from shardc.reports.record import CollectiveRow, Op, Record

SLACK = 2e-9
"""Seconds below which two times count as one: sums of floats differ in their last digits, and
traces round to 1 ns."""


def lanes_of(spans: Iterable[tuple[float, float]]) -> list[int]:
    """A lane for each span (start, end), such that spans of one lane do not overlap.

    A span takes the first free lane, so spans that follow one another share lane 0.
    """
    spans = list(spans)
    lanes = [0] * len(spans)
    free: list[float] = []  # the time at which each lane is free again
    for index in sorted(range(len(spans)), key=lambda i: spans[i]):
        start, end = spans[index]
        lane = next((i for i, time in enumerate(free) if time <= start + SLACK), len(free))
        free[lane : lane + 1] = [end]
        lanes[index] = lane
    return lanes


def resumed(collective: CollectiveRow) -> float:
    """The time at which compute resumes after the wait for a collective."""
    return collective.waited + collective.exposed


def op_indices(record: Record) -> list[int | None]:
    """The index of the first op after the wait for each collective; None if no op follows."""
    order = sorted(range(len(record.ops)), key=lambda i: record.ops[i].start)
    starts = [record.ops[i].start for i in order]
    places = [bisect_left(starts, resumed(c) - SLACK) for c in record.collectives]
    return [order[place] if place < len(order) else None for place in places]


def stalls(record: Record) -> list[CollectiveRow]:
    """The exposed collectives, in the order in which compute waits for them."""
    return sorted((c for c in record.collectives if c.exposed > SLACK), key=attrgetter("waited"))


def op_label(op: Op) -> str:
    """The name and the module of an op, in one line."""
    return f"{op.name} {op.module}".rstrip()
