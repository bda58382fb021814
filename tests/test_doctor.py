"""`shardc doctor` and `shardc calibrate`: what they find here, and what is not there."""

import json
import math
import subprocess
import sys
from collections import Counter
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from command_line import ended

from shardc import set_profile
from shardc.commands import machine, probes
from shardc.commands.machine import Checked
from shardc.passes.estimate.hardware import current_profile

MODULE = sys.modules["shardc.calibration"]


@pytest.fixture(autouse=True)
def _no_calibration_kept(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    # What is measured here is not of interest.
    monkeypatch.setitem(MODULE._PROBES, "cpu", replace(MODULE._PROBES["cpu"], matmul=64))
    monkeypatch.setattr(MODULE, "_ROUNDS", 1)
    yield
    set_profile(None)


# -- doctor --------------------------------------------------------------------------------------


def test_doctor_runs_every_check(capsys, monkeypatch):
    code, out, _ = ended(capsys, "doctor", "--json", "--timeout", "1000")
    report = json.loads(out)
    found = {check["name"]: check for check in report["checks"]}
    assert found["torch"]["status"] == "ok" and torch.__version__ in found["torch"]["detail"]
    assert found["all-gather on CPU"] == {
        "name": "all-gather on CPU", "status": "ok", "advice": "",
        "detail": "2 processes over gloo, joined on 127.0.0.1",
    }  # fmt: skip
    assert found["compile for CPU"]["status"] == found["C++ compiler"]["status"] == "ok"
    assert found["calibration"]["status"] == "missing"
    assert code == 0 and "CPU" in report["can_train"]


def _doctor(capsys, monkeypatch, **findings):
    """A run of the doctor in which the checks find what is given."""
    names = {name.replace("_", " "): finding for name, finding in findings.items()}
    checks = [(name, lambda timeout, f=finding: f) for name, finding in names.items()]
    monkeypatch.setattr(machine, "checks", lambda: checks)
    return ended(capsys, "doctor")


def test_doctor_says_whether_one_can_train(capsys, monkeypatch):
    ok, broken = Checked("ok", "fine"), Checked("broken", "it crashed", "mend it")
    cpu = {"torch": ok, "compile_for_CPU": ok, "all-gather_on_CPU": ok}
    code, out, _ = _doctor(capsys, monkeypatch, **cpu)
    assert code == 0 and out.endswith("\nThis machine can train on CPU.\n")
    code, out, _ = _doctor(capsys, monkeypatch, **{**cpu, "compile_for_CPU": broken})
    assert code == 0 and "can train on CPU (uncompiled on CPU)." in out
    assert "broken   compile for CPU    it crashed -> mend it\n" in out
    code, out, _ = _doctor(capsys, monkeypatch, **{**cpu, "all-gather_on_CPU": broken})
    assert code == 1 and "cannot train yet" in out
    code, out, _ = _doctor(capsys, monkeypatch, **{**cpu, "torch": broken})
    assert code == 1
    gpu = {"GPU": ok, "compile_for_GPU": ok, "all-gather_on_GPU": ok}
    code, out, _ = _doctor(capsys, monkeypatch, **cpu, **gpu)
    assert code == 0 and "can train on CPU and GPU." in out


def test_checks_that_find_something(monkeypatch, tmp_path):
    (major, oldest), (_, newest) = machine.compat.VERSIONS[0], machine.compat.VERSIONS[-1]
    known = {f"{major}.{oldest}.0": "ok", f"{major}.{newest}.1+cu130": "ok"}
    known |= {f"{major}.{oldest - 1}.2": "broken", f"{major}.{newest + 1}.0a0+git1": "broken"}
    for version, status in known.items():
        monkeypatch.setattr(torch, "__version__", version)
        assert machine.check_torch(1).status == status, version
    wanted = f"torch>={major}.{oldest},<{major}.{newest + 1}"
    assert machine.check_torch(1).advice == f"pip install '{wanted}'"

    def none():
        raise RuntimeError("none")

    monkeypatch.setattr(machine.compat, "cpp_compiler", none)
    assert machine.check_cpp_compiler(1).status == "missing"
    assert machine.check_backend("none", 1).status == "missing"
    monkeypatch.setattr(machine, "try_gather", lambda *_: "no address")
    finding = machine.check_gather("gloo", 2, 1)
    assert (finding.status, finding.detail) == ("broken", "no address")
    assert "GLOO_SOCKET_IFNAME=lo" in finding.advice
    folder = machine.calibration_folder()
    folder.mkdir(parents=True)
    kept = folder / f"cpu-{torch.get_num_threads()}-gloo-2.json"
    kept.write_text("[1.0, 2.0")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert machine.check_calibration(1).status == "broken"
    kept.write_text(json.dumps([0.5] * 9))
    assert machine.check_calibration(1).detail == f"{kept.stem} in {folder}"


def test_probes_that_fail_say_why():
    assert probes.try_compile("nowhere", 100).startswith("RuntimeError: ")
    assert probes.try_gather("gloo", 2, 0.01) == "not done within 0.01 s"


# -- calibrate -----------------------------------------------------------------------------------


def test_calibrate_alone_measures_the_device(capsys, tmp_path):
    code, out, _ = ended(capsys, "calibrate", "--device", "cpu", "--json")
    report = json.loads(out)
    file = Path(report["file"])
    assert code == 0 and report["measured_now"] and report["world_size"] == 1
    assert file.parent == tmp_path / "cache" / "shardc" and file.exists()
    assert report["profile"]["memory_bandwidth"] > 1e6
    assert not torch.distributed.is_initialized()
    code, out, _ = ended(capsys, "calibrate", "--device", "cpu")
    assert code == 0 and "kept from an earlier run" in out and str(file) in out
    file.write_text("damaged")
    code, out, _ = ended(capsys, "calibrate", "--device", "cpu")
    assert code == 0 and "measured now" in out and "links" in out
    assert [path.name for path in file.parent.iterdir()] == [file.name]  # nothing half done


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_calibrate_says_that_there_is_no_gpu(capsys):
    code, _, err = ended(capsys, "calibrate", "--device", "cuda")
    assert code == 2 and "finds 0 GPUs here" in err


def test_what_no_measurement_gives_is_measured_again(capsys, monkeypatch, tmp_path):
    monkeypatch.setattr(MODULE, "_measure", lambda *_: [0.5] * 9)
    for wrong in ([0.0] * 9, [math.nan] * 9, [0.5] * 8 + [-1.0], [0.5] * 8 + [math.inf], [0.5]):
        ended(capsys, "calibrate", "--device", "cpu")
        (file,) = (tmp_path / "cache" / "shardc").iterdir()  # nothing half done beside it
        file.write_text(json.dumps(wrong))
        code, out, _ = ended(capsys, "calibrate", "--device", "cpu")
        assert code == 0 and "measured now" in out
        assert json.loads(file.read_text()) == [0.5] * 9


def test_a_slow_probe_is_measured_until_that_is_enough(monkeypatch):
    """Only what each rank does alone: collectives that some ranks leave out would hang."""
    now, called = [0.0], []

    def probe(name, seconds):
        def call():
            called.append(name)
            now[0] += seconds

        return call

    monkeypatch.setattr(MODULE, "time", SimpleNamespace(perf_counter=lambda: now[0]))
    probes = [probe("quick", 0.01), probe("some", 0.4), probe("slow", 7.0)]
    monkeypatch.setattr(MODULE, "_probes", lambda device: probes)
    monkeypatch.setattr(MODULE, "_gathers", lambda mesh, device: [probe("gather", 9.0)])
    monkeypatch.setattr(MODULE, "_ROUNDS", 5)
    figures = MODULE._measure(None, torch.device("cpu"))
    assert figures == pytest.approx([0.01, 0.4, 7.0, 9.0])
    assert Counter(called) == {"quick": 15, "some": 3, "slow": 1, "gather": 15}


def test_calibrate_says_where_it_cannot_write(capsys, monkeypatch, tmp_path):
    monkeypatch.setattr(MODULE, "_measure", lambda *_: [0.5] * 9)
    (tmp_path / "cache").write_text("a file, no folder")
    with pytest.warns(UserWarning, match="cannot be kept in .*cache.*plans with it"):
        code, _, err = ended(capsys, "calibrate", "--device", "cpu")
    assert current_profile("cpu").source == "calibrate()"  # a training script goes on with it
    assert code == 1 and "set XDG_CACHE_HOME to a folder that can be written" in err


def test_calibrate_under_torchrun_measures_the_links():
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command = [sys.executable, *torchrun, "-m", "shardc", "calibrate", "--device", "cpu", "--json"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=1000, check=False)
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)  # one rank prints
    assert report["world_size"] == 2 and report["profile"]["name"].endswith("-gloo-2")
    assert 1e5 < report["profile"]["inside"]["bandwidth"] < 1e13
