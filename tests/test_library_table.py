"""The tables of docs/integrations/index.md: their rows, and the tests that they name."""

import re
from pathlib import Path

from scripts import load

ROOT = Path(__file__).parent.parent


def rows_of(text):
    lines = [line for line in text.splitlines() if line.startswith("|")]
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    return [row for row in rows if not set(row[0]) & set(":-") and row[0] != "library"]


def test_every_named_test_exists():
    page = (ROOT / "docs" / "integrations" / "index.md").read_text()
    rows = rows_of(page)
    assert len(rows) > 40
    for *_, cell in rows:
        file, name = re.fullmatch(r"`(test_\w+\.py)::(test_\w+)`", cell).groups()
        assert f"def {name}(" in (ROOT / "tests" / file).read_text(), cell


def test_measured_rows_are_those_of_the_loops():
    made = load("benchmarks/libraries.py")
    rows = rows_of(made.PAGE.read_text().split(made.BEGIN)[1].split(made.END)[0])
    wanted = [
        (library, feature)
        for library in made.LOOPS
        for feature in made.FEATURES
        if (library, feature) not in made.NO_LOOP
    ]
    assert [(row[0], row[1]) for row in rows] == wanted
    for library, feature, ours, theirs, test in rows:
        assert ours == "yes", (library, feature)
        assert theirs and test == f"`test_integrations.py::{made.FEATURES[feature]}`"
