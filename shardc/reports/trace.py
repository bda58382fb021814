"""`compare_with_profile`: what was planned for each collective beside what a real run measured.

A trace of the PyTorch profiler has our labels: one where a collective is started, one where it is
waited for. They are matched with the plan by unit and kind, in order: the n-th gather of a unit in
a step is the n-th that was planned, so the forward's is told from the backward's.

What is measured differs by device. On CPUs compute stands in the wait, and gloo's own event says
how long the transfer took (matched by order, where the trace has no other collectives of that
kind). On CUDA nothing waits on the host: the transfer is the kernel on another stream that was
launched inside the label. It is exposed for as long as compute stands still while it runs, if
compute goes on as it ends, or another one for which that holds starts then. Where compute goes on
later it waited for something else, the host for example.
"""

import dataclasses
import gzip
import itertools
import json
import math
import statistics
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tabulate import tabulate

from shardc.reports.record import CollectiveRow, Record
from shardc.runtime.checks.arguments import checked
from shardc.runtime.comm.backends import BACKENDS
from shardc.runtime.comm.progress import COPIES, VERBS, in_short, read_name

_WORST = 5
"""Rows that are named as the worst."""

_HOW = """record a few steps of one rank, after a first step that compiles:

    with torch.profiler.profile() as p:
        for batch in batches: ...  # forward, backward, optimizer
    p.export_chrome_trace("trace.json")"""


@dataclass(frozen=True)
class ComparedRow:
    """One collective: planned and measured, in seconds; medians over the steps of the trace.

    Attributes:
        phase, kind, buckets: as in `CollectiveRow`.
        planned_seconds, planned_exposed: how long the wire carries it, and compute stands still.
        seconds, exposed: the same as measured; None where the trace does not tell.
    """

    phase: str
    kind: str
    buckets: tuple[str, ...]
    planned_seconds: float
    planned_exposed: float
    seconds: float | None
    exposed: float | None

    @property
    def name(self) -> str:
        """What it is, as the profiler shows it: "gather layers.3"."""
        return f"{VERBS[self.kind]} {in_short(self.buckets)}"

    @property
    def difference(self) -> float | None:
        """Measured seconds less planned ones: exposed if they are known, else on the wire."""
        if self.exposed is not None:
            return self.exposed - self.planned_exposed
        return None if self.seconds is None else self.seconds - self.planned_seconds


@dataclass(frozen=True)
class Comparison:
    """A plan and a trace, collective by collective.

    Attributes:
        rows: in the order in which collectives are planned to start.
        steps: how many steps the trace has.
        notes: what could not be matched, and why.
    """

    rows: tuple[ComparedRow, ...]
    steps: int
    notes: tuple[str, ...] = ()

    @property
    def worst(self) -> list[ComparedRow]:
        """The rows that differ most, up to five."""
        known = [row for row in self.rows if row.difference is not None]
        return sorted(known, key=lambda row: -abs(row.difference or 0.0))[:_WORST]

    def totals(self) -> dict[str, float | None]:
        """Sums over the rows that are measured: planned and measured seconds and exposed ones."""
        on_wire = [row for row in self.rows if row.seconds is not None]
        waited = [row for row in self.rows if row.exposed is not None]
        return {
            "planned_seconds": sum(row.planned_seconds for row in on_wire) if on_wire else None,
            "seconds": sum(row.seconds or 0.0 for row in on_wire) if on_wire else None,
            "planned_exposed": sum(row.planned_exposed for row in waited) if waited else None,
            "exposed": sum(row.exposed or 0.0 for row in waited) if waited else None,
        }

    def to_dict(self) -> dict[str, Any]:
        """All of it as JSON takes it; the worst as indices into the rows."""
        return {
            "steps": self.steps,
            "totals": self.totals(),
            "rows": [dataclasses.asdict(row) for row in self.rows],
            "worst": [self.rows.index(row) for row in self.worst],
            "notes": list(self.notes),
        }

    def __str__(self) -> str:
        figures = ("planned_seconds", "seconds", "planned_exposed", "exposed")
        table = [
            [row.phase, row.name, *(_in_ms(getattr(row, figure)) for figure in figures)]
            for row in self.rows
        ]
        totals = self.totals()
        table.append(["total", "", *(_in_ms(totals[figure]) for figure in figures)])
        headers = ["phase", "collective", "planned", "measured", "exposed: planned", "measured"]
        lines = [
            f"{len(self.rows)} collectives, medians of {self.steps} steps, in ms",
            tabulate(table, headers=headers, disable_numparse=True, stralign="right"),
            "They differ most in:",
            *(
                f"  {row.name} of the {row.phase}: {_in_ms(row.difference, signed=True)} ms"
                for row in self.worst
            ),
        ]
        return "\n".join([*lines, *self.notes])


@checked
def compare_with_profile(record: Record, trace: str | Path | Mapping[str, Any]) -> Comparison:
    """What was planned for each collective beside what one rank measured.

    Args:
        record: the plan.
        trace: a Chrome trace of `torch.profiler` with one or more whole steps of that rank: the
            path (".json" or ".json.gz"), or what it holds.

    Raises:
        ValueError: no trace, or it has no names of shardc, or those of another model.
    """
    events = _events(trace)
    labels = [label for event in events if (label := _Label.read(event)) is not None]
    if not labels:
        raise ValueError(f"the trace names no collectives of shardc: {_HOW}")
    labels = _with_root(labels, record)
    planned: dict[_Key, list[int]] = defaultdict(list)
    for index, row in enumerate(record.collectives):
        planned[row.kind, row.buckets].append(index)
    starts = _by_key(labels, waits=False)
    steps = _count_steps(planned, starts)
    kernels = _Kernels.read(events, [label for label in labels if not label.waits])
    seconds, stalls = kernels.seconds(), kernels.exposed()
    if not kernels.sent:
        stalls = _stalls(starts, _by_key(labels, waits=True))
        seconds = _event_seconds(events, labels)
    notes = [f"not planned: {_name(key)}" for key in starts if key not in planned]
    late, whole = kernels.late() / steps, kernels.whole / steps
    if late > _MUCH * whole:
        notes.append(
            f"compute stood still for {_in_ms(late)} of {_in_ms(whole)} ms a step without waiting "
            "for a collective: the host was late. More tokens a step hide that"
        )
    rows: list[ComparedRow | None] = [None] * len(record.collectives)
    for key, indices in planned.items():
        found = starts.get(key, [])
        matched = len(found) == steps * len(indices)
        if not matched:
            notes.append(
                f"not matched: {_name(key)} is there {len(found)} times in {steps} steps, "
                f"planned {len(indices)} times a step"
            )
        for place, index in enumerate(indices):
            own = found[place :: len(indices)] if matched else []
            times = _median(seconds, own), _median(stalls, own)
            rows[index] = _compared(record.collectives[index], *times)
    return Comparison(tuple(row for row in rows if row is not None), steps, tuple(notes))


def _count_steps(
    planned: Mapping["_Key", Sequence[int]], starts: Mapping["_Key", Sequence["_Label"]]
) -> int:
    """How many steps most collectives are there for."""
    counts = [len(starts[key]) // len(planned[key]) for key in planned if key in starts]
    if not counts:
        raise ValueError(
            f"the trace is of another model than the report: it has {_some(starts)}, "
            f"planned are {_some(planned)}"
        )
    return max(1, statistics.mode(counts))


def _median(values: Mapping["_Label", float], labels: Sequence["_Label"]) -> float | None:
    """The median of what is known of all of them; None where it is not."""
    if not labels or not all(label in values for label in labels):
        return None
    return statistics.median(values[label] for label in labels)


def _compared(row: CollectiveRow, seconds: float | None, exposed: float | None) -> ComparedRow:
    return ComparedRow(row.phase, row.kind, row.buckets, row.seconds, row.exposed, seconds, exposed)


# -- reading a trace -------------------------------------------------------------------------------

_Key = tuple[str, tuple[str, ...]]
"""Kind and buckets."""


@dataclass(frozen=True)
class _Label:
    """A label of ours in a trace; times in seconds."""

    kind: str
    buckets: tuple[str, ...]
    waits: bool
    start: float
    seconds: float
    thread: Any

    @classmethod
    def read(cls, event: Mapping[str, Any]) -> "_Label | None":
        parts = read_name(event["name"])
        if parts is None or parts[0] in COPIES:  # no collective
            return None
        if event.get("cat") != "user_annotation":  # the GPU's copy of it
            return None
        return cls(*parts, event["ts"] / 1e6, event["dur"] / 1e6, event.get("tid"))

    def holds(self, event: Mapping[str, Any]) -> bool:
        """Whether an event of the same thread began within it."""
        since = event["ts"] / 1e6 - self.start
        return 0 <= since <= self.seconds and event.get("tid") == self.thread


def _events(trace: str | Path | Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """The events that have a duration, in order."""
    if not isinstance(trace, Mapping):
        opened = gzip.open if str(trace).endswith(".gz") else open
        with opened(trace, "rt") as file:
            name, trace = f"'{trace}' is", _parsed(file.read())
    else:
        name = "that is"
    found = trace.get("traceEvents") if isinstance(trace, Mapping) else None
    if not isinstance(found, list):
        raise ValueError(f"{name} not a trace of torch.profiler: {_HOW}")
    whole = [event for event in found if event.get("ph") == "X" and "dur" in event]
    return sorted(whole, key=lambda event: event["ts"])


def _parsed(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return None


def _with_root(labels: Sequence[_Label], record: Record) -> list[_Label]:
    """The same with the outermost unit called as in the report, where that does not know it."""
    known = {bucket.name for bucket in record.buckets}
    known |= {name for row in record.collectives for name in row.buckets}

    def named(bucket: str) -> str:
        root = "(root)" + bucket[bucket.find("[") :] * ("[" in bucket)
        return root if bucket not in known and root in known else bucket

    return [dataclasses.replace(x, buckets=tuple(map(named, x.buckets))) for x in labels]


def _by_key(labels: Iterable[_Label], waits: bool) -> dict[_Key, list[_Label]]:
    found: dict[_Key, list[_Label]] = defaultdict(list)
    for label in labels:
        if label.waits == waits:
            found[label.kind, label.buckets].append(label)
    return dict(found)


def _stalls(
    starts: Mapping[_Key, Sequence[_Label]], waits: Mapping[_Key, Sequence[_Label]]
) -> dict[_Label, float]:
    """Seconds in the waits for each collective: a coalesced one has a wait a bucket. What rows need
    is waited for where it is started."""
    stalls = {}
    for key, started in starts.items():
        found = waits.get(key, [])
        each, left = divmod(len(found), len(started))
        if each and not left:
            for i, label in enumerate(started):
                stalls[label] = sum(w.seconds for w in found[i * each : (i + 1) * each])
                stalls[label] += label.seconds if key[0] in _ROWS else 0.0
    return stalls


_ROWS = ("fetch_rows", "return_rows")


_MUCH = 0.05
"""The share of a step that is worth a word."""

_AT_ONCE = 2e-5
"""Seconds after which a stream has gone on that waited for an event."""

_Spans = list[tuple[float, float]]
"""When something ran: pairs (start, end) in seconds, in order, none in another."""


@dataclass(frozen=True)
class _Kernels:
    """What a GPU did in a trace; empty where there is none.

    Attributes:
        sent: by the label inside of which they were launched, the kernels of collectives.
        computed: all other kernels of the stream that is busiest with them.
    """

    sent: Mapping[_Label, _Spans]
    computed: _Spans

    @classmethod
    def read(cls, events: Sequence[Mapping[str, Any]], starts: Sequence[_Label]) -> "_Kernels":
        """Kernels by the labels where collectives start."""
        kernels = {_correlation(event): event for event in events if event.get("cat") == "kernel"}
        launches = [
            event
            for event in events
            if event.get("cat") in ("cuda_runtime", "cuda_driver")
            and _correlation(event) in kernels
        ]
        inside = {
            label: [_correlation(event) for event in launches if label.holds(event)]
            for label in starts
        }
        within = {number for numbers in inside.values() for number in numbers}
        others = [event for number, event in kernels.items() if number not in within]
        busy: dict[Any, float] = defaultdict(float)
        for event in others:
            busy[_stream(event)] += event["dur"]
        main = max(busy, key=lambda stream: busy[stream], default=None)
        named = tuple(backend.kernels for backend in BACKENDS.values() if backend.kernels)

        def is_sent(event: Mapping[str, Any]) -> bool:
            return _stream(event) != main or event["name"].startswith(named)

        sent = {
            label: [kernels[number] for number in numbers if is_sent(kernels[number])]
            for label, numbers in inside.items()
        }
        moving = {_correlation(event) for found in sent.values() for event in found}
        computed = [
            event
            for number, event in kernels.items()
            if number not in moving and _stream(event) == main
        ]
        spans = {label: _merged(found) for label, found in sent.items() if found}
        return cls(spans, _merged(computed))

    @property
    def whole(self) -> float:
        """Seconds from the first kernel that computes to the end of the last."""
        return self.computed[-1][1] - self.computed[0][0] if self.computed else 0.0

    def late(self) -> float:
        """How long compute stood still between its kernels, and not for a collective."""
        pairs = itertools.pairwise(self.computed)
        gaps = (start - end for (_, end), (start, _) in pairs)
        return max(0.0, sum(gap for gap in gaps if gap > _AT_ONCE) - sum(self.exposed().values()))

    def seconds(self) -> dict[_Label, float]:
        """How long each collective took."""
        return {label: sum(end - start for start, end in self.sent[label]) for label in self.sent}

    def exposed(self) -> dict[_Label, float]:
        """How long compute stood still for each collective; nothing where no compute is seen."""
        if not self.computed:
            return {}
        began = [start for start, _ in self.computed]
        spans = [(end, start, label) for label in self.sent for start, end in self.sent[label]]
        still = dict.fromkeys(self.sent, 0.0)
        waited = math.inf  # since when compute stands still for what comes next
        for end, start, label in sorted(spans, key=lambda span: span[:2], reverse=True):
            place = bisect_right(began, end)
            resumes = began[place] if place < len(began) else math.inf
            since = self.computed[place - 1][1] if place else start
            if since < end and min(resumes, waited) - end <= _AT_ONCE:
                still[label] += end - max(start, since)
                waited = max(start, since)
        return still


def _correlation(event: Mapping[str, Any]) -> Any:
    """What a kernel and its launch have in common."""
    return event.get("args", {}).get("correlation")


def _stream(event: Mapping[str, Any]) -> Any:
    return event.get("args", {}).get("stream", event.get("tid"))


def _merged(events: Iterable[Mapping[str, Any]]) -> _Spans:
    """When any of the events ran."""
    spans: _Spans = []
    for event in sorted(events, key=lambda event: event["ts"]):
        start, end = event["ts"] / 1e6, (event["ts"] + event["dur"]) / 1e6
        if spans and start <= spans[-1][1]:
            spans[-1] = spans[-1][0], max(end, spans[-1][1])
        else:
            spans.append((start, end))
    return spans


def _event_seconds(
    events: Sequence[Mapping[str, Any]], labels: Sequence[_Label]
) -> dict[_Label, float]:
    """The duration of a backend's own events, which it writes in the order of the starts."""
    seconds: dict[_Label, float] = {}
    for kinds, names in (pair for backend in BACKENDS.values() for pair in backend.events):
        own = [label for label in labels if label.kind in kinds and not label.waits]
        theirs = [event["dur"] / 1e6 for event in events if event["name"] in names]
        if len(own) == len(theirs):  # else the trace has others, or coalesced ones
            seconds.update(zip(own, theirs, strict=True))
    return seconds


# -- words -----------------------------------------------------------------------------------------


def _name(key: _Key) -> str:
    return f"{VERBS[key[0]]} {in_short(key[1])}"


def _some(keys: Iterable[_Key]) -> str:
    names = list(map(_name, keys))
    return ", ".join(names[:3]) + (", ..." if len(names) > 3 else "") if names else "none"


def _in_ms(seconds: float | None, signed: bool = False) -> str:
    if seconds is None:
        return "-"
    return f"{1e3 * seconds:+.3f}" if signed else f"{1e3 * seconds:.3f}"
