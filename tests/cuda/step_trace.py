"""Reads the trace of a step: what ran on which stream, what it touched, and what waited for what.

A line of the trace is one of:

    phase NAME                                forward, backward, optimizer
    device INDEX                              where the launches after it go
    op STREAM NAME r|w:START-END ...          an operator or Triton kernel and its memory, in hex
    kernel|triton STREAM NAME                 a launch, as the runtime or the driver sees it
    gemm STREAM MxNxK                         a product of cuBLAS
    copy STREAM TO FROM BYTES KIND, fill STREAM TO BYTES
    collective STREAM NAME FROM BYTES TO BYTES COMMUNICATOR RANKS registered|plain
                                              communicators have one name on all their ranks; memory
                                              that is registered is known to NCCL
    record STREAM EVENT, wait STREAM EVENT
    sync stream|event|device|copy ...         the host waits
    seen EVENT                                the host asked, and it was done
    capture STREAM, captured STREAM GRAPH, replay STREAM GRAPH

The host is a stream, too: of operators on pinned memory, which copies touch as well.
"""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import combinations, zip_longest
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

HOST = "host"


@dataclass(frozen=True)
class Access:
    """What one launch touches: bytes from `start` to `end`."""

    start: int
    end: int
    writes: bool


@dataclass(frozen=True)
class Race:
    """Two launches on different streams that touch the same bytes, neither behind the other."""

    first: str
    second: str
    lines: tuple[int, int]

    def __str__(self) -> str:
        return f"lines {self.lines[0]} and {self.lines[1]}: {self.first} | {self.second}"


@dataclass(frozen=True)
class Message:
    """A collective as all ranks of its communicator must enter it."""

    communicator: str
    ranks: int
    what: str


@dataclass
class Trace:
    """What a trace says.

    Attributes:
        launches: (phase, kind) of each kernel, Triton kernel, product, copy and fill, counted.
        names: (phase, name) of each kernel and Triton kernel, counted.
        order: for each phase, its name and starts of collectives and the first wait for each.
        moved: bytes that collectives sent, by (phase, name).
        sent: the collectives, in the order of their launches.
        registered: the names of those in memory that NCCL knows, counted.
        devices: where kernels and products were launched.
        syncs: what the host waited for in a phase.
        races: pairs of launches that nothing puts in order.
    """

    launches: Counter[tuple[str, str]] = field(default_factory=Counter)
    names: Counter[tuple[str, str]] = field(default_factory=Counter)
    order: list[list[Any]] = field(default_factory=list)
    moved: Counter[tuple[str, str]] = field(default_factory=Counter)
    sent: list[Message] = field(default_factory=list)
    registered: Counter[str] = field(default_factory=Counter)
    devices: set[int] = field(default_factory=set)
    syncs: list[str] = field(default_factory=list)
    races: list[Race] = field(default_factory=list)

    def count(self, kind: str) -> int:
        """How many launches of a kind there were, in all phases."""
        return sum(count for (_, each), count in self.launches.items() if each == kind)


def read_trace(path: Path) -> Trace:
    """Read a trace and look for races in it."""
    trace, clocks, waits = Trace(), _Clocks(), _Waits()
    phase = "before"
    trace.order.append([phase, []])
    for number, line in enumerate(path.read_text().splitlines(), 1):
        kind, *rest = line.replace("(nil)", "0x0").split()
        if kind == "phase":
            phase = rest[0]
            trace.order.append([phase, []])
        elif kind == "device":
            trace.devices.add(int(rest[0]))
        elif kind == "record":
            clocks.record(*rest)
            waits.record(*rest)
        elif kind == "wait":
            clocks.wait(*rest)
            if waits.is_first(rest[1]):
                trace.order[-1][1].append("wait")
        elif kind == "seen":
            clocks.synchronise(["event", *rest])
        elif kind == "sync":
            clocks.synchronise(rest)
            if phase != "before":
                trace.syncs.append(f"{phase}: {' '.join(rest)}, line {number}")
        else:
            if kind == "collective":
                trace.order[-1][1].append(rest[1])
                trace.moved[phase, rest[1]] += max(int(rest[3]), int(rest[5]))
                what = f"{rest[1]} of {rest[3]} to {rest[5]} bytes"
                trace.sent.append(Message(rest[6], int(rest[7]), what))
                trace.registered[rest[1]] += rest[8] == "registered"
                waits.start(rest[0])
            if kind in ("kernel", "triton"):
                trace.names[phase, rest[1]] += 1
            if kind != "op":
                trace.launches[phase, kind] += 1
            trace.races += clocks.launch(rest[0], " ".join([kind, *rest[1:2]]), number, kind, rest)
    return trace


def partings(traces: Sequence[Trace]) -> list[str]:
    """Where ranks part: GPUs of two ranks that enter different collectives wait for each other.

    Any two ranks must launch the collectives of all communicators that both are in, in one order:
    within a communicator because nothing else says which belong together, and across them because
    each holds multiprocessors while it waits (NCCL's user guide, "Using multiple NCCL communicators
    concurrently").
    """
    found, present = [], Counter[str]()
    for trace in traces:
        present.update({message.communicator for message in trace.sent})
    sizes = {message.communicator: message.ranks for trace in traces for message in trace.sent}
    for name, ranks in sizes.items():
        if present[name] != ranks:
            found.append(f"communicator {name}: {present[name]} of its {ranks} ranks use it")
    for (first, a), (second, b) in combinations(enumerate(traces), 2):
        common = {m.communicator for m in a.sent} & {m.communicator for m in b.sent}
        theirs = [[m for m in trace.sent if m.communicator in common] for trace in (a, b)]
        pairs = enumerate(zip_longest(*theirs))
        if part := next((f"{n}: {x} | {y}" for n, (x, y) in pairs if x != y), None):
            found.append(f"ranks {first} and {second} part at their message {part}")
    return found


def _accesses(kind: str, rest: list[str]) -> Iterator[Access]:
    if kind == "op":
        for each in rest[2:]:
            start, end = each[2:].split("-")
            yield Access(int(start, 16), int(end, 16), each[0] == "w")
    elif kind == "copy":
        to, source, count = int(rest[1], 16), int(rest[2], 16), int(rest[3])
        yield Access(to, to + count, True)
        yield Access(source, source + count, False)
    elif kind == "fill":
        to, count = int(rest[1], 16), int(rest[2])
        yield Access(to, to + count, True)
    elif kind == "collective":
        source, sent, to, received = int(rest[2], 16), int(rest[3]), int(rest[4], 16), int(rest[5])
        yield Access(source, source + sent, False)
        yield Access(to, to + received, True)


class _Waits:
    """Which collectives compute has waited for: their ends are events on their streams."""

    def __init__(self) -> None:
        self._started = set[str]()  # streams with a collective after which nothing was recorded
        self._ends = set[str]()  # events that nobody has waited for

    def start(self, stream: str) -> None:
        self._started.add(stream)

    def record(self, stream: str, event: str) -> None:
        self._ends.discard(event)
        if stream in self._started:
            self._started.discard(stream)
            self._ends.add(event)

    def is_first(self, event: str) -> bool:
        found = event in self._ends
        self._ends.discard(event)
        return found


class _Clocks:
    """Vector clocks of streams, and every access so far.

    A launch is behind another on its own stream that is older, behind what was recorded in the
    events that its stream waited for, and behind all that the host waited for.
    """

    def __init__(self) -> None:
        self._streams: dict[str, int] = {}
        self._clocks: dict[str, NDArray[np.int64]] = {}
        self._events: dict[str, NDArray[np.int64]] = {}
        self._what: list[tuple[str, int]] = []
        # start, end, writes, stream, tick, and the index in `_what`
        self._table = np.zeros((1024, 6), np.uint64)
        self._used = 0

    def _clock(self, stream: str) -> NDArray[np.int64]:
        if stream not in self._streams:
            if len(self._streams) == 64:
                raise ValueError("more than 64 streams")
            self._streams[stream] = len(self._streams)
            self._clocks[stream] = np.zeros(64, np.int64)
        return self._clocks[stream]

    def record(self, stream: str, event: str) -> None:
        self._events[event] = self._clock(stream).copy()

    def wait(self, stream: str, event: str) -> None:
        clock = self._clock(stream)
        np.maximum(clock, self._events.get(event, clock), out=clock)

    def synchronise(self, what: list[str]) -> None:
        host = self._clock(HOST)
        if what[0] == "event":
            seen = [self._events.get(what[1], host)]
        elif what[0] == "stream":
            seen = [self._clock(what[1])]
        else:
            seen = list(self._clocks.values())
        for clock in seen:
            np.maximum(host, clock, out=host)

    def launch(self, stream: str, what: str, line: int, kind: str, rest: list[str]) -> list[Race]:
        """Note what a launch touches; what it races with."""
        clock = self._clock(stream)
        np.maximum(clock, self._clock(HOST), out=clock)  # it was launched after what the host saw
        index = self._streams[stream]
        clock[index] += 1
        accesses = list(_accesses(kind, rest))
        races = [
            Race(self._what[other][0], what, (self._what[other][1], line))
            for access in accesses
            for other in self._conflicts(access, index, clock)
        ]
        for access in accesses:
            self._add(access, index, int(clock[index]))
        if accesses:
            self._what.append((what, line))
        return races

    def _conflicts(self, access: Access, stream: int, clock: NDArray[np.int64]) -> list[int]:
        start, end, writes, streams, ticks, what = self._table[: self._used].T
        meets = (start < access.end) & (end > access.start) & (streams != stream)
        if not access.writes:
            meets &= writes != 0
        candidates = np.flatnonzero(meets)
        unordered = clock[streams[candidates].astype(int)] < ticks[candidates].astype(np.int64)
        return [int(i) for i in dict.fromkeys(what[candidates[unordered]])]

    def _add(self, access: Access, stream: int, tick: int) -> None:
        if self._used == len(self._table):
            self._table = np.concatenate([self._table, np.zeros_like(self._table)])
        row = (access.start, access.end, access.writes, stream, tick, len(self._what))
        self._table[self._used] = row
        self._used += 1
