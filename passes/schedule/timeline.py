"""When to start gathers and to wait for reductions: the decision, as a pure function.

A graph is seen as a line of events, the places where a collective may start: between two events
lies compute that takes some seconds. Gathers are needed at an event; reductions are ready at one.
There is one wire, which sends in the order it is given. Where collectives go in two steps, those
inside of nodes have wires of their own, gathers one and reductions one, as they have communicators.

Values that are saved on the host travel on two more wires, one for each direction. So does the
optimizer's state that waits there: it leaves when the forward begins, and its memory is free once
it has arrived; it starts back as late as it can and still be there when the backward ends.

A gather starts as late as it can and still be there when it is needed (`_latest`), but no later
than a hint asks, and no earlier than the bytes in flight allow (`_earliest`). Starting earlier
than needed costs memory, never time. The plan depends on nothing but its arguments, which ranks
agree on, so that the order of collectives is the same everywhere.
"""

import bisect
import itertools
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal, TypeVar, get_args


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
    """Bounds on memory.

    Attributes:
        in_flight: bytes of gathered buckets that may be under way or waiting to be read; one
            bucket is always allowed.
        reduce_in_flight: bytes of inputs of reductions that may be under way; one always may.
        reduce_buffers: how many reductions may be under way, at most.
        copies_in_flight: bytes of values that may be on their way to the host, and of those that
            may be on their way from there or waiting to be read; one always may.
    """

    in_flight: int
    reduce_in_flight: int
    reduce_buffers: int | None = None
    copies_in_flight: int = 0


@dataclass(frozen=True)
class Timeline:
    """The plan: for each gather the event at which it starts, for each reduction the one at which
    it is waited for (the number of events: at the end). The same for loads and saves, and for
    states that return, and those that leave."""

    starts: tuple[int, ...]
    waits: tuple[int, ...]
    load_starts: tuple[int, ...] = ()
    save_waits: tuple[int, ...] = ()
    return_starts: tuple[int, ...] = ()
    leave_waits: tuple[int, ...] = ()


@dataclass(frozen=True)
class Problem:
    """The input of the timeline.

    Attributes:
        seconds: compute between event i and i + 1, one figure an event.
        gathers: in the order in which they are needed.
        reduces: in the order in which they are ready.
        limits: bounds on memory.
        loads: copies of values from the host, in the order in which they are needed.
        saves: copies of values to the host, in the order in which they are ready.
        leaving, returning: seconds of the copies of optimizers' states to the host, from the
            beginning on, and from there, until the end.
    """

    seconds: tuple[float, ...]
    gathers: tuple[Gather, ...]
    reduces: tuple[Reduce, ...]
    limits: Limits
    loads: tuple[Gather, ...] = ()
    saves: tuple[Reduce, ...] = ()
    leaving: tuple[float, ...] = ()
    returning: tuple[float, ...] = ()

    @property
    def wire_seconds(self) -> float:
        """Seconds that the busiest wire needs for all transfers."""
        sent = {"gathers": 0.0, "wire": sum(g.seconds for g in self.gathers), "reductions": 0.0}
        for reduce in self.reduces:
            sent["reductions" if reduce.inside else "wire"] += reduce.seconds
        sent["gathers"] = sum(gather.then for gather in self.gathers)
        sent["loads"] = sum(load.seconds for load in self.loads) + sum(self.returning)
        sent["saves"] = sum(save.seconds for save in self.saves) + sum(self.leaving)
        return max(sent.values())


MARGIN = 2.0
"""A gather is in time even if compute is this much faster than modelled: a late start saves memory
only, a stall costs time, and models of compute are off by tens of per cent."""


def plan_timeline(problem: Problem) -> Timeline:
    """Place the starts of gathers and loads, and the waits for reductions and saves."""
    seconds, limits = problem.seconds, problem.limits
    copies = Limits(limits.copies_in_flight, limits.copies_in_flight)
    returning = [Gather(len(seconds), 0, each) for each in problem.returning]
    latest = _latest(seconds, [*problem.loads, *returning], ())
    return Timeline(
        _starts(problem.gathers, _latest(seconds, problem.gathers, problem.reduces), limits),
        _waits(problem.reduces, limits, len(seconds)),
        _starts(problem.loads, latest[: len(problem.loads)], copies),
        _waits(problem.saves, copies, len(seconds)),
        tuple(latest[len(problem.loads) :]),
        _left(seconds, problem.leaving),
    )


def _left(seconds: Sequence[float], leaving: Sequence[float]) -> tuple[int, ...]:
    """The event at which each state that leaves has arrived, one after the other."""
    passed = [0.0, *itertools.accumulate(each / MARGIN for each in seconds[:-1])]
    return tuple(bisect.bisect_left(passed, at) for at in itertools.accumulate(leaving))


def _starts(gathers: Sequence[Gather], latest: Sequence[int], limits: Limits) -> tuple[int, ...]:
    """Where each gather starts, given where it may at the latest."""
    starts: list[int] = []
    for index, gather in enumerate(gathers):
        if gather.wanted is not None:
            start = gather.wanted
        else:
            start = max(latest[index], _earliest(gathers, index, limits.in_flight))
        starts.append(max(min(start, gather.needed), starts[-1] if starts else 0))
    return tuple(starts)


Wire = Literal["wire", "gathers inside", "reductions inside", "to host", "from host"]
"""What carries messages: the network, links inside of nodes, the link to the host."""


class Clock:
    """Time in a step: compute goes on by itself, transfers queue on their wire.

    Attributes:
        now: seconds of compute, stalls included.
        arrived: when each transfer that was started is done.
    """

    def __init__(self) -> None:
        self.now = 0.0
        self.arrived: dict[Hashable, float] = {}
        self._free = dict.fromkeys(get_args(Wire), 0.0)

    def start(
        self, transfer: Hashable, seconds: float, queue: Wire = "wire", then: float = 0.0
    ) -> float:
        """Send something, behind what is on its wire; when that begins to.

        Args:
            transfer: what is sent.
            seconds: on its wire.
            queue: which one that is.
            then: seconds on that of gathers inside of nodes, afterwards.
        """
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
    lists: list[list[list[_Sent]]] = [[[] for _ in range(end + 1)] for _ in range(4)]
    started, needed, ready, waited = lists
    for gather, start, wire in _planned(
        ("wire", problem.gathers, timeline.starts),
        ("from host", problem.loads, timeline.load_starts),
    ):
        sent = _Sent(wire, gather.seconds, gather.then)
        started[start].append(sent)
        needed[gather.needed].append(sent)
    for reduce, wait, wire in _planned(
        ("wire", problem.reduces, timeline.waits), ("to host", problem.saves, timeline.save_waits)
    ):
        sent = _Sent("reductions inside" if reduce.inside else wire, reduce.seconds)
        ready[reduce.ready].append(sent)
        waited[wait].append(sent)
    for seconds, start in zip(problem.returning, timeline.return_starts, strict=True):
        started[start].append(_Sent("from host", seconds))
    for seconds, wait in zip(problem.leaving, timeline.leave_waits, strict=True):
        sent = _Sent("to host", seconds)
        started[0].append(sent)
        needed[wait].append(sent)
    clock = Clock()
    for event, interval in enumerate([*problem.seconds, 0.0]):
        for sent in started[event]:
            clock.start(sent, sent.seconds, sent.wire, sent.then)
        for sent in ready[event]:
            for earlier in waited[event]:
                if event < end and earlier in clock.arrived:
                    clock.wait(earlier)
            clock.start(sent, sent.seconds, sent.wire)
        for sent in needed[event]:
            clock.wait(sent)
        clock.now += interval / speed
    return clock.end


_Transfer = TypeVar("_Transfer", Gather, Reduce)


def _planned(
    *groups: tuple[Wire, Sequence[_Transfer], Sequence[int]],
) -> Iterator[tuple[_Transfer, int, Wire]]:
    """Every transfer, the event that was planned for it, and its wire."""
    for wire, transfers, events in groups:
        for transfer, event in zip(transfers, events, strict=True):
            yield transfer, event, wire


@dataclass(frozen=True, eq=False)
class _Sent:
    """One transfer of a simulated step, known by its identity."""

    wire: Wire
    seconds: float
    then: float = 0.0


def _latest(
    seconds: Sequence[float], gathers: Sequence[Gather], reduces: Sequence[Reduce]
) -> list[int]:
    """The last event at which each gather may start to be in time, on a wire it shares."""
    clock = [0.0]
    for interval in seconds:
        clock.append(clock[-1] + interval / MARGIN)
    latest = [0] * len(gathers)
    must_end = must_end_inside = float("inf")
    event, pending = len(seconds), [reduce for reduce in reduces if not reduce.inside]
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


def _earliest(gathers: Sequence[Gather], index: int, limit: int) -> int:
    """The first event at which a gather fits beside what is under way or waiting to be read."""
    # What is needed at event e is read by the step after it, so it still counts at e.
    gather = gathers[index]
    free = limit - gather.nbytes
    for place in range(index - 1, -1, -1):
        other = gathers[place]
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
