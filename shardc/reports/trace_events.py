"""Events of collectives in a trace of `torch.profiler`: our labels, waits, kernels of a GPU."""

import dataclasses
import functools
import gzip
import itertools
import json
import math
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shardc.reports.record import ROW_KINDS, Record
from shardc.runtime.groups.backends import BACKENDS
from shardc.runtime.watch.progress import COPIES, read_name

HOW = """record a few steps of one rank, after a first step that compiles:

    with torch.profiler.profile() as p:
        for batch in batches: ...  # forward, backward, optimizer
    p.export_chrome_trace("trace.json")"""

Key = tuple[str, tuple[str, ...]]
"""The kind and the buckets of a collective."""


@dataclass(frozen=True)
class LabelEvent:
    """A label of ours in a trace; times in seconds."""

    kind: str
    buckets: tuple[str, ...]
    waits: bool
    start: float
    seconds: float
    thread: Any

    @classmethod
    def read(cls, event: Mapping[str, Any]) -> "LabelEvent | None":
        parts = read_name(event["name"])
        if parts is None or parts[0] in COPIES:  # no collective
            return None
        if event.get("cat") != "user_annotation":  # the GPU's copy of the label
            return None
        return cls(*parts, event["ts"] / 1e6, event["dur"] / 1e6, event.get("tid"))

    def holds(self, event: Mapping[str, Any]) -> bool:
        """Whether `event` is of the same thread and began within the label."""
        since = event["ts"] / 1e6 - self.start
        return 0 <= since <= self.seconds and event.get("tid") == self.thread


def read_trace(trace: str | Path | Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """The events that have a duration, in the order of their starts."""
    if not isinstance(trace, Mapping):
        opened = gzip.open if str(trace).endswith(".gz") else open
        with opened(trace, "rt") as file:
            name, trace = f"'{trace}' is", _parsed(file.read())
    else:
        name = "that is"
    found = trace.get("traceEvents") if isinstance(trace, Mapping) else None
    if not isinstance(found, list):
        raise ValueError(f"{name} not a trace of torch.profiler: {HOW}")
    whole = [event for event in found if event.get("ph") == "X" and "dur" in event]
    return sorted(whole, key=lambda event: event["ts"])


def _parsed(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return None


def with_root(labels: Sequence[LabelEvent], record: Record) -> list[LabelEvent]:
    """The labels with buckets of the root named "(root)", as in the record.

    A bucket that the record does not know is the root's, if the record has such a bucket.
    """
    known = {bucket.name for bucket in record.buckets}
    known |= {name for row in record.collectives for name in row.buckets}

    def named(bucket: str) -> str:
        root = "(root)" + bucket[bucket.find("[") :] * ("[" in bucket)
        return root if bucket not in known and root in known else bucket

    return [dataclasses.replace(x, buckets=tuple(map(named, x.buckets))) for x in labels]


def by_key(labels: Iterable[LabelEvent], waits: bool) -> dict[Key, list[LabelEvent]]:
    found: dict[Key, list[LabelEvent]] = defaultdict(list)
    for label in labels:
        if label.waits == waits:
            found[label.kind, label.buckets].append(label)
    return dict(found)


def stalls_in(
    starts: Mapping[Key, Sequence[LabelEvent]], waits: Mapping[Key, Sequence[LabelEvent]]
) -> dict[LabelEvent, float]:
    """Seconds in the waits for each collective: a coalesced collective has one wait a bucket.
    Messages for rows of a table are waited for inside their start, too."""
    stalls = {}
    for key, started in starts.items():
        found = waits.get(key, [])
        each, left = divmod(len(found), len(started))
        if each and not left:
            for i, label in enumerate(started):
                stalls[label] = sum(w.seconds for w in found[i * each : (i + 1) * each])
                stalls[label] += label.seconds if key[0] in ROW_KINDS else 0.0
    return stalls


_AT_ONCE = 2e-5
"""Seconds within which a stream resumes after the event that it waited for."""

_Spans = list[tuple[float, float]]
"""Intervals (start, end) in seconds, in order, without overlaps."""


@dataclass(frozen=True)
class Kernels:
    """The times of the kernels of a GPU in a trace; empty without a GPU.

    Attributes:
        sent: kernels of collectives, by the label inside of which they were launched.
        computed: all other kernels of one stream, the busiest with such kernels.
    """

    sent: Mapping[LabelEvent, _Spans]
    computed: _Spans

    @classmethod
    def read(cls, events: Sequence[Mapping[str, Any]], starts: Sequence[LabelEvent]) -> "Kernels":
        """Read the kernels of a trace; `starts` are the labels where collectives start."""
        kernels = {_correlation(event): event for event in events if event.get("cat") == "kernel"}
        launches = [
            event
            for event in events
            if event.get("cat") in ("cuda_runtime", "cuda_driver")
            and _correlation(event) in kernels
        ]
        labels = {
            _correlation(event): label
            for label in starts
            for event in launches
            if label.holds(event)
        }
        busy: dict[Any, float] = defaultdict(float)
        for number, event in kernels.items():
            busy[_stream(event)] += 0.0 if number in labels else event["dur"]
        main = max(busy, key=lambda stream: busy[stream]) if any(busy.values()) else None
        named = tuple(backend.kernels for backend in BACKENDS.values() if backend.kernels)
        sent: dict[LabelEvent, list[Mapping[str, Any]]] = defaultdict(list)
        computed = []
        for number, event in kernels.items():
            aside = _stream(event) != main
            if number in labels and (aside or event["name"].startswith(named)):
                sent[labels[number]].append(event)
            elif not aside:
                computed.append(event)
        return cls({label: _merged(found) for label, found in sent.items()}, _merged(computed))

    @property
    def whole(self) -> float:
        """Seconds from the first kernel that computes to the end of the last."""
        return self.computed[-1][1] - self.computed[0][0] if self.computed else 0.0

    @property
    def late(self) -> float:
        """Seconds for which compute stood still between its kernels, but not for a collective."""
        pairs = itertools.pairwise(self.computed)
        gaps = (start - end for (_, end), (start, _) in pairs)
        return max(0.0, sum(gap for gap in gaps if gap > _AT_ONCE) - sum(self.exposed.values()))

    def seconds(self) -> dict[LabelEvent, float]:
        """Seconds that each collective took."""
        return {label: sum(end - start for start, end in self.sent[label]) for label in self.sent}

    @functools.cached_property
    def exposed(self) -> dict[LabelEvent, float]:
        """Seconds for which compute stood still for each collective; empty without compute."""
        if not self.computed:
            return {}
        began = [start for start, _ in self.computed]
        spans = [(end, start, label) for label in self.sent for start, end in self.sent[label]]
        still = dict.fromkeys(self.sent, 0.0)
        waited = math.inf  # the start of the stall for the next exposed collective
        for end, start, label in sorted(spans, key=lambda span: span[:2], reverse=True):
            place = bisect_right(began, end)
            resumes = began[place] if place < len(began) else math.inf
            since = self.computed[place - 1][1] if place else start
            if since < end and min(resumes, waited) - end <= _AT_ONCE:
                still[label] += end - max(start, since)
                waited = max(start, since)
        return still


def _correlation(event: Mapping[str, Any]) -> Any:
    """The number that a kernel and its launch share."""
    return event.get("args", {}).get("correlation")


def _stream(event: Mapping[str, Any]) -> Any:
    return event.get("args", {}).get("stream", event.get("tid"))


def _merged(events: Iterable[Mapping[str, Any]]) -> _Spans:
    """The intervals in which at least one of the events ran."""
    spans: _Spans = []
    for event in sorted(events, key=lambda event: event["ts"]):
        start, end = event["ts"] / 1e6, (event["ts"] + event["dur"]) / 1e6
        if spans and start <= spans[-1][1]:
            spans[-1] = spans[-1][0], max(end, spans[-1][1])
        else:
            spans.append((start, end))
    return spans


def event_seconds(
    events: Sequence[Mapping[str, Any]], labels: Sequence[LabelEvent]
) -> dict[LabelEvent, float]:
    """The durations of a backend's own events, which come in the order of the starts."""
    seconds: dict[LabelEvent, float] = {}
    for kinds, names in (pair for backend in BACKENDS.values() for pair in backend.events):
        own = [label for label in labels if label.kind in kinds and not label.waits]
        theirs = [event["dur"] / 1e6 for event in events if event["name"] in names]
        if len(own) == len(theirs):  # else the trace has other or coalesced collectives
            seconds.update(zip(own, theirs, strict=True))
    return seconds
