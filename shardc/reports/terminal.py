"""The width of the terminal, texts that wrap to it, and tables that fit it.

A table that is too wide cuts long names in their middle, down to `Column.least` characters. If that
is not enough, it leaves out columns, in the order of `Column.goes`. A line below the table says so.
"""

import shutil
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from tabulate import tabulate

READABLE = 100
"""Columns of output to a file, a pipe or a notebook. Lines of text are no longer on a wide terminal
either."""
NARROWEST = 40
"""No table is made for fewer columns."""
UNLIMITED = 1_000_000
"""The width for files that are kept: all columns."""
PAGE = "the page (--save FILE.html)"
"""The place that shows the tables of a report whole."""
_GAP = 2
"""Spaces between columns, and the least width that tabulate adds to a title."""


def terminal_width() -> int:
    """Columns of the terminal, or `$COLUMNS` if set; READABLE without a terminal."""
    return max(NARROWEST, shutil.get_terminal_size((READABLE, 24)).columns)


def wrap(text: str, width: int | None = None, first: str = "", then: str = "") -> str:
    """A paragraph in lines that fit.

    Args:
        text: the paragraph.
        width: columns; default: the terminal's.
        first, then: the beginning of the first line, and the beginning of all other lines.
    """
    return textwrap.fill(
        text,
        min(READABLE, terminal_width() if width is None else width),
        initial_indent=first,
        subsequent_indent=then,
        break_long_words=False,
        break_on_hyphens=False,
    )


def pairs(rows: Sequence[tuple[str, str]], width: int | None = None) -> str:
    """Names in one column, and beside each name its value, which wraps."""
    indent = max(len(name) for name, _ in rows) + _GAP
    lines = (wrap(value, width, f"{name:<{indent}}", " " * indent) for name, value in rows)
    return "\n".join(lines)


@dataclass(frozen=True)
class Column:
    """A column of a table.

    Attributes:
        title: its header.
        align: the side at which its cells stand.
        goes: 0 if the column always stays; else smaller numbers are left out first.
        least: characters that a cut in the middle leaves of a cell, at least; 0: no cell is cut.
    """

    title: str
    align: Literal["left", "right"] = "left"
    goes: int = 0
    least: int = 0


def table(
    columns: Sequence[Column],
    rows: Sequence[Sequence[str]],
    width: int | None = None,
    elsewhere: str = "",
) -> str:
    """A table that fits the width, and a line about columns left out and names cut.

    Args:
        columns: all columns.
        rows: a cell for each column.
        width: columns of characters; default: the terminal's.
        elsewhere: the place that shows the whole table, besides a wider terminal.
    """
    limit = terminal_width() if width is None else width
    natural = widths_of(columns, rows)
    shown, widths = _fit(columns, natural, limit)
    text = tabulate(
        [[_cut(row[index], widths[index]) for index in shown] for row in rows],
        headers=[columns[index].title for index in shown],
        disable_numparse=True,
        colalign=[columns[index].align for index in shown] if rows else None,
    )
    lacks = _lacks([c.title for i, c in enumerate(columns) if i not in widths], natural, widths)
    if not lacks:
        return text
    needed = total_width(natural)
    also = f", and so does {elsewhere}" if elsewhere else ""
    note = f"At {limit} columns {lacks}. A width of {needed} (COLUMNS={needed}) shows all{also}."
    return f"{text}\n{wrap(note, limit)}"


def widths_of(columns: Sequence[Column], rows: Sequence[Sequence[str]]) -> list[int]:
    """The width of each column without cuts, its header included."""
    cells = list(zip(*rows, strict=True)) if rows else [()] * len(columns)
    return [
        max([*(len(line) + _GAP for line in column.title.split("\n")), *map(len, own)])
        for column, own in zip(columns, cells, strict=True)
    ]


def total_width(widths: Sequence[int]) -> int:
    """The width of a table with columns of `widths`."""
    return sum(widths) + _GAP * (len(widths) - 1)


def _fit(
    columns: Sequence[Column], natural: Sequence[int], limit: int
) -> tuple[list[int], dict[int, int]]:
    """The columns to show, and the width of each."""
    least = [
        min(width, max(column.least, len(column.title) + _GAP)) if column.least else width
        for column, width in zip(columns, natural, strict=True)
    ]
    shown = list(range(len(columns)))
    going = sorted((i for i in shown if columns[i].goes), key=lambda i: columns[i].goes)
    while going and total_width([least[i] for i in shown]) > limit:
        shown.remove(going.pop(0))
    widths = {i: least[i] for i in shown}
    for _ in range(limit - total_width(list(widths.values()))):
        index = max(widths, key=lambda i: natural[i] - widths[i])
        if widths[index] == natural[index]:
            break
        widths[index] += 1
    return shown, widths


def _cut(cell: str, width: int) -> str:
    """A cell, without its middle if it is too long: more stays of the end, where names of blocks
    differ."""
    if len(cell) <= width:
        return cell
    tail = 2 * (width - 3) // 3
    return f"{cell[: width - 3 - tail]}...{cell[-tail:]}"


def _lacks(titles: Sequence[str], natural: Sequence[int], widths: dict[int, int]) -> str:
    """The columns that a table leaves out, and whether names are cut, in words; "" if neither."""
    cut = any(width < natural[index] for index, width in widths.items())
    out = f"these are left out: {', '.join(titles)}" if titles else ""
    return " and ".join(filter(None, ["names are cut" if cut else "", out]))
