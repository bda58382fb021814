"""`compare_with_profile`: the plan of each collective beside the measurements of a real run.

A trace of the PyTorch profiler has our labels: one where a collective is started, one where it is
waited for. Labels are matched with the plan by bucket and kind, in order: the n-th gather of a
bucket in a step is the n-th gather of the bucket in the plan. So the gather of the forward is told
from the gather of the backward.

Devices differ in the measurements. On CPUs compute stands still in the wait, and an event of gloo
has the seconds of the transfer. Such events are matched by order, if the trace has no other
collectives of the same kind. On CUDA the host does not wait: the transfer is a kernel that was
launched inside the label, on another stream than compute or with a name of NCCL. The transfer is
exposed for as long as it runs while compute stands still, if compute resumes at the end of the
transfer, or if another exposed transfer starts then. If compute resumes later, compute waited for
something else, for example the host.
"""

import dataclasses
import statistics
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shardc.reports.record import CollectiveRow, Record
from shardc.reports.terminal import Column, table, wrap
from shardc.reports.trace_events import (
    HOW,
    Kernels,
    Key,
    LabelEvent,
    by_key,
    event_seconds,
    read_trace,
    stalls_in,
    with_root,
)
from shardc.runtime.checks.arguments import checked
from shardc.runtime.checks.words import plural
from shardc.runtime.watch.progress import VERBS, in_short

_WORST = 5
"""How many rows are named as the worst."""

_MUCH = 0.05
"""A late host is noted if it costs more than this share of a step."""


@dataclass(frozen=True)
class ComparedRow:
    """One collective: planned and measured, in seconds; medians over the steps of the trace.

    Attributes:
        phase, kind, buckets: as in `CollectiveRow`.
        planned_seconds, planned_exposed: how long the wire carries it, and compute waits for it.
        seconds, exposed: the measured figures; None if the trace does not have them.
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
        """The name of the collective in the profiler: "gather layers.3"."""
        return f"{VERBS[self.kind]} {in_short(self.buckets)}"

    @property
    def difference(self) -> float | None:
        """Measured less planned seconds: exposed if measured, else on the wire; None if neither."""
        if self.exposed is not None:
            return self.exposed - self.planned_exposed
        return None if self.seconds is None else self.seconds - self.planned_seconds


@dataclass(frozen=True)
class Comparison:
    """A plan and a trace, collective by collective.

    Attributes:
        rows: in the order in which collectives are planned to start.
        steps: how many steps the trace has.
        notes: in words, collectives that were not matched, and a late host.
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
        """Sums over the measured rows: planned and measured seconds, on the wire and exposed."""
        on_wire = [row for row in self.rows if row.seconds is not None]
        waited = [row for row in self.rows if row.exposed is not None]
        return {
            "planned_seconds": sum(row.planned_seconds for row in on_wire) if on_wire else None,
            "seconds": sum(row.seconds or 0.0 for row in on_wire) if on_wire else None,
            "planned_exposed": sum(row.planned_exposed for row in waited) if waited else None,
            "exposed": sum(row.exposed or 0.0 for row in waited) if waited else None,
        }

    def to_dict(self) -> dict[str, Any]:
        """The comparison as values for JSON; the worst rows as indices into the rows."""
        return {
            "steps": self.steps,
            "totals": self.totals(),
            "rows": [dataclasses.asdict(row) for row in self.rows],
            "worst": [self.rows.index(row) for row in self.worst],
            "notes": list(self.notes),
        }

    def __str__(self) -> str:
        figures = ("planned_seconds", "seconds", "planned_exposed", "exposed")
        rows = [
            [row.phase, row.name, *(_in_ms(getattr(row, figure)) for figure in figures)]
            for row in self.rows
        ]
        totals = self.totals()
        rows.append(["total", "", *(_in_ms(totals[figure]) for figure in figures)])
        steps = plural(self.steps, "step")
        lines = [
            f"{plural(len(self.rows), 'collective')}, medians of {steps}, in ms",
            table(_COLUMNS, rows, elsewhere="to_dict()"),
            "They differ most in:",
            *(
                f"  {row.name} of the {row.phase}: {_in_ms(row.difference, signed=True)} ms"
                for row in self.worst
            ),
        ]
        return "\n".join([*lines, *map(wrap, self.notes)])


_COLUMNS = (
    Column("phase", "right", goes=1),
    Column("collective", "right", least=24),
    Column("planned", "right"),
    Column("measured", "right"),
    Column("exposed: planned", "right"),
    Column("measured", "right"),
)


@checked
def compare_with_profile(record: Record, trace: str | Path | Mapping[str, Any]) -> Comparison:
    """Compare the plan of each collective with the measurements of one rank.

    Args:
        record: the plan.
        trace: a Chrome trace of `torch.profiler` with one or more whole steps of that rank: the
            path (".json" or ".json.gz"), or the content of the file.

    Raises:
        ValueError: `trace` is no trace, has no labels of shardc, or is of another model.
    """
    events = read_trace(trace)
    labels = [label for event in events if (label := LabelEvent.read(event)) is not None]
    if not labels:
        raise ValueError(f"the trace names no collectives of shardc: {HOW}")
    labels = with_root(labels, record)
    planned: dict[Key, list[int]] = defaultdict(list)
    for index, row in enumerate(record.collectives):
        planned[row.kind, row.buckets].append(index)
    starts = by_key(labels, waits=False)
    steps = _count_steps(planned, starts)
    kernels = Kernels.read(events, [label for label in labels if not label.waits])
    seconds, stalls = kernels.seconds(), kernels.exposed
    if not kernels.sent:
        stalls = stalls_in(starts, by_key(labels, waits=True))
        seconds = event_seconds(events, labels)
    notes = [f"not planned: {_name(key)}" for key in starts if key not in planned]
    late, whole = kernels.late / steps, kernels.whole / steps
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
                f"not matched: {_name(key)} is there {plural(len(found), 'time')} in "
                f"{plural(steps, 'step')}, planned {plural(len(indices), 'time')} a step"
            )
        for place, index in enumerate(indices):
            own = found[place :: len(indices)] if matched else []
            times = _median(seconds, own), _median(stalls, own)
            rows[index] = _compared(record.collectives[index], *times)
    return Comparison(tuple(row for row in rows if row is not None), steps, tuple(notes))


def _count_steps(
    planned: Mapping["Key", Sequence[int]], starts: Mapping["Key", Sequence["LabelEvent"]]
) -> int:
    """The number of steps that most collectives of the plan have in the trace."""
    counts = [len(starts[key]) // len(planned[key]) for key in planned if key in starts]
    if not counts:
        raise ValueError(
            f"the trace is of another model than the report: it has {_some(starts)}, "
            f"planned are {_some(planned)}"
        )
    return max(1, statistics.mode(counts))


def _median(values: Mapping["LabelEvent", float], labels: Sequence["LabelEvent"]) -> float | None:
    """The median of the values of `labels`; None without labels, or if one has no value."""
    if not labels or not all(label in values for label in labels):
        return None
    return statistics.median(values[label] for label in labels)


def _compared(row: CollectiveRow, seconds: float | None, exposed: float | None) -> ComparedRow:
    return ComparedRow(row.phase, row.kind, row.buckets, row.seconds, row.exposed, seconds, exposed)


# -- words -----------------------------------------------------------------------------------------


def _name(key: Key) -> str:
    return f"{VERBS[key[0]]} {in_short(key[1])}"


def _some(keys: Iterable[Key]) -> str:
    names = list(map(_name, keys))
    return ", ".join(names[:3]) + (", ..." if len(names) > 3 else "") if names else "none"


def _in_ms(seconds: float | None, signed: bool = False) -> str:
    if seconds is None:
        return "-"
    return f"{1e3 * seconds:+.3f}" if signed else f"{1e3 * seconds:.3f}"
