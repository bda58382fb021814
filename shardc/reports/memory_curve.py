"""The curve of step time against memory: its rows, and its printed table."""

from collections.abc import Iterable

from shardc.passes.budget.curve import Curve, KindsTaken, Point
from shardc.reports.record import CurveRow, Record
from shardc.reports.terminal import PAGE, Column, table, wrap
from shardc.runtime.checks.words import format_bytes, format_seconds, plural


def curve_rows(curve: Curve, static: int, optimizer: float) -> tuple[CurveRow, ...]:
    """The rows of a report for a curve.

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


def _in_words(taken: KindsTaken) -> str:
    if not taken.kinds:
        return "nothing"
    some, of = taken.units
    until = taken.last + (f" in {some} of {of}" if some < of else "")
    return until if taken.kinds == 1 else f"{plural(taken.kinds, 'kind')}, to {until}"


_COLUMNS = (
    Column("memory", "right"),
    Column("step", "right"),
    Column("stay gathered", "right", goes=5),
    Column("ahead", "right", goes=1),
    Column("values on host", "right", goes=4),
    Column("state on host", "right", goes=3),
    Column("computed again", goes=2, least=24),
    Column("that is", least=24),
)


def curve_table(record: Record, width: int | None = None) -> str:
    """The table of the curve, then of usual settings; "" without a curve."""
    if not record.curve:
        return ""
    parts = [
        "Step time against memory: the plans that memory_budget= starts from",
        _table(record.curve, width),
    ]
    if record.kinds:
        parts.append("What may be computed again, cheapest per byte first:")
        for number, kind in enumerate(record.kinds, 1):
            parts.append(wrap(kind, width, f"  {number:2}. ", " " * 6))
    return "\n".join(parts)


def _table(rows: Iterable[CurveRow], width: int | None) -> str:
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
    return table(_COLUMNS, cells, width, PAGE)
