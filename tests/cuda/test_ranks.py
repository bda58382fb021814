"""Ranks that meet agree, and enter the same collectives of each communicator in one order."""

from pathlib import Path
from typing import Any

import pytest
from rehearsal import Setup, rehearse_together
from step_trace import partings, read_trace

CASES: dict[str, dict[str, Any]] = {
    "default": {"world": 2},
    "own groups": {"world": 2, "features": frozenset({"own groups"})},
    "accumulate": {"world": 2, "features": frozenset({"accumulate"})},
    "hsdp": {"world": 4, "features": frozenset({"hsdp"})},
    "hsdp, own groups": {"world": 4, "features": frozenset({"hsdp", "own groups"})},
    "reshard to 2": {"world": 4, "reshard": 2},
    "hsdp, split from one": {"world": 4, "features": frozenset({"hsdp", "bound"})},
    "tensor parallel": {"world": 4, "features": frozenset({"tp"})},
}


@pytest.mark.parametrize("way", ["compiled", "uncompiled"])
@pytest.mark.parametrize("case", CASES)
def test_ranks_enter_the_same_collectives(case: str, way: str, tmp_path: Path) -> None:
    setup = Setup(way=way, **CASES[case])
    found = rehearse_together([setup] * setup.world, tmp_path)
    assert not any(each.error for each in found), [each.error for each in found]
    traces = [read_trace(each.trace) for each in found]
    assert all(trace.sent for trace in traces)
    several = "features" in CASES[case] or "reshard" in CASES[case]
    assert len({m.communicator for m in traces[0].sent}) > 1 or not several
    assert not partings(traces)
    for trace in traces:
        assert not trace.races and not trace.syncs


def test_ranks_that_planned_otherwise_part(tmp_path: Path) -> None:
    """One rank has another order of collectives, and no agreement stops it."""
    setups = [
        Setup(options={"schedule": schedule}, faults=frozenset({"agreement"}))
        for schedule in (True, False)
    ]
    found = rehearse_together(setups, tmp_path)
    assert not any(each.error for each in found), [each.error for each in found]
    assert partings([read_trace(each.trace) for each in found])


def test_agreement_stops_ranks_that_planned_otherwise(tmp_path: Path) -> None:
    setups = [Setup(options={"schedule": schedule}) for schedule in (True, False)]
    found = rehearse_together(setups, tmp_path)
    assert all("ranks disagree" in each.error for each in found)
