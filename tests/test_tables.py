"""The tables of docs/optimizers.md are those that `benchmarks/tables.py` writes."""

import importlib.util
from pathlib import Path
from unittest import mock

import torch
from ranks import on_ranks

SCRIPT = Path(__file__).parent.parent / "benchmarks" / "tables.py"
MEASURED = ("AdamW", "AdamW8bit (torchao)", "AdamW8bit (bitsandbytes)", "Muon", "Adafactor")


def script():
    spec = importlib.util.spec_from_file_location("tables_of_the_docs", SCRIPT)
    made = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(made)
    return made


def rows_of_the_page(tables):
    """The rows of both tables, without their headings."""
    text = tables.PAGE.read_text().split(tables.BEGIN)[1].split(tables.END)[0]
    lines = [line.strip("|").split("|") for line in text.splitlines() if line.startswith("| ")]
    rows = [[cell.strip() for cell in line] for line in lines]
    return [row for row in rows if row[0] not in ("optimizer", "op")]


@on_ranks(2)
def test_page_has_what_is_measured(mesh):
    tables = script()
    page = {row[0]: row for row in rows_of_the_page(tables)}
    assert list(page) == [*tables.OPTIMIZERS, *(f"`{op}`" for op in tables.OPS)]
    some = {name: tables.OPTIMIZERS[name] for name in MEASURED}
    with (
        mock.patch.object(tables, "OPTIMIZERS", some),
        torch.compiler.set_stance("force_eager"),
    ):
        measured = tables.optimizer_rows(mesh) + tables.op_rows(mesh)
    for name, *cells in measured:  # what FSDP2 can do differs with torch
        assert cells[:-1] == page[name][1:-1], name


def test_no_silent_difference():
    """shardc equals the unsharded run, but for quantised states."""
    for name, *cells in rows_of_the_page(script()):
        assert cells[-2] == "equal" or name.endswith("(torchao)"), name
