"""Tests of the processes that run tests: what ends them is told, and only a signal excuses it."""

import os
import signal
import threading
import time
from multiprocessing.connection import wait
from pathlib import Path

import pytest
import ranks
from ranks import run_on_ranks


def answer(mesh, value: int) -> int:
    return value + mesh.get_rank()


def fail_on_one(mesh) -> None:
    assert mesh.get_rank() == 0, "only rank 0 is right"


def hang_on_one(mesh, marker: str) -> None:
    if mesh.get_rank() == 1:
        Path(marker).touch()
        threading.Event().wait()


def end(mesh, marker: str, signal_number: int) -> str:
    """Ends rank 1 by a signal where `marker` is not there yet."""
    if mesh.get_rank() == 1 and not Path(marker).exists():
        Path(marker).touch()
        os.kill(os.getpid(), signal_number)
    return "survived"


@pytest.fixture
def own_pool(monkeypatch):
    """Two ranks of their own, started."""
    monkeypatch.setattr(ranks, "_pools", {})
    monkeypatch.setattr(ranks, "reruns", [])
    assert run_on_ranks(2, "test_ranks", "answer", {"value": 5}) == [5, 6]
    yield
    ranks.stop_all()


def test_ranks_are_stopped_between_tests(own_pool):
    def state_of(process):
        return Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()[0]

    end = time.monotonic() + 10  # each of its threads comes to the signal when it runs next
    for process in ranks._pools[2, "cpu"].processes:
        while (state := state_of(process)) != "T" and time.monotonic() < end:
            time.sleep(0.01)
        assert state == "T", state
    assert run_on_ranks(2, "test_ranks", "answer", {"value": 6}) == [6, 7]


def test_a_failure_on_one_rank_is_told(own_pool):
    with pytest.raises(AssertionError, match=r"rank 1: (?s:.*)only rank 0 is right"):
        run_on_ranks(2, "test_ranks", "fail_on_one", {})
    assert not ranks.reruns


def test_a_rank_that_hangs_is_a_failure_and_says_where_it_is(own_pool, tmp_path, monkeypatch):
    marker = tmp_path / "marker"

    def wait_until_it_hangs(pipes, timeout):
        while not marker.exists():
            time.sleep(0.01)
        return wait(pipes, timeout)

    monkeypatch.setattr(ranks, "wait", wait_until_it_hangs)
    with pytest.raises(AssertionError) as caught:
        run_on_ranks(2, "test_ranks", "hang_on_one", {"marker": str(marker)}, timeout=1)
    text = str(caught.value)
    assert "rank 1: no answer within 1 s" in text and "in hang_on_one" in text, text
    assert not ranks.reruns and not ranks._pools


def test_a_rank_ended_by_a_broken_heap_runs_again_and_is_counted(own_pool, tmp_path):
    run = {"marker": str(tmp_path / "marker"), "signal_number": int(signal.SIGSEGV)}
    with pytest.warns(UserWarning, match="in end"):
        assert run_on_ranks(2, "test_ranks", "end", run) == ["survived"] * 2
    assert ranks.reruns == ["test_ranks.end on 2 ranks"]


def test_a_rank_ended_otherwise_is_a_failure(own_pool, tmp_path):
    run = {"marker": str(tmp_path / "marker"), "signal_number": int(signal.SIGKILL)}
    with pytest.raises(AssertionError, match="rank 1: ended with -9"):
        run_on_ranks(2, "test_ranks", "end", run)
    assert not ranks.reruns
