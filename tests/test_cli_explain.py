"""`shardc explain` and `shardc compare`: exit codes, files, errors that say what to do."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from command_line import ended

from shardc.reports.terminal import READABLE

MODULE = """
import torch
from torch import nn

def built():
    with torch.device("meta"):
        model = nn.Sequential(*(nn.Linear(64, 64) for _ in range(6)))
        return model, (torch.zeros(4, 64),)

def named():
    model, (x,) = built()
    return model, {"input": x}

def alone():
    return built()[0]

def wrong():
    return built()[0], (torch.zeros(4, 63),)

def huge():
    with torch.device("meta"):
        return nn.Linear(100_000, 1_000_000), torch.zeros(1, 100_000)
"""


@pytest.fixture(autouse=True)
def _user_module(monkeypatch, tmp_path):
    (tmp_path / "user_model.py").write_text(MODULE)
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    monkeypatch.chdir(tmp_path)


def test_explain_prints_a_report_and_saves_files(capsys, tmp_path):
    saved = [str(tmp_path / name) for name in ("step.json", "step.html", "step.trace.json")]
    arguments = [word for path in saved for word in ("--save", path)]
    code, out, _ = ended(
        capsys, "explain", "user_model:built", "--world-size", "16", "--mp", "bf16", *arguments
    )
    assert code == 0
    assert out.startswith("Sequential over 16 ranks") and "mp=bfloat16" in out
    assert "peak memory" in out and "reduce-scatter" in out and "like these" in out
    assert json.loads((tmp_path / "step.json").read_text())["world_size"] == 16
    assert "<html" in (tmp_path / "step.html").read_text()
    assert json.loads((tmp_path / "step.trace.json").read_text())["traceEvents"]


def test_explain_in_a_process_of_its_own(tmp_path):
    shardc = Path(sys.executable).parent / "shardc"
    command = [shardc, "explain", "user_model:built", "--mp", "bf16"]
    env = {**os.environ, "SHARDC_DUMP": "dump"}
    env.pop("COLUMNS", None)
    done = subprocess.run(command, capture_output=True, text=True, env=env, check=True)
    assert max(map(len, done.stdout.splitlines())) <= READABLE
    assert "At 100 columns these are left out: started before" in done.stdout
    assert "explain for" not in done.stderr  # no terminal, no line of progress
    plans = sorted(path.name.partition("_")[2] for path in tmp_path.glob("dump/rank0/*_plan.txt"))
    assert plans == ["backward_plan.txt", "forward_plan.txt"]


def test_explain_as_json_with_every_option(capsys):
    code, out, _ = ended(
        capsys, "explain", "user_model:named", "--world-size", "4", "--copies", "2",
        "--reshard", "2", "--profile", "a100-nvlink", "--symbolic", "--json",
    )  # fmt: skip
    values = json.loads(out)
    assert code == 0 and (values["world_size"], values["copies"]) == (4, 2)
    assert values["settings"] == {"reshard_after_forward": "2"}
    assert values["profile"] == "a100-nvlink" and "FLOPs" in values["formulas"]
    kinds = [row["kind"] for row in values["collectives"]]
    assert kinds.count("all_reduce") == kinds.count("reduce_scatter") > 0
    # What the backward gathers among two ranks is known by name, too.
    assert all("?" not in row["buckets"] and row["buckets"] for row in values["collectives"])


def test_explain_a_whole_step(capsys):
    code, out, _ = ended(capsys, "explain", "user_model:built", "--whole-step")
    assert code == 0 and "step=one graph" in out.splitlines()[0]
    code, out, _ = ended(capsys, "explain", "user_model:built", "--whole-step", "--gather-ahead")
    assert code == 0 and "gathered ahead=" in " ".join(out.split())
    code, _, err = ended(capsys, "explain", "user_model:built", "--gather-ahead")
    assert code == 2 and "--gather-ahead needs --whole-step" in err
    more = ["--whole-step", "--micro-batches", "4", "--gathered-bytes"]
    code, out, _ = ended(capsys, "explain", "user_model:built", *more, "1GiB")
    assert code == 0 and "micro-batches=4" in " ".join(out.split())
    code, _, err = ended(capsys, "explain", "user_model:built", *more, "much")
    assert code == 2 and "--gathered-bytes must be bytes" in err
    code, _, err = ended(capsys, "explain", "user_model:built", *more[1:], "1GiB")
    assert code == 2 and "--micro-batches needs --whole-step" in err


def test_explain_in_two_steps(capsys):
    code, out, _ = ended(
        capsys, "explain", "user_model:built", "--world-size", "16", "--hierarchical",
        "--profile", "h100-nvlink", "--json",
    )  # fmt: skip
    assert code == 0
    assert {row["ranks"] for row in json.loads(out)["collectives"] if row["in_steps"]} == {2, 8, 16}


def test_compare_takes_ranks_and_files(capsys, tmp_path):
    path = str(tmp_path / "two.json")
    ended(capsys, "explain", "user_model:built", "--world-size", "2", "--save", path)
    code, out, _ = ended(capsys, "compare", path, "user_model:built", "--world-size", "4", "8")
    assert code == 0
    assert [word for word in out.split() if word.startswith("W=")] == ["W=2", "W=4", "W=8"]
    code, out, _ = ended(capsys, "compare", path, path, "--json")
    rows = {row["figure"]: row for row in json.loads(out)}
    assert rows["step"]["ratios"] == [1.0, 1.0] and rows["segments"]["values"][0] > 0


def test_a_model_that_does_not_fit_is_a_problem(capsys):
    call = ["explain", "user_model:huge", "--profile", "a100-nvlink", "--world-size"]
    code, out, _ = ended(capsys, *call, "1")
    assert code == 1 and "- memory: the step needs" in out
    assert "a100-nvlink has 74.51 GiB" in " ".join(out.split())
    code, out, _ = ended(capsys, *call, "8", "--offload", "--json")
    values = json.loads(out)
    assert values["settings"] == {"offload": "cpu"}
    assert values["summary"]["peak_parts"]["segments"] == 0


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["explain", "user_model:alone"], 2, "returns a model only, and a step needs inputs"),
        (["explain", "user_model:wrong"], 1, "user_model:wrong cannot be explained: TorchRuntime"),
        (["explain", "user_model:built", "--world-size", "20000"], 2, "at most 16,384 ranks"),
        (["explain", "user_model:built", "--memory", "much"], 2, "must be bytes such as 70GB"),
        (["explain", "user_model:built", "--reshard", "3"], 2, "a divisor of the 8 ranks"),
        (["explain", "user_model:built", "--hierarchical", "--world-size", "12"], 2,
         "12 ranks cannot be split into nodes of 8"),
        (["explain", "user_model:built", "--save", "step.txt"], 2,
         "written as .html, .trace.json, .json"),
        (["explain", "user_model:built", "--save", "no/step.json"], 2, "there is no folder 'no'"),
        (["explain", "user_model:built", "--reshard", "maybe"], 2, "must be yes, no or a number"),
        (["explain", "user_model:built", "--memory-budget", "1KB"], 1, "is too small"),
        (["compare", "none.json", "none.json"], 1, "cannot be read: No such file"),
        (["compare", "user_model:built"], 2, "there is one report only"),
        (["compare", "step.html", "step.html"], 2, "step.html cannot be compared: give the .json"),
    ],
)  # fmt: skip
def test_what_goes_wrong_is_said(capsys, arguments, code, message):
    got, out, err = ended(capsys, *arguments)
    assert (got, out) == (code, "") and message in err
    assert not torch.distributed.is_initialized()
    assert "TORCHDYNAMO_VERBOSE" not in err


@pytest.mark.parametrize(
    ("given", "said", "least", "unit"),
    [
        ("1KB", "1KB", r"67\.\d+", "MB"),
        ("0.0001", r"0\.0001 \(7\.63 MiB\)", r"64\.\d+", "MiB"),
        ("1000", "1,000 bytes", r"67,\d{3},\d{3}", "bytes"),
    ],
)
def test_a_budget_that_cannot_be_kept_is_one_sentence_in_its_units(
    capsys, given, said, least, unit
):
    call = ["explain", "user_model:built", "--profile", "h100-nvlink", "--memory-budget"]
    code, out, err = ended(capsys, *call, given)
    (line,) = (line for line in err.splitlines() if "shardc explain: error: " in line)
    assert (code, out) == (1, "") and err.rstrip().endswith(line) and ". " not in line
    found = re.search(
        f"^shardc explain: error: user_model:built cannot be explained: memory_budget of {said} is "
        rf"too small: .* at least ({least}) {unit}: \S+ {unit} for segments",
        line,
    )
    assert found, line
    enough = found[1].replace(",", "") + ("" if unit == "bytes" else unit)
    assert ended(capsys, *call, enough)[0] == 0
