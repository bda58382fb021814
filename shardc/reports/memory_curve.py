"""The curve of step time against memory: its rows, and its printed table.

Every row is a choice of `tradeoff`, with which a memory budget of that size would begin.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace

from torch.fx import GraphModule

from shardc.passes.budget.choose import tradeoff_of
from shardc.passes.budget.offloadable import Offload
from shardc.passes.budget.recomputable import Recompute
from shardc.passes.budget.tradeoff import Choice, Tradeoff
from shardc.passes.context import UNITS_IN_FLIGHT, PassContext
from shardc.reports.record import CurveRow, Record
from shardc.reports.terminal import PAGE, Column, table, wrap
from shardc.runtime.checks.words import format_bytes, format_seconds, plural

POINTS = 16
"""A curve has so many points at most for each number of units that are gathered ahead."""


def memory_curve(
    gm: GraphModule, ctx: PassContext, static: int
) -> tuple[tuple[CurveRow, ...], tuple[str, ...]]:
    """The rows of a joint graph, and the kinds of values that may be computed again.

    Args:
        static: bytes of segments, optimizer state and workspaces.

    Returns:
        Rows of the curve, from the least memory to the shortest step: no row is worse than another
        in both. Rows of usual settings follow. The kinds are the cheapest per byte first.
    """
    ctx = replace(ctx, options=replace(ctx.planned, in_order=True))  # as with a budget
    tradeoffs = [tradeoff_of(gm, ctx, ahead) for ahead in range(UNITS_IN_FLIGHT, -1, -1)]
    found = [row for each in tradeoffs for row in _points(each, static)]
    points: list[CurveRow] = []
    for row in sorted(found, key=lambda row: (row.nbytes, row.seconds)):
        if not points or row.seconds < points[-1].seconds:
            points.append(row)
    kinds = dict.fromkeys(value.saved.kind for value in tradeoffs[0].values)
    return (*points, *_settings(tradeoffs[0], static)), tuple(kinds)


def _points(tradeoff: Tradeoff, static: int) -> Iterator[CurveRow]:
    least = min(map(tradeoff.peak, tradeoff.leanest))
    most = max(least, tradeoff.peak(Choice(0, len(tradeoff.buckets))))
    for number in range(POINTS):
        room = least + (most - least) * number // (POINTS - 1)
        choice = tradeoff.fastest(room)
        if choice is not None:
            yield _row("", tradeoff, choice, static)


def _settings(tradeoff: Tradeoff, static: int) -> Iterator[CurveRow]:
    """The rows of settings that people choose by hand: checkpointing, and resharding."""
    cheap = next(
        (n for n, value in enumerate(tradeoff.values) if value.is_heavy), len(tradeoff.values)
    )
    for gathered, ending in ((0, "resharded"), (len(tradeoff.buckets), "kept gathered")):
        for recomputed, name in (
            (0, "no checkpointing"),
            (cheap, "selective checkpointing"),
            (len(tradeoff.values), "full checkpointing"),
        ):
            yield _row(f"{name}, {ending}", tradeoff, Choice(recomputed, gathered), static)


def _row(setting: str, tradeoff: Tradeoff, choice: Choice, static: int) -> CurveRow:
    """The row of a choice. Its seconds are those of forward and backward."""
    copies = tradeoff.copies[: choice.offloaded]
    return CurveRow(
        setting=setting,
        nbytes=tradeoff.peak(choice) + static,
        seconds=tradeoff.seconds(choice),
        gathered=choice.gathered,
        buckets=len(tradeoff.buckets),
        ahead=tradeoff.trial.kept.ahead,
        again=_in_words(tradeoff.computed_again(choice), tradeoff.values),
        on_host=sum(copy.nbytes for copy in copies),
        copied=_in_words(copies, tradeoff.copies),
        states_on_host=sum(nbytes for _, nbytes in tradeoff.states[: choice.states]),
    )


def _in_words(
    chosen: Sequence[Recompute] | Sequence[Offload], among: Sequence[Recompute] | Sequence[Offload]
) -> str:
    """The kinds of the values `chosen`, which are the first ones `among` all."""
    kinds = [value.saved.kind for value in chosen]
    if not kinds:
        return "nothing"
    some, of = (each.count(kinds[-1]) for each in (kinds, [value.saved.kind for value in among]))
    until = kinds[-1] + (f" in {some} of {of}" if some < of else "")
    count = len(set(kinds))
    return until if count == 1 else f"{plural(count, 'kind')}, to {until}"


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
