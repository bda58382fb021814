"""A record as one HTML file: figures, findings, a timeline to zoom into, memory, tables.

The file holds its style, its scripts (the files of `page/`, readable as they are) and the record as
JSON, and loads nothing else. The scripts put every text of the record into the page as text,
never as HTML. The JSON has no "<", so that no name in the JSON can end the script element.
"""

import dataclasses
import json
import os
import re
from collections.abc import Iterable, Sequence
from importlib import resources
from pathlib import Path
from typing import Any

from shardc.reports.pictures.lanes import SLACK, lanes_of, op_indices
from shardc.reports.record import KINDS, ROWS, Record


def page(record: Record) -> str:
    """The text of the HTML file of a record.

    Raises:
        ValueError: the record has a figure that is not finite.
    """
    files = resources.files("shardc.reports.pictures").joinpath("page")

    def part(match: re.Match[str]) -> str:
        name = match[1]
        return _json(record) if name == "record" else files.joinpath(name).read_text("utf-8")

    # One pass: text that was put in is not searched again.
    return re.sub(r"\{\{([\w.]+)\}\}", part, files.joinpath("page.html").read_text("utf-8"))


def save_html(record: Record, path: str | os.PathLike[str]) -> None:
    """Write the HTML file of a record. Raises ValueError as `page`."""
    Path(path).write_text(page(record), encoding="utf-8")


def _json(record: Record) -> str:
    """The record as JSON in ASCII that may stand in a script element."""
    text = json.dumps(_data(record), allow_nan=False, separators=(",", ":"))
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def _data(record: Record) -> dict[str, Any]:
    """The data that the scripts read; `record.js` makes objects of it."""
    names = ("model", "world_size", "copies", "profile", "settings", "tokens")
    more = {"collectives": ("seconds", "hidden")}
    return {
        **{name: getattr(record, name) for name in names},
        "summary": record.summary(),
        "kinds": KINDS,
        "slack": SLACK,
        **{n: _table(row, getattr(record, n), *more.get(n, ())) for n, row in ROWS.items()},
        "lanes": lanes_of((row.start, row.end) for row in record.collectives),
        "readers": op_indices(record),
    }


def _table(kind: type[Any], rows: Iterable[Any], *properties: str) -> dict[str, Sequence[Any]]:
    """Rows with the names of their fields once: repeated names would be most of the file."""
    columns = [*(field.name for field in dataclasses.fields(kind)), *properties]
    return {"columns": columns, "rows": [[_plain(getattr(r, c)) for c in columns] for r in rows]}


def _plain(value: Any) -> Any:
    """Round seconds to a tenth of a nanosecond: more digits say nothing."""
    return round(value, 10) if isinstance(value, float) else value
