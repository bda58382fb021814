"""The kit for a machine with a GPU (`benchmarks/gpu`): what it keeps, and what it says it lacks.

Its parts run in `tests/cuda/test_kit.py`.
"""

import argparse
import json
import sys
import threading
import time
from pathlib import Path

import pytest
from scripts import load

CASES = ("first", "second", "third")


@pytest.fixture
def kit(monkeypatch):
    """The kit as a module whose parts have three cases that are never run."""
    monkeypatch.setattr(sys, "path", list(sys.path))
    module = load("benchmarks/gpu/__main__.py")
    monkeypatch.setattr(module, "_part", lambda name: dict.fromkeys(CASES))
    return module


def _call(kit, folder, run, **changed):
    """What was run, the results of a part, and how many cases are left."""
    ran = []

    def run_case(part, case, tiny, seconds, folder):
        ran.append(case)
        return run(case)

    kit._run_case = run_case
    asked = {"folder": folder, "again": False, "only": "", "tiny": False, "jobs": 1, **changed}
    limit, part = asked.pop("limit", 560.0), asked.pop("part", "smoke")
    results, left = kit._run(part, argparse.Namespace(**asked), time.monotonic() + limit)
    assert results == json.loads((folder / f"{part}.json").read_text())
    return ran, results, left


def test_a_case_that_was_cut_off_comes_first_in_the_next_call(kit, tmp_path):
    cut = {"first": {"ok": 1}, "second": None}.__getitem__
    ran, results, left = _call(kit, tmp_path, cut, limit=100)  # less than a case may take
    assert ran == ["first", "second"] and list(results) == ["first"] and left == 2
    ran, results, left = _call(kit, tmp_path, lambda case: {"ok": 2})
    assert ran == ["second", "third"] and results["first"] == {"ok": 1} and left == 0
    assert _call(kit, tmp_path, lambda case: {"ok": 3})[0] == []


def test_what_failed_is_tried_again_after_what_is_missing(kit, tmp_path):
    outcomes = {"first": None, "second": {"error": "no"}}
    ran, results, left = _call(kit, tmp_path, outcomes.__getitem__, only="s")
    assert ran == ["first", "second"] and left == 0
    assert "no end in 180 s" in results["first"]["error"]  # it had all the time of a case
    ran, results, left = _call(kit, tmp_path, lambda case: {"ok": case})
    assert ran == ["third", "first", "second"] and results["second"] == {"ok": "second"}


def test_again_runs_what_is_asked_for_and_keeps_the_rest(kit, tmp_path):
    _call(kit, tmp_path, lambda case: {"ok": 1})
    ran, results, _ = _call(kit, tmp_path, lambda case: {"ok": 2}, again=True, only="second")
    assert ran == ["second"]
    assert [results[case]["ok"] for case in CASES] == [1, 2, 1]


def test_no_case_starts_that_has_no_time(kit, tmp_path):
    _call(kit, tmp_path, lambda case: {"ok": 1}, only="first")
    assert _call(kit, tmp_path, lambda case: {"ok": 1}, limit=10)[0] == []


def test_cases_run_beside_each_other_but_for_those_that_are_timed(kit, tmp_path):
    meeting = threading.Barrier(len(CASES))

    def meet(case):
        try:
            meeting.wait(5 if together else 0.2)
        except threading.BrokenBarrierError:
            meeting.reset()
            return {"met": False}
        return {"met": True}

    for together, part in ((True, "smoke"), (False, "speed")):
        results = _call(kit, tmp_path, meet, jobs=len(CASES), part=part)[1]
        assert {result["met"] for result in results.values()} == {together}


def test_a_case_that_is_named_whole_is_alone(kit, tmp_path):
    kit._part = lambda name: dict.fromkeys(("step", "step, rows"))
    assert _call(kit, tmp_path, lambda case: {"ok": 1}, only="step")[0] == ["step"]
    assert _call(kit, tmp_path, lambda case: {"ok": 1}, only="ste")[0] == ["step, rows"]


def test_what_is_lacking_is_named(kit, monkeypatch, capsys, tmp_path):
    argv = ["gpu", "suite", "smoke", "--folder", str(tmp_path)]
    monkeypatch.setattr(sys, "argv", argv)
    monkeypatch.setattr(kit, "_run", lambda *_: ({"first": {"ok": 1}}, 0))
    monkeypatch.setitem(kit.NEEDS, "suite", ("json", "no_such_module"))
    with monkeypatch.context() as patch:
        patch.setattr(kit, "_problem", lambda: "")
        with pytest.raises(SystemExit) as ended:
            kit.main()
    assert ended.value.code == 1
    printed = capsys.readouterr().out
    assert "suite: left out, this Python lacks no_such_module" in printed
    assert "first" in printed  # the other part ran
    monkeypatch.setitem(kit.NEEDS, "", ("no_such_module",))
    with pytest.raises(SystemExit, match="lacks no_such_module"):
        kit.main()


def test_without_a_gpu_it_says_so(kit, monkeypatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    assert "finds no CUDA device" in kit._problem()


def test_a_case_is_ended_with_its_ranks(kit, monkeypatch, tmp_path):
    """Ranks that a case has started would keep the GPU's memory."""
    script = tmp_path / "__main__.py"
    script.write_text(
        "import os, subprocess, sys, time\n"
        "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'])\n"
        "print(child.pid, flush=True)\n"
        "time.sleep(600)\n"
    )
    monkeypatch.setattr(kit, "HERE", tmp_path)
    monkeypatch.setattr(kit, "_environment", lambda *_: None)
    assert kit._run_case("smoke", "first", True, 2.0, tmp_path) is None
    child = int((tmp_path / "smoke-first.log").read_text())
    until = time.monotonic() + 10
    while _runs(child) and time.monotonic() < until:
        time.sleep(0.05)
    assert not _runs(child)


def _runs(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except FileNotFoundError:
        return False


def test_a_crash_is_named(kit):
    assert kit._end_of("a warning", -11) == "ended by SIGSEGV"
    assert kit._end_of("Traceback\nValueError: no\n", 1) == "ValueError: no"
    assert kit._end_of("", 1) == "no output"
