"""A record as a trace for https://ui.perfetto.dev and chrome://tracing.

Trace-event JSON: one process, with a lane (in the format's words, a thread) for compute and one
for communication. Slices of one lane must not overlap, so slices that overlap get more lanes.
Ops, stalls and collectives are complete events; an arrow leads from a collective to the op that
needs it; memory is a counter with one series a kind. Times are in microseconds, to the nanosecond.

The format: https://docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU
"""

import itertools
import json
import os
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from shardc.reports.pictures.lanes import lanes_of, op_indices, op_label, resumed, stalls
from shardc.reports.record import KINDS, CollectiveRow, Op, Record
from shardc.runtime.checks.words import plural

Event = dict[str, Any]
_PROCESS = 1
_COMPUTE, _COMMUNICATION = 1, 1001
"""The first lane of each sort: a viewer shows lanes in the order of their numbers."""


def trace_events(record: Record) -> dict[str, Any]:
    """The whole trace; viewers open the text that `json.dumps` makes of it."""
    compute = [_op(op) for op in record.ops] + [_stall(row) for row in stalls(record)]
    communication = [_collective(row) for row in record.collectives]
    _put_on_lanes(compute, _COMPUTE)
    _put_on_lanes(communication, _COMMUNICATION)
    names = _lane_names("compute", compute, _COMPUTE)
    names |= _lane_names("communication", communication, _COMMUNICATION)
    events = [
        *_metadata(record, names),
        *sorted(compute + communication, key=lambda event: (event["tid"], event["ts"])),
        *_arrows(record, compute, communication),
        *_memory(record),
    ]
    return {"traceEvents": events, "displayTimeUnit": "ms", "otherData": _about(record)}


def save_trace(record: Record, path: str | os.PathLike[str]) -> None:
    """Write the trace as JSON. Raises ValueError where a time is not finite."""
    Path(path).write_text(json.dumps(trace_events(record), allow_nan=False) + "\n")


# -- slices --------------------------------------------------------------------------------------


def _slice(name: str, category: str, start: float, end: float, args: dict[str, Any]) -> Event:
    ts = _us(start)
    dur = round(_us(end) - ts, 3)
    return {"ph": "X", "pid": _PROCESS, "name": name, "cat": category, "ts": ts, "dur": dur,
            "args": args}  # fmt: skip


def _op(op: Op) -> Event:
    args = {"module": op.module, "phase": op.phase}
    return _slice(op_label(op), op.phase, op.start, op.start + op.seconds, args)


def _stall(row: CollectiveRow) -> Event:
    args = {"waits_for": _name(row), "phase": row.phase, "needed_by": row.needed_by}
    event = _slice(f"stall: {_name(row)}", "stall", row.waited, resumed(row), args)
    return {**event, "cname": "terrible"}  # red, in chrome://tracing


def _collective(row: CollectiveRow) -> Event:
    args = {
        "phase": row.phase,
        "buckets": list(row.buckets),
        "bytes": row.nbytes,
        "ranks": row.ranks,
        "issued_us": _us(row.issued),
        "waited_us": _us(row.waited),
        "hidden_us": _us(row.hidden),
        "exposed_us": _us(row.exposed),
        "before": row.before,
        "needed_by": row.needed_by,
    }
    return _slice(_name(row), row.kind, row.start, row.end, args)


def _name(row: CollectiveRow) -> str:
    return f"{row.kind} {', '.join(row.buckets)}"


def _us(seconds: float) -> float:
    return round(seconds * 1e6, 3)


# -- lanes ---------------------------------------------------------------------------------------


def _put_on_lanes(slices: list[Event], first: int) -> None:
    """Give each slice its "tid", and cut overlaps with the next slice that rounding makes."""
    lanes = lanes_of((event["ts"] / 1e6, (event["ts"] + event["dur"]) / 1e6) for event in slices)
    by_lane: dict[int, list[Event]] = defaultdict(list)
    for event, lane in zip(slices, lanes, strict=True):
        event["tid"] = first + lane
        by_lane[lane].append(event)
    for events in by_lane.values():
        events.sort(key=lambda event: (event["ts"], event["dur"]))
        for event, following in itertools.pairwise(events):
            event["dur"] = min(event["dur"], round(following["ts"] - event["ts"], 3))


def _lane_names(name: str, slices: Iterable[Event], first: int) -> dict[int, str]:
    """Numbers and names of the lanes in use; the first lane is always there."""
    lanes = sorted({first, *(event["tid"] for event in slices)})
    return {lane: name if lane == first else f"{name} {lane - first + 1}" for lane in lanes}


# -- metadata, arrows, memory ---------------------------------------------------------------------


def _metadata(record: Record, lanes: dict[int, str]) -> list[Event]:
    process = f"{record.model}: one of {plural(record.world_size * record.copies, 'rank')}"
    events: list[Event] = [
        {"ph": "M", "pid": _PROCESS, "name": "process_name", "args": {"name": process}}
    ]
    for lane, name in lanes.items():
        about: Event = {"ph": "M", "pid": _PROCESS, "tid": lane}
        events.append({**about, "name": "thread_name", "args": {"name": name}})
        events.append({**about, "name": "thread_sort_index", "args": {"sort_index": lane}})
    return events


def _arrows(record: Record, compute: list[Event], communication: list[Event]) -> list[Event]:
    """Arrows from each collective to the op that needs it.

    An arrow starts and ends in a slice: both lists must be in the record's order.
    """
    events = []
    for index, op in enumerate(op_indices(record)):
        if op is None:
            continue
        ends = {"s": communication[index], "f": compute[op]}
        for ph, at in ends.items():
            arrow: Event = {"ph": ph, "id": index + 1, "name": "needed by", "cat": "needed by"}
            arrow |= {"pid": _PROCESS, "tid": at["tid"], "ts": at["ts"]}
            events.append({**arrow, "bp": "e"} if ph == "f" else arrow)
    return events


def _memory(record: Record) -> list[Event]:
    common = {"ph": "C", "pid": _PROCESS}
    events: list[Event] = []
    for point in record.memory:
        at = {**common, "ts": _us(point.seconds)}
        kinds = dict(zip(KINDS, point.held, strict=True))
        events.append({**at, "name": "memory", "args": kinds})
        events.append({**at, "name": "memory, all", "args": {"bytes": point.total}})
    return events


def _about(record: Record) -> dict[str, str]:
    """The facts about the trace that viewers show."""
    about = {"model": record.model, "world_size": record.world_size, "copies": record.copies}
    return {key: str(value) for key, value in {**about, "profile": record.profile}.items()} | {
        f"setting {name}": value for name, value in record.settings.items()
    }
