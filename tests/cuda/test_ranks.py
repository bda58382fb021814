"""Ranks that meet agree, and enter the same collectives of each communicator in one order."""

from pathlib import Path
from typing import Any

import pytest
from rehearsal import Setup, rehearse_together
from step_trace import partings, read_trace

CASES: dict[str, tuple[int, dict[str, Any]]] = {
    "default": (1, {"world": 2}),
    "own groups": (2, {"world": 2, "features": frozenset({"own groups"})}),
    "accumulate": (1, {"world": 2, "features": frozenset({"accumulate"})}),
    "hsdp": (2, {"world": 4, "features": frozenset({"hsdp"})}),
    "hsdp, own groups": (3, {"world": 4, "features": frozenset({"hsdp", "own groups"})}),
    "hsdp, split from one": (2, {"world": 4, "features": frozenset({"hsdp", "bound"})}),
    "reshard to 2": (2, {"world": 4, "reshard": 2}),
    "tensor parallel": (2, {"world": 4, "features": frozenset({"tp"})}),
}
"""How many communicators a rank uses in a step, and its setup."""


@pytest.mark.parametrize("way", ["compiled", "uncompiled"])
@pytest.mark.parametrize("case", CASES)
def test_ranks_enter_the_same_collectives(case: str, way: str, tmp_path: Path) -> None:
    communicators, kwargs = CASES[case]
    setup = Setup(way=way, **kwargs)
    found = rehearse_together([setup] * setup.world, tmp_path)
    assert not any(each.error for each in found), [each.error for each in found]
    traces = [read_trace(each.trace) for each in found]
    assert not partings(traces)
    for trace in traces:
        assert len({message.communicator for message in trace.sent}) == communicators
        assert not trace.races and not trace.syncs


def test_a_group_is_made_by_its_ranks_alone(tmp_path: Path) -> None:
    """Of a world with a communicator to split, which takes all ranks."""
    shared = frozenset({"tp", "bound"})
    setups = [Setup(features=shared | ({"own groups"} if rank % 2 else set())) for rank in range(4)]
    found = rehearse_together(setups, tmp_path)
    assert not any(each.error for each in found), [each.error for each in found]
    traces = [read_trace(each.trace) for each in found]
    communicators = [len({message.communicator for message in trace.sent}) for trace in traces]
    assert communicators == [2, 3, 2, 3]


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
