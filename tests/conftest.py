"""Shared set-up: one Inductor cache for all processes, rank processes ended with the session."""

import os
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parent))
_cache = Path(tempfile.gettempdir()) / f"shardc_test_inductor_{os.getuid()}"
os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", str(_cache))
os.environ.setdefault("OMP_NUM_THREADS", "1")
# Each process that compiles would first try whether the C++ compiler knows this CPU's vectors, and
# start compilers of its own beside it: seconds, in hundreds of processes.
os.environ.setdefault("TORCHINDUCTOR_VEC_ISA_OK", "1")
os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")
os.environ["COLUMNS"] = "100"  # readline, which pytest imports, puts 80 there where no terminal is


@pytest.fixture
def four_ranks() -> Iterator[None]:
    """A group without peers, whose threads would hold tensors for a moment longer."""
    import torch.distributed as dist

    from shardc.runtime import compat

    compat.join_fake_group(4)
    yield
    dist.destroy_process_group()


def pytest_collection_modifyitems(items: list[Any]) -> None:
    """Mark what `thorough.toml` lists: `make test` leaves it out, `make test-all` does not."""
    import tiers

    left_out = tiers.left_out()
    tiers.collected[:] = [item.nodeid for item in items]
    for item in items:
        reason = tiers.reason_for(item.nodeid, left_out)
        if reason is not None:
            item.add_marker(pytest.mark.thorough(reason))


def pytest_collection_finish(session: Any) -> None:
    import ranks

    ranks.compile_sooner()
    ranks.start_for(session.items)


@pytest.hookimpl(tryfirst=True)
def pytest_sessionfinish(session: Any) -> None:
    import ranks

    ranks.stop_all()
    if hasattr(session.config, "workeroutput"):  # of pytest-xdist: to the process that sums up
        session.config.workeroutput["reruns"] = ranks.reruns


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any, error: object) -> None:
    import ranks

    ranks.reruns.extend(getattr(node, "workeroutput", {}).get("reruns", ()))


def pytest_terminal_summary(terminalreporter: Any) -> None:
    import ranks

    told = [f"reruns after a signal: {len(ranks.reruns)}", *ranks.reruns]
    terminalreporter.write_line("; ".join(told))  # `.ci/run` looks for this line
