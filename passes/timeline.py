"""When to start gathers and to wait for reductions: the decision, as a pure function.

A graph is seen as a line of events, the places where a collective may start: between two events
lies compute that takes some seconds. Gathers are needed at an event; reductions are ready at one.
There is one wire, which sends in the order it is given. Where collectives go in two steps, those
inside of nodes have wires of their own, gathers one and reductions one, as they have communicators.

A gather starts as late as it can and still be there when it is needed (`_latest`), but no later
than a hint asks, and no earlier than the bytes in flight allow (`_earliest`). Starting earlier
than needed costs memory, never time. The plan depends on nothing but its arguments, which ranks
agree on, so that the order of collectives is the same everywhere.
"""

from collections.abc import Hashable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Gather:
    """An all-gather.

    Attributes:
        needed: the event before its first reader.
        nbytes: what it makes live.
        seconds: on the wire.
        wanted: the event at which a prefetch hint asks for it; None leaves it to the plan.
        then: seconds that follow on the wire inside of nodes.
        fixed: the part of `seconds` that it takes whatever it sends.
    """

    needed: int
    nbytes: int
    seconds: float
    wanted: int | None = None
    then: float = 0.0
    fixed: float = 0.0


@dataclass(frozen=True)
class Reduce:
    """A reduction.

    Attributes:
        ready: the event at which its input is there.
        nbytes: of its input, live from then until the wait.
        seconds: on the wire.
        inside: whether that is the wire inside of nodes.
        fixed: the part of `seconds` that it takes whatever it sends.
    """

    ready: int
    nbytes: int
    seconds: float
    inside: bool = False
    fixed: float = 0.0


@dataclass(frozen=True)
class Limits:
    """What bounds memory.

    Attributes:
        in_flight: bytes of gathered buckets that may be under way or waiting to be read; one
            bucket is always allowed.
        reduce_in_flight: bytes of inputs of reductions that may be under way; one always may.
        reduce_buffers: how many reductions may be under way, at most.
    """

    in_flight: int
    reduce_in_flight: int
    reduce_buffers: int | None = None


@dataclass(frozen=True)
class Timeline:
    """The plan: for each gather the event at which it starts, for each reduction the one at which
    it is waited for (the number of events: at the end)."""

    starts: tuple[int, ...]
    waits: tuple[int, ...]


@dataclass(frozen=True)
class Problem:
    """What is to be planned.

    Attributes:
        seconds: compute between event i and i + 1, one figure an event.
        gathers: in the order in which they are needed.
        reduces: in the order in which they are ready.
        limits: bounds on memory.
    """

    seconds: tuple[float, ...]
    gathers: tuple[Gather, ...]
    reduces: tuple[Reduce, ...]
    limits: Limits

    @property
    def wire_seconds(self) -> float:
        """What the wire that is busiest needs for everything."""
        sent = {"gathers": 0.0, "wire": sum(g.seconds for g in self.gathers), "reductions": 0.0}
        for reduce in self.reduces:
            sent["reductions" if reduce.inside else "wire"] += reduce.seconds
        sent["gathers"] = sum(gather.then for gather in self.gathers)
        return max(sent.values())


MARGIN = 2.0
"""A gather is in time even if compute is this much faster than modelled: a late start saves memory
only, a stall costs time, and models of compute are off by tens of per cent."""


def plan_timeline(problem: Problem) -> Timeline:
    """Place the starts of gathers and the waits for reductions."""
    latest = _latest(problem)
    starts: list[int] = []
    for index, gather in enumerate(problem.gathers):
        if gather.wanted is not None:
            start = gather.wanted
        else:
            before = problem.gathers[:index]
            start = max(latest[index], _earliest(gather, before, problem.limits.in_flight))
        starts.append(max([min(start, gather.needed), *starts[-1:]]))
    return Timeline(tuple(starts), _waits(problem.reduces, problem.limits, len(problem.seconds)))


class Clock:
    """Time in a step: compute goes on by itself, transfers queue on their wire.

    Attributes:
        now: seconds of compute, stalls included.
        arrived: when each transfer that was started is done.
    """

    def __init__(self) -> None:
        self.now = 0.0
        self.arrived: dict[Hashable, float] = {}
        self._free = {"wire": 0.0, "gathers inside": 0.0, "reductions inside": 0.0}

    def start(
        self, transfer: Hashable, seconds: float, inside: bool = False, then: float = 0.0
    ) -> float:
        """Send something, behind what is on its wire; when that begins to.

        Args:
            seconds: on the wire; with `inside`, on that of reductions inside of nodes.
            then: on that of gathers inside of nodes, afterwards.
        """
        queue = "reductions inside" if inside else "wire"
        begin = max(self._free[queue], self.now)
        end = self._free[queue] = begin + seconds
        if then:
            end = self._free["gathers inside"] = max(self._free["gathers inside"], end) + then
        self.arrived[transfer] = end
        return begin

    def wait(self, transfer: Hashable) -> None:
        """Stall until it has arrived."""
        self.now = max(self.now, self.arrived[transfer])

    @property
    def end(self) -> float:
        """When all compute and all transfers are done."""
        return max(self.now, *self._free.values())


def simulate(problem: Problem, timeline: Timeline, speed: float = 1.0) -> float:
    """Seconds from the first event until all compute and all transfers are done.

    `speed` is how much faster than modelled compute is.
    """
    end = len(problem.seconds)
    lists: list[list[list[int]]] = [[[] for _ in range(end + 1)] for _ in range(4)]
    started, needed, ready, waited = lists
    for index, (gather, start) in enumerate(zip(problem.gathers, timeline.starts, strict=True)):
        started[start].append(index)
        needed[gather.needed].append(index)
    for index, (reduce, wait) in enumerate(zip(problem.reduces, timeline.waits, strict=True)):
        ready[reduce.ready].append(index)
        waited[wait].append(index)
    clock = Clock()
    for event, interval in enumerate([*problem.seconds, 0.0]):
        for index in started[event]:
            gather = problem.gathers[index]
            clock.start(index, gather.seconds, then=gather.then)
        for index in ready[event]:
            for earlier in waited[event]:
                if event < end and ~earlier in clock.arrived:
                    clock.wait(~earlier)
            reduce = problem.reduces[index]
            clock.start(~index, reduce.seconds, reduce.inside)  # ~: another key than a gather's
        for index in needed[event]:
            clock.wait(index)
        clock.now += interval / speed
    return clock.end


def _latest(problem: Problem) -> list[int]:
    """The last event at which each gather may start to be in time, on a wire it shares."""
    gathers, seconds = problem.gathers, problem.seconds
    clock = [0.0]
    for interval in seconds:
        clock.append(clock[-1] + interval / MARGIN)
    latest = [0] * len(gathers)
    must_end = must_end_inside = float("inf")
    event, pending = len(seconds), [reduce for reduce in problem.reduces if not reduce.inside]
    for index in reversed(range(len(gathers))):
        gather = gathers[index]
        # Reductions that become ready before this one is needed may be ahead of it on the wire.
        ahead = 0.0
        while pending and pending[-1].ready >= gather.needed:
            pending.pop()
        previous = gathers[index - 1].needed if index else 0
        while pending and pending[-1].ready > previous:
            ahead += pending.pop().seconds
        arrives = clock[gather.needed]
        if gather.then:
            arrives = must_end_inside = min(must_end_inside, arrives) - gather.then
        must_end = min(must_end, arrives) - gather.seconds - ahead
        event = min(event, gather.needed)
        while event > 0 and clock[event] > must_end:
            event -= 1
        latest[index] = event
    return latest


def _earliest(gather: Gather, before: Sequence[Gather], limit: int) -> int:
    """The first event at which `gather` fits beside what is under way or waiting to be read."""
    # What is needed at event e is read by the step after it, so it still counts at e.
    free = limit - gather.nbytes
    for other in reversed(before):
        if other.needed < gather.needed:
            free -= other.nbytes
            if free < 0:
                return other.needed + 1
        else:  # needed together: there is no event between them
            free -= other.nbytes
    return 0


def _waits(reduces: Sequence[Reduce], limits: Limits, end: int) -> tuple[int, ...]:
    """Where each reduction is waited for: where a later one would exceed the limits, or the end."""
    waits = [end] * len(reduces)
    oldest, held = 0, 0
    for index, reduce in enumerate(reduces):
        held += reduce.nbytes
        while oldest < index and (
            held > limits.reduce_in_flight
            or (limits.reduce_buffers is not None and index - oldest >= limits.reduce_buffers)
        ):
            waits[oldest] = reduce.ready
            held -= reduces[oldest].nbytes
            oldest += 1
    return tuple(waits)
