"""The table of docs/options.md, made of the docstring and the defaults of `Options`.

python docs/write_options.py
"""

import inspect
import re
from dataclasses import fields
from pathlib import Path

from shardc.backend.options import Options

PAGE = Path(__file__).with_name("options.md")
_MORE = {
    "memory_budget": "[memory](guides/memory.md)",
    "keep_read_first": "[memory](guides/memory.md)",
    "embedding_rows": "[fewer bytes](guides/wire.md#rows-instead-of-tables)",
    "fold": "[starting fast](guides/starting.md)",
    "profile": "[planning](guides/planning.md)",
}
"""Pages that say more about an option."""
_TABLE = re.compile(r"\| option \|.*?\n\n", re.DOTALL)


def table() -> str:
    """A row for each option: its name, what it does, its default."""
    attributes = (inspect.getdoc(Options) or "").split("Attributes:\n")[1]
    described = re.findall(r"^    (\w+): (.*?)(?=^    \w|\Z)", attributes, re.DOTALL | re.MULTILINE)
    texts = {name: " ".join(text.split()).rstrip(".") for name, text in described}
    defaults = Options()
    rows = ["| option | meaning | default |", "|---|---|---|"]
    for field in fields(Options):
        default = getattr(defaults, field.name)
        shown = str(default) if not isinstance(default, str) else f'"{default}"'
        more = f" (see {_MORE[field.name]})" if field.name in _MORE else ""
        rows.append(f'| `"{field.name}"` | {texts.pop(field.name)}{more} | `{shown}` |')
    assert not texts, texts
    return "\n".join(rows) + "\n\n"


def page() -> str:
    """The page with the table of today."""
    return _TABLE.sub(lambda _: table(), PAGE.read_text(), count=1)


if __name__ == "__main__":
    PAGE.write_text(page())
