"""The curve of step time against memory: its rows, and the table that is printed."""

from collections.abc import Iterable

from tabulate import tabulate

from shardc.passes.curve import Curve, Point, Taken
from shardc.reports.record import CurveRow, Record
from shardc.reports.words import format_bytes, format_seconds, plural


def curve_rows(curve: Curve, static: int, optimizer: float) -> tuple[CurveRow, ...]:
    """The rows of a report.

    Args:
        curve: of the step's joint graph.
        static: bytes of segments, optimizer state and workspaces.
        optimizer: seconds of the optimizer's step.
    """

    def row(point: Point) -> CurveRow:
        return CurveRow(
            point.setting,
            point.nbytes + static,
            point.seconds + optimizer,
            *point.gathered,
            point.ahead,
            _in_words(point.recomputed),
            point.on_host,
            _in_words(point.offloaded),
            point.states_on_host,
        )

    return tuple(map(row, (*curve.points, *curve.settings)))


def _in_words(taken: Taken) -> str:
    if not taken.kinds:
        return "nothing"
    some, of = taken.units
    until = taken.last + (f" in {some} of {of}" if some < of else "")
    return until if taken.kinds == 1 else f"{taken.kinds} kinds, to {until}"


def curve_table(record: Record) -> str:
    """The curve, then usual settings; "" without one."""
    if not record.curve:
        return ""
    kinds = "".join(f"\n  {number:2}. {kind}" for number, kind in enumerate(record.kinds, 1))
    order = f"\nWhat may be computed again, cheapest per byte first:{kinds}" if kinds else ""
    return (
        f"Step time against memory: what memory_budget= would begin with\n{_table(record.curve)}"
        f"{order}"
    )


def _table(rows: Iterable[CurveRow]) -> str:
    headers = [
        "memory",
        "step",
        "stay gathered",
        "ahead",
        "values on host",
        "state on host",
        "computed again",
        "that is",
    ]
    cells = [
        [
            format_bytes(row.nbytes),
            format_seconds(row.seconds),
            f"{row.gathered} of {row.buckets}",
            plural(row.ahead, "unit"),
            f"{format_bytes(row.on_host)}: {row.copied}" if row.on_host else "",
            format_bytes(row.states_on_host) if row.states_on_host else "",
            row.again,
            row.setting,
        ]
        for row in rows
    ]
    align = [*["right"] * 6, "left", "left"]
    return tabulate(cells, headers=headers, disable_numparse=True, colalign=align)
