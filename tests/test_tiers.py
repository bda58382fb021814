"""`make test` leaves out what is listed, and nothing of what must be seen each time."""

import subprocess
import sys
from pathlib import Path

import pytest
import tiers

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE / "mutants"))
from run import read_mutants  # noqa: E402

_ALL = 3000


@pytest.fixture(scope="module")
def names() -> list[str]:
    """All tests, as `file.py::name[case]`."""
    listed = tiers.collected
    if len(listed) < _ALL:  # a part of the tests was asked for
        collect = [sys.executable, "-m", "pytest", "--collect-only", "--quiet"]
        collect += ["-p", "no:cacheprovider"]
        run = subprocess.run(collect, cwd=HERE.parent, capture_output=True, text=True, check=True)
        listed = [line for line in run.stdout.splitlines() if "::" in line]
    found = [name.removeprefix("tests/") for name in listed]
    assert len(found) > _ALL
    return found


def _quick(names: list[str]) -> list[str]:
    left = tiers.left_out()
    return [name for name in names if tiers.reason_for(name, left) is None]


def test_what_is_left_out_exists_and_has_a_reason(names):
    left = tiers.left_out()
    for start, reason in left.items():
        assert any(name.startswith(start) for name in names), start
        assert len(reason.split()) > 3
    count = len(names) - len(_quick(names))
    assert len(left) <= count < 0.2 * len(names)


def test_each_behaviour_and_each_page_is_in_the_quick_tier(names):
    quick = _quick(names)
    functions = {name.partition("[")[0] for name in quick}
    rows = (HERE / "fsdp_behaviours.tsv").read_text().splitlines()[1:]
    assert {row.split("\t")[2].strip() for row in rows} <= functions
    pages = [name for name in names if name.startswith("test_docs.py")]
    assert pages and set(pages) <= set(quick)


def test_the_quick_tier_has_what_kills_most_mutants(names):
    quick = set(_quick(names))
    quick |= {name.partition("[")[0] for name in quick}
    mutants = read_mutants()
    killed = [mutant for mutant in mutants if quick & set(mutant.tests)]
    assert len(killed) >= 0.85 * len(mutants), f"{len(killed)} of {len(mutants)}"
