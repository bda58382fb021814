"""When transfers start and when they are waited for: the decision, as a pure function.

A graph is seen as a line of events, the places where a transfer may start: between two events
lies compute that takes some seconds. Each transfer occupies one wire, which sends in the order it
is given. Collectives in two steps have wires of their own inside of nodes, gathers one and
reductions one, as they have communicators. The link to the host is a wire in each direction.

A transfer that brings (a gather, a load, the return of an optimizer's state) starts as late as it
can and still be there when it is needed (`_latest`), but no later than a hint asks, and no earlier
than the bytes in flight allow (`_earliest`). Starting earlier than needed costs memory, never time.
A reduction and a save start when they are ready, and are waited for as late as the bytes in flight
allow (`_waits`). A state that leaves starts first of all, and is waited for once it has arrived
(`_arrivals`): its memory is free from then on.

The plan depends on nothing but its arguments, which ranks agree on, so that the order of
collectives is the same everywhere.
"""

import bisect
import itertools
import math
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, get_args

Kind = Literal["gather", "reduce", "load", "save", "leave", "return"]
"""The kinds of transfers: of buckets between ranks; of saved values from the host and to it; of
optimizers' states to the host and from it."""
KINDS: tuple[Kind, ...] = get_args(Kind)
BRINGS: tuple[Kind, ...] = ("gather", "load", "return")
"""The kinds whose result is read: they are waited for where it is, and start earlier."""
STATES: tuple[Kind, ...] = ("leave", "return")
"""The kinds that move an optimizer's state. Their bytes in flight have no bound."""

Wire = Literal["wire", "gathers inside", "reductions inside", "to host", "from host"]
"""The carriers of messages: the network, links inside of nodes, the link to the host."""

_WIRES: Mapping[Kind, Wire] = {
    "gather": "wire",
    "reduce": "wire",
    "load": "from host",
    "save": "to host",
    "leave": "to host",
    "return": "from host",
}


@dataclass(frozen=True)
class Transfer:
    """Bytes that travel on a wire while compute goes on.

    Attributes:
        kind: of a bucket, a value or a state, and in which direction.
        event: if it brings, the event before its first reader; else the one at which it is ready.
        nbytes: held in addition from the start until the wait.
        seconds: on its wire.
        wanted: the event at which a prefetch hint asks for it; None leaves it to the plan.
        then: seconds that follow on the wire of gathers inside of nodes.
        fixed: the part of `seconds` that does not depend on the bytes.
        inside: whether it is the step of a reduction that stays inside of nodes.
    """

    kind: Kind
    event: int
    nbytes: int
    seconds: float
    wanted: int | None = None
    then: float = 0.0
    fixed: float = 0.0
    inside: bool = False

    @property
    def brings(self) -> bool:
        """Whether compute reads the bytes that arrive."""
        return self.kind in BRINGS

    @property
    def wire(self) -> Wire:
        """The wire that carries the transfer; if some seconds are for another one, first."""
        return "reductions inside" if self.inside else _WIRES[self.kind]


@dataclass(frozen=True)
class Problem:
    """The input of the timeline.

    Attributes:
        seconds: compute between event i and i + 1, one figure an event.
        transfers: kind by kind, in the order of `KINDS`; those of one kind by their events.
        in_flight: for each kind, the bytes that may be under way or waiting to be read; one
            transfer always may. A kind that is missing has no bound.
        reduce_buffers: most reductions that may be under way.
    """

    seconds: tuple[float, ...]
    transfers: tuple[Transfer, ...]
    in_flight: Mapping[Kind, int]
    reduce_buffers: int | None = None

    def of(self, kind: Kind) -> list[Transfer]:
        """The transfers of a kind."""
        return [transfer for transfer in self.transfers if transfer.kind == kind]

    @property
    def wire_seconds(self) -> float:
        """Seconds that the busiest wire needs for all transfers."""
        sent: dict[Wire, float] = dict.fromkeys(get_args(Wire), 0.0)
        for transfer in self.transfers:
            sent[transfer.wire] += transfer.seconds
            sent["gathers inside"] += transfer.then
        return max(sent.values())


@dataclass(frozen=True)
class Timeline:
    """The plan: for each transfer, the events at which it starts and at which it is waited for (the
    number of events: at the end)."""

    starts: tuple[int, ...]
    waits: tuple[int, ...]


MARGIN = 2.0
"""A gather is in time even if compute is this much faster than modelled: a late start saves memory
only, a stall costs time, and models of compute are off by tens of per cent."""


def plan_timeline(problem: Problem) -> Timeline:
    """Place the start and the wait of each transfer."""
    transfers = problem.transfers
    passed = [0.0, *itertools.accumulate(each / MARGIN for each in problem.seconds)]
    starts = [transfer.event for transfer in transfers]
    waits, latest = list(starts), _latest(transfers, passed)
    for kind in KINDS:
        places = [place for place, transfer in enumerate(transfers) if transfer.kind == kind]
        queue = [transfers[place] for place in places]
        limit = problem.in_flight.get(kind, math.inf)
        if kind == "leave":
            planned, into = _arrivals(queue, passed[:-1]), waits
        elif kind in ("reduce", "save"):
            buffers = problem.reduce_buffers if kind == "reduce" else None
            planned, into = _waits(queue, limit, buffers, len(problem.seconds)), waits
        else:
            planned, into = _starts(queue, [latest[place] for place in places], limit), starts
        for place, event in zip(places, planned, strict=True):
            into[place] = event
    return Timeline(tuple(starts), tuple(waits))


def _starts(queue: Sequence[Transfer], latest: Sequence[int], limit: float) -> list[int]:
    """The starts of the transfers of a kind that brings, given the latest ones."""
    starts: list[int] = []
    for index, transfer in enumerate(queue):
        if transfer.wanted is not None:
            start = transfer.wanted
        else:
            start = max(latest[index], _earliest(queue, index, limit))
        starts.append(max(min(start, transfer.event), starts[-1] if starts else 0))
    return starts


def _latest(transfers: Sequence[Transfer], passed: Sequence[float]) -> dict[int, int]:
    """The latest start of each transfer that brings, by its place, to be in time on its wire.

    Transfers on one wire may delay each other. `passed` are seconds of compute before each event.
    """
    latest: dict[int, int] = {}
    for wire in ("wire", "from host"):
        carried = [(place, each) for place, each in enumerate(transfers) if each.wire == wire]
        bringing = [(place, each) for place, each in carried if each.brings]
        pending = [each for _, each in carried if not each.brings]
        event, must_end, must_end_inside = len(passed) - 1, math.inf, math.inf
        for index, (place, transfer) in reversed(list(enumerate(bringing))):
            # A transfer that is ready before this one is needed may be ahead of it on the wire.
            ahead = 0.0
            while pending and pending[-1].event >= transfer.event:
                pending.pop()
            previous = bringing[index - 1][1].event if index else 0
            while pending and pending[-1].event > previous:
                ahead += pending.pop().seconds
            arrives = passed[transfer.event]
            if transfer.then:
                arrives = must_end_inside = min(must_end_inside, arrives) - transfer.then
            must_end = min(must_end, arrives) - transfer.seconds - ahead
            event = min(event, transfer.event)
            while event > 0 and passed[event] > must_end:
                event -= 1
            latest[place] = event
    return latest


def _earliest(queue: Sequence[Transfer], index: int, limit: float) -> int:
    """The first event at which a transfer fits beside those that are under way or not read yet."""
    # The step after event e reads a transfer needed at e, so its bytes still count at e.
    transfer = queue[index]
    free = limit - transfer.nbytes
    for other in reversed(queue[:index]):
        free -= other.nbytes
        # Between those needed together there is no event.
        if free < 0 and other.event < transfer.event:
            return other.event + 1
    return 0


def _waits(queue: Sequence[Transfer], limit: float, buffers: int | None, end: int) -> list[int]:
    """The waits for reductions or for saves: where a later one would exceed the limits, or the
    end."""
    waits = [end] * len(queue)
    oldest, held = 0, 0
    for index, transfer in enumerate(queue):
        held += transfer.nbytes
        while oldest < index and (
            held > limit or (buffers is not None and index - oldest >= buffers)
        ):
            waits[oldest] = transfer.event
            held -= queue[oldest].nbytes
            oldest += 1
    return waits


def _arrivals(queue: Sequence[Transfer], passed: Sequence[float]) -> list[int]:
    """The events at which transfers have arrived that start at the beginning, one after the
    other."""
    arrived = itertools.accumulate(transfer.seconds for transfer in queue)
    return [bisect.bisect_left(passed, seconds) for seconds in arrived]


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
        self, transfer: Hashable, seconds: float, wire: Wire = "wire", then: float = 0.0
    ) -> float:
        """Send a transfer behind those on its wire; when the wire begins to carry it.

        Afterwards it takes `then` seconds on the wire of gathers inside of nodes.
        """
        begin = max(self._free[wire], self.now)
        end = self._free[wire] = begin + seconds
        if then:
            end = self._free["gathers inside"] = max(self._free["gathers inside"], end) + then
        self.arrived[transfer] = end
        return begin

    def wait(self, transfer: Hashable) -> None:
        """Stall until a transfer has arrived."""
        self.now = max(self.now, self.arrived[transfer])

    @property
    def end(self) -> float:
        """When all compute and all transfers are done."""
        return max(self.now, *self._free.values())


def simulate(problem: Problem, timeline: Timeline, speed: float = 1.0) -> float:
    """Seconds from the first event until all compute and all transfers are done.

    `speed` is how much faster than modelled compute is.
    """
    transfers, end = problem.transfers, len(problem.seconds)
    lists: list[list[list[int]]] = [[[] for _ in range(end + 1)] for _ in range(4)]
    first, then, due, needed = lists  # at each event: the starts, and the waits, of two groups
    for place, transfer in enumerate(transfers):
        is_late = transfer.kind in ("reduce", "save")
        (then if is_late else first)[timeline.starts[place]].append(place)
        (due if is_late else needed)[timeline.waits[place]].append(place)
    clock = Clock()

    def start(place: int) -> None:
        transfer = transfers[place]
        clock.start(place, transfer.seconds, transfer.wire, transfer.then)

    for event, interval in enumerate([*problem.seconds, 0.0]):
        for place in first[event]:
            start(place)
        for place in then[event]:
            for earlier in due[event]:
                if event < end and earlier in clock.arrived:
                    clock.wait(earlier)
            start(place)
        for place in needed[event]:
            clock.wait(place)
        clock.now += interval / speed
    return clock.end
