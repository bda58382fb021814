"""Graphs and plans of small models are those that are kept (`golden`), byte for byte."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from golden import KEPT
from golden.cases import CASES, REPORTS

pytestmark = pytest.mark.skipif(
    not torch.__version__.startswith("2.13."), reason="the texts that are kept are of torch 2.13"
)
NAMES = [f"{name.replace(' ', '_')}.txt" for name in CASES]
NAMES += [f"{name.replace(' ', '_')}.json" for name in REPORTS]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the texts that this tree makes."""
    folder = tmp_path_factory.mktemp("golden")
    path = os.pathsep.join([str(KEPT.parents[1]), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        [sys.executable, "-m", "golden", "--to", folder],
        env=os.environ | {"PYTHONPATH": path}, capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "data pointer of FakeTensor" not in done.stderr
    return folder


@pytest.mark.parametrize("name", NAMES)
def test_a_compile_makes_what_is_kept(made: Path, name: str) -> None:
    now = (made / name).read_text()
    assert now == (KEPT / name).read_text(), "see `make golden`"


def test_each_case_changes_the_graphs() -> None:
    assert sorted(path.name for path in KEPT.iterdir()) == sorted(NAMES)
    texts = [(KEPT / name).read_text() for name in NAMES]
    assert len(set(texts)) == len(texts)
