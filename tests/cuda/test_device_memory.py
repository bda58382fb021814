"""Planned bytes beside those that the caching allocator gave and took from the device."""

from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
from rehearsal import Setup, rehearse
from step_trace import read_trace

MODELS: dict[str, dict[str, int]] = {
    "16 x 2048": {"blocks": 16, "dim": 2048, "batch": 4, "length": 2048},
    "8 x 4096": {"blocks": 8, "dim": 4096, "batch": 2, "length": 4096},
    "24 x 1024": {"blocks": 24, "dim": 1024, "batch": 16, "length": 1024},
    "12 x 768": {"blocks": 12, "dim": 768, "batch": 32, "length": 1024},
}
"""Peaks of 2 to 19 GB. The allocator takes segments of 20 MiB, which would count beside 0.2 GB."""
STRATEGIES: dict[str, dict[str, Any]] = {
    "default": {},
    "no reshard": {"reshard": False},
    "checkpoint": {"features": frozenset({"checkpoint"})},
}
SMALL: dict[str, dict[str, int]] = {
    "4 x 1024": {"blocks": 4, "dim": 1024, "batch": 4, "length": 1024},
    "8 x 512": {"blocks": 8, "dim": 512, "batch": 4, "length": 1024},
}
VERSION = tuple(map(int, version("torch").split(".")[:2]))
WANTED = 1.10
"""The most bytes that the allocator should keep of the device, over the peak."""
MISSED, MOST = ("8 x 4096", "checkpoint", "fixed"), {(2, 11): 1.15, (2, 13): 1.11, (2, 15): 1.12}
"""A case that has more, and how much at most, by version of torch. With 2.15 the plan lacks 3.0% of
its peak, with both kinds of segments."""


@pytest.mark.parametrize("segments", ["fixed", "expandable"])
@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("model", MODELS)
def test_peak(model: str, strategy: str, segments: str, tmp_path: Path) -> None:
    expandable = segments == "expandable"
    setup = Setup(**MODELS[model], **STRATEGIES[strategy], expandable=expandable)
    found = rehearse(setup, tmp_path)
    assert not found.error, found.error
    print(f"planned {found.planned:,}, peak {found.peak:,}, reserved {found.reserved:,}")
    lacks = VERSION == (2, 15) and (model, strategy) == MISSED[:2]
    off = 0.035 if lacks else 0.02 if strategy == "checkpoint" else 0.003
    assert abs(found.planned / found.peak - 1) <= off
    most = MOST.get(VERSION, WANTED) if (model, strategy, segments) == MISSED else WANTED
    assert found.reserved <= most * found.peak


@pytest.mark.parametrize("share", [0.9, 0.65])
def test_a_budget_saves_on_the_host(share: float, tmp_path: Path) -> None:
    sizes: dict[str, int] = {"blocks": 4, "dim": 512, "batch": 8, "length": 1024}
    _check_budget(share, sizes, {"offload_optimizer_state": False}, tmp_path)


@pytest.mark.parametrize("share", [0.8, 0.65])
def test_a_budget_has_the_optimizers_state_wait_on_the_host(share: float, tmp_path: Path) -> None:
    sizes: dict[str, int] = {"blocks": 4, "dim": 1024, "batch": 4, "length": 512}
    _check_budget(share, sizes, {"offload_activations": False}, tmp_path)


@pytest.mark.parametrize("model", SMALL)
def test_a_budget_computes_again(model: str, tmp_path: Path) -> None:
    stays = {"offload_activations": False, "offload_optimizer_state": False}
    _check_budget(0.7, SMALL[model], stays, tmp_path, copies=False)


def _check_budget(
    share: float, sizes: Any, options: dict[str, Any], folder: Path, copies: bool = True
) -> None:
    """What is copied to the host races with nothing, nobody waits there, and the budget is kept."""
    (folder / "free").mkdir()
    (folder / "bound").mkdir()
    free = rehearse(Setup(**sizes), folder / "free")
    options = {**options, "memory_budget": int(share * free.planned)}
    found = rehearse(Setup(**sizes, options=options), folder / "bound")
    assert not found.error, found.error
    before, trace = read_trace(free.trace), read_trace(found.trace)
    copied = trace.count("copy") - before.count("copy")
    print(f"{copied} copies, planned {found.planned:,}, peak {found.peak:,}, free {free.peak:,}")
    assert copied > 4 if copies else copied <= 0
    assert not trace.races, "\n".join(map(str, trace.races[:10]))
    assert not trace.syncs, trace.syncs
    assert found.planned <= options["memory_budget"]
    assert found.peak <= options["memory_budget"] and 0.97 <= found.planned / found.peak <= 1.03
