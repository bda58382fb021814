"""The tables of docs/optimizers.md are those that `benchmarks/tables.py` writes."""

import sys
from unittest import mock

import torch
from ranks import on_ranks
from scripts import load

TABLES = "benchmarks/tables.py"
OPTIMIZERS = (
    "AdamW", "AdamW8bit (torchao)", "AdamW8bit (bitsandbytes)", "Muon", "AdamMini",
    "SOAP (heavyball)",
)  # fmt: skip
STATES = ("AdamW", "Muon", "Adafactor")
HEADINGS = ("optimizer", "state of", "op", "subclass")


def tables_of_the_page(tables):
    """The rows of each table, by its heading."""
    text = tables.PAGE.read_text().split(tables.BEGIN)[1].split(tables.END)[0]
    lines = [line.strip("|").split("|") for line in text.splitlines() if line.startswith("| ")]
    found = {}
    for cells in ([cell.strip() for cell in line] for line in lines):
        if cells[0] in HEADINGS:
            rows = found[cells[0]] = []
        else:
            rows.append(cells)
    assert tuple(found) == HEADINGS
    return found


def some(module, table, names):
    return mock.patch.object(module, table, {name: getattr(module, table)[name] for name in names})


@on_ranks(2)
def test_page_has_what_is_measured(mesh):
    tables = load(TABLES)
    page = tables_of_the_page(tables)
    assert [row[0] for row in page["optimizer"]] == list(tables.OPTIMIZERS)
    assert [row[0] for row in page["op"]] == [f"`{op}`" for op in tables.OPS]
    with some(tables, "OPTIMIZERS", OPTIMIZERS), torch.compiler.set_stance("force_eager"):
        measured = tables.optimizer_rows(mesh) + tables.op_rows(mesh)
    by_name = {row[0]: row for row in page["optimizer"] + page["op"]}
    for name, *cells in measured:  # what FSDP2 can do differs with torch
        assert cells[:-1] == by_name[name][1:-1], name


@on_ranks(2)
def test_page_has_the_subclasses(mesh):
    load(TABLES)
    subclasses = sys.modules["table_of_subclasses"]
    page = tables_of_the_page(load(TABLES))["subclass"]
    assert [row[0] for row in page] == [name.strip() for name in subclasses.SUBCLASSES]
    assert subclasses.subclass_rows(mesh) == page


@on_ranks(2, 4)
def test_page_has_the_state_of_a_rank(mesh):
    tables = load(TABLES)
    state = sys.modules["table_of_state"]
    page = {row[0]: row for row in tables_of_the_page(tables)["state of"]}
    assert list(page) == list(state.STATES)
    with some(state, "STATES", STATES):
        for name, (how, share) in state.state_cells(mesh).items():
            column = 2 + state.WORLDS.index(mesh.size())
            assert (page[name][1], page[name][column]) == (how, share), name


def test_no_silent_difference():
    """shardc equals the unsharded run, or FSDP2, but for quantised states."""
    page = tables_of_the_page(load(TABLES))
    for name, *cells in page["optimizer"] + page["op"]:
        assert cells[-2] == "equal" or name.endswith("(torchao)"), name
    for name, _, *cells in page["subclass"]:
        assert set(cells) <= {"bitwise", "equal"}, name


def test_state_is_shared_evenly():
    """Within 5% of 1/W, but where one rank has to own all parameters."""
    for name, _, *cells in tables_of_the_page(load(TABLES))["state of"]:
        for world, share in zip((2, 4), map(float, cells), strict=True):
            assert share == world if "one owner" in name else 0.95 <= share <= 1.05, name
