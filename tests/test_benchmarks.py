"""The page of benchmarks, and counts that must not grow from one release to the next."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from scripts import load

FOLDER = Path(__file__).parent.parent / "benchmarks"


@pytest.fixture(scope="module")
def kept():
    return load("benchmarks/kept.py")


def test_the_page_shows_the_tables_that_are_kept(kept):
    page = kept.page()
    assert kept.PAGE.read_text() == page, "run `python benchmarks/kept.py --write`"
    names = [path.stem for path in kept.RESULTS.glob("*.json")]
    assert len(names) >= 3 and all(f"## {name}\n" in page for name in names)


def test_a_table_is_kept_with_its_command_and_its_machine(kept, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(kept, "RESULTS", tmp_path)
    script = str(FOLDER / "planner.py")
    monkeypatch.setattr(
        sys, "argv", [script, "--repeats", "2", "--keep", "plans", "--profile", "x"]
    )
    kept.show(["model", "ms"], [["a", 1.5]], "plans", "W=2")
    kept.show(["not", "kept"], [["b", 2]], None)
    assert "W=2\nmodel" in capsys.readouterr().out
    (path,) = tmp_path.iterdir()
    made = json.loads(path.read_text())
    assert made["command"] == "python benchmarks/planner.py --repeats 2 --profile x"
    assert made["rows"] == [["a", "1.5"]] and "torch 2." in made["machine"]
    assert "| a       |  1.5 |" in kept.page() and "The layout planner on large" in kept.page()


def test_a_further_block_is_neither_traced_nor_compiled_again(kept):
    """As in the last row of the table of releases, with the layout of a GPU."""
    command = [sys.executable, str(FOLDER / "releases.py"), "--count", "GPU"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    ops, kernels = json.loads(done.stdout)
    table = json.loads((kept.RESULTS / "releases.json").read_text())
    last = dict(zip(table["headers"], table["rows"][-1], strict=True))
    same = f"torch {torch.__version__.rpartition('.')[0]}." in table["machine"]
    assert ops <= int(last["ops a block, GPU"]) + (not same) * 8
    assert kernels <= int(last["kernels, GPU"]) * (1.05 if same else 1.5)
