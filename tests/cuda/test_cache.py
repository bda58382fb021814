"""Compiled graphs on disk: a start that finds them compiles no kernel, on whichever GPU it is."""

import re
import shutil
from pathlib import Path
from typing import Any

import pytest
from rehearsal import Outcome, Setup, rehearse
from step_trace import Trace, read_trace

CASES: dict[str, dict[str, Any]] = {
    "default": {},
    "checkpoint": {"features": frozenset({"checkpoint"})},
    "blocks": {"way": "blocks"},
    "reduce-overhead": {"mode": "reduce-overhead"},
}


@pytest.mark.parametrize("case", CASES)
def test_a_start_with_the_graphs_of_another(case: str, tmp_path: Path) -> None:
    first, before = _start(tmp_path / "first", CASES[case])
    assert first.compiled > 0
    assert not first.loaded  # equal blocks share one graph
    for rank in (0, 1):
        folder = tmp_path / str(rank)
        graphs = "cache/aotautograd"  # they hold their kernels
        shutil.copytree(tmp_path / "first" / graphs, folder / graphs)
        found, after = _start(folder, {"rank": rank, **CASES[case]})
        assert found.loaded > 0 and not found.compiled
        assert (before.devices, after.devices) == ({0}, {rank})
        assert not after.races and not after.syncs
        launched = [(each.order, each.launches, each.names) for each in (before, after)]
        assert launched[0] == launched[1]
        assert (found.orders, found.planned) == (first.orders, first.planned)
    # What was changed over is what this rank would have compiled.
    kernels = "cache/triton"
    shutil.copytree(tmp_path / "1" / kernels, tmp_path / "own" / kernels)
    _start(tmp_path / "own", {"rank": 1, **CASES[case]})
    assert _code(tmp_path / "1") == _code(tmp_path / "own") != _code(tmp_path / "first")


@pytest.mark.parametrize("feature", ["", "hsdp", "offload"])
def test_a_start_with_graphs_compiled_ahead(feature: str, tmp_path: Path) -> None:
    features = frozenset({feature}) - {""}
    setup = Setup(who="ahead", features=features, cache=tmp_path / "cache")
    (tmp_path / "ahead").mkdir()
    ahead = rehearse(setup, tmp_path / "ahead")
    assert not ahead.error and ahead.compiled > 0, ahead.error
    found, trace = _start(tmp_path, {"rank": 1, "features": features})
    assert found.loaded > 0 and not found.compiled, (found.loaded, found.compiled)
    assert not trace.races


def _start(folder: Path, kwargs: dict[str, Any]) -> tuple[Outcome, Trace]:
    folder.mkdir(exist_ok=True)
    found = rehearse(Setup(**kwargs, cache=folder / "cache"), folder)
    assert not found.error, found.error
    return found, read_trace(found.trace)


def _code(folder: Path) -> set[str]:
    """The code of Inductor that calls kernels, without the paths of these."""
    texts = (path.read_text() for path in folder.glob("cache/*/*.py"))
    calling = (text for text in texts if "async_compile.wait" in text)
    return {re.sub("# kernel path: .*", "", text) for text in calling}
