"""Reports side by side."""

from collections.abc import Callable, Iterator, Sequence

from shardc.reports.record import KINDS, Record
from shardc.reports.terminal import Column, table, terminal_width, total_width, widths_of
from shardc.runtime.checks.words import format_bytes, format_seconds

_Figure = tuple[str, Callable[[Record], float], Callable[[float], str]]

_FIGURES: list[_Figure] = [
    ("step", lambda r: r.step_seconds, format_seconds),
    ("compute", lambda r: r.compute_seconds, format_seconds),
    ("wire", lambda r: r.wire_seconds, format_seconds),
    ("exposed", lambda r: r.exposed_seconds, format_seconds),
    ("tokens/s a rank", lambda r: r.tokens / (r.step_seconds or 1), lambda x: f"{x:,.0f}"),
    ("messages", lambda r: float(len(r.collectives)), lambda x: f"{x:.0f}"),
    ("sent", lambda r: r.sent_bytes, format_bytes),
    ("peak memory", lambda r: float(r.peak.total), format_bytes),
    *(
        (f"- {kind}", lambda r, i=i: float(r.peak.held[i]), format_bytes)
        for i, kind in enumerate(KINDS)
    ),
    ("findings", lambda r: float(len(r.findings)), lambda x: f"{x:.0f}"),
]


def compare(records: Sequence[Record]) -> list[dict[str, object]]:
    """One dict a figure: its name, the value of each record, and the ratios to the first value."""
    rows: list[dict[str, object]] = []
    for name, read, _ in _FIGURES:
        values = [read(record) for record in records]
        ratios = [value / values[0] if values[0] else None for value in values]
        rows.append({"figure": name.removeprefix("- "), "values": values, "ratios": ratios})
    return rows


def comparison_text(records: Sequence[Record]) -> str:
    """A table with one column a report; all but the first show the ratio to the first.

    Reports without room beside the others follow in a table below.
    """
    rows = []
    for name, read, show in _FIGURES:
        values = [read(record) for record in records]
        shown = [show(values[0])]
        for value in values[1:]:
            ratio = f" ({value / values[0]:.3g}x)" if values[0] else ""
            shown.append(show(value) + ratio)
        rows.append([name, *shown])
    columns = [Column(""), *(Column(title, "right") for title in _titles(records))]
    parts = []
    for group in _beside(widths_of(columns, rows)):
        own = [[row[index] for index in group] for row in rows]
        parts.append(table([columns[index] for index in group], own))
    return "\n\n".join(parts)


def _beside(widths: Sequence[int]) -> Iterator[list[int]]:
    """Sets of columns that fit the terminal if possible; each set begins with the first column."""
    group = [0]
    for index in range(1, len(widths)):
        together = [widths[each] for each in (*group, index)]
        if len(group) > 1 and total_width(together) > terminal_width():
            yield group
            group = [0]
        group.append(index)
    yield group


def _titles(records: Sequence[Record]) -> list[str]:
    """A title for each record: its values of the facts in which the records differ."""
    facts = [_facts(record) for record in records]
    names = list(dict.fromkeys(name for fact in facts for name in fact))
    differing = [name for name in names if len({fact.get(name) for fact in facts}) > 1]
    if not differing:
        return [f"report {number}" for number in range(len(records))]
    return ["\n".join(f"{name}={fact.get(name, '-')}" for name in differing) for fact in facts]


def _facts(record: Record) -> dict[str, str]:
    return {
        "model": record.model,
        "W": str(record.world_size),
        "copies": str(record.copies),
        "profile": record.profile,
        **record.settings,
    }
