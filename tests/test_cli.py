"""The command line: what `plan` prints is what `fully_shard` does, errors name the way out."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from command_line import ended
from models import Stack
from ranks import on_ranks
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy

from shardc import fully_shard, units_of
from shardc.commands.planned import group_units, plan_model, total
from shardc.passes.estimate.hardware import PROFILES
from shardc.runtime.checks.values import HARDWARE
from shardc.runtime.unit.precision import MixedPrecisionPolicy as Precision

ROOT = Path(__file__).parent.parent


@pytest.fixture(autouse=True)
def _in_the_repository(monkeypatch, tmp_path):
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr(sys, "path", [*sys.path, str(tmp_path)])


# -- plan ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("tied", [False, True])
@on_ranks(2)
def test_plan_has_the_buckets_of_fully_shard(mesh, tied):
    with torch.device("meta"):
        model, same = Stack(3, tied=tied), Stack(3, tied=tied)
    model.layers[1].up.weight.requires_grad_(False)
    same.layers[1].up.weight.requires_grad_(False)
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
    plans = plan_model(same, mesh.size(), Precision.of(policy), PROFILES["cpu"])
    planned = {
        name: (group.plan.layouts, group.plan.settings)
        for group in group_units(same, plans)
        for name in group.names
    }
    fully_shard(model, mesh=mesh, units="auto", mp_policy=policy)
    units = {name: module._shardc_unit for name, module in units_of(model).items()}
    assert planned.keys() == units.keys() and len(units) == 4
    for name, unit in units.items():
        layouts, settings = planned[name]
        assert layouts == tuple(bucket.layout for bucket in unit.buckets)
        assert settings.precision == unit.buckets[0].settings.precision
    segments = [bucket.segment for unit in units.values() for bucket in unit.buckets]
    totals = total(plans)
    kept = totals["bytes_per_rank"]
    assert kept["parameters"] == sum(segment.nbytes for segment in segments)
    assert kept["gradients"] == sum(s.nbytes for s in segments if s.requires_grad)
    assert kept["gradients"] < kept["parameters"] and totals["buckets"] == len(segments)
    assert totals["parameters"] == sum(p.numel() for p in same.parameters())


@pytest.mark.parametrize(
    "name, world, parameters, blocks, root",
    [
        ("llama3_8b", 1, 8_030_261_248, 32, 128256 * 4096 * 2 + 65 * 4096),
        ("llama3_70b", 1000, 70_553_706_496, 80, 128256 * 8192 * 2 + 161 * 8192),
        ("llama3_405b", 16384, 405_853_388_800, 126, 128256 * 16384 * 2 + 253 * 16384),
        ("mixtral_8x7b", 1000, 46_702_792_704, 32, 32000 * 4096 * 2 + 65 * 4096),
    ],
)
def test_plan_of_published_models(capsys, name, world, parameters, blocks, root):
    arguments = ["plan", f"examples.models:{name}", "--world-size", str(world), "--mp", "bf16"]
    code, out, err = ended(capsys, *arguments, "--json", "--profile", "h100-nvlink")
    assert (code, err) == (0, "")
    plan = json.loads(out)
    assert (plan["world_size"], plan["profile"]) == (world, "h100-nvlink")
    layers, rest = plan["units"]
    assert layers["names"] == [f"model.layers.{i}" for i in range(blocks)] and rest["names"] == [""]
    sizes = [sum(b["parameters"] for b in unit["buckets"]) for unit in (layers, rest)]
    assert sizes[1] == root and blocks * sizes[0] + root == parameters
    totals = plan["totals"]
    assert totals["parameters"] == parameters and totals["units"] == blocks + 1
    kept = totals["bytes_per_rank"]
    assert kept["gradients"] == kept["parameters"] and kept["adam"] == 2 * kept["parameters"]
    assert parameters * 4 <= world * kept["parameters"] < parameters * 4 * 1.002
    for bucket in layers["buckets"] + rest["buckets"]:
        assert bucket["bytes"] == world * bucket["segment_bytes"] == 2 * bucket["gathered_bytes"]
        assert (bucket["dtype"], bucket["gathered_dtype"]) == ("float32", "bfloat16")
        assert bucket["segment_bytes"] % 16 == 0


def test_plan_prints_a_row_a_bucket(capsys):
    arguments = ["plan", "examples.models:llama3_8b", "--world-size", "1024"]
    code, out, _ = ended(capsys, *arguments, "--profile", "h100-nvlink")
    lines = out.splitlines()
    assert code == 0 and lines[0].startswith("examples.models:llama3_8b over 1,024 ranks")
    rows = [" ".join(line.split()) for line in lines[4:8]]
    assert rows == [
        "model.layers.0 .. model.layers.31 (32) 218,103,808 float32 832 MiB 832 KiB 0.000",
        "(root) 525,336,576 float32 1.969 GiB 1.969 MiB 0.595",
        "266,240 float32 1.031 MiB 1.031 KiB 1.515",
        "525,336,576 float32 1.957 GiB 1.957 MiB 0.000",
    ]
    assert lines[-2] == "8,030,261,248 parameters; units: 33, buckets: 35, padding: 0.039%"
    assert "parameters 29.93 MiB, gradients 29.93 MiB, Adam's state 59.85 MiB" in lines[-1]
    mixed = ended(capsys, *arguments, "--mp", "bf16")[1]
    assert "  gathered  " in mixed and "  gathered  " not in out
    arguments += ["--mp", "bf16", "--wire", "int8"]
    quantised = json.loads(ended(capsys, *arguments, "--json")[1])
    for bucket in (bucket for unit in quantised["units"] for bucket in unit["buckets"]):
        share = bucket["wire_bytes"] / bucket["gathered_bytes"]
        assert 0.5 < share < 0.6 or bucket["parameters"] < 1 << 20


def test_plan_groups_only_what_is_alike(capsys):
    class Other(nn.Linear):
        pass

    blocks = [nn.Linear(8, 8), nn.Linear(8, 8), Other(8, 8), nn.Linear(8, 16)]
    model = nn.Module()
    model.a, model.b = nn.ModuleList(blocks[:2]), nn.ModuleList([Other(8, 8), Other(8, 8)])
    model.c = nn.ModuleList([nn.Linear(8, 8), nn.Linear(8, 16)])
    plans = plan_model(model, 4, Precision(), PROFILES["cpu"])
    labels = [group.label for group in group_units(model, plans) if group.plan.layouts]
    assert labels == ["a.0 .. a.1 (2)", "b.0 .. b.1 (2)", "c.0", "c.1"]


MODULE = """
import torch
from torch import nn

number = 3
model = nn.Linear(2, 2)
def alone(): return nn.Linear(2, 2)
def empty(): return nn.ReLU()
def wants(size): return nn.Linear(size, size)
def raises(): raise OSError("no such weights")
def text(): return "model"
def lazy(): return nn.LazyLinear(3)
def shared():
    model = nn.Linear(2, 2)
    model.alias = nn.Parameter(model.weight.data)
    return model
"""


@pytest.mark.parametrize(
    "target, code, message",
    [
        ("nowhere:build", 2, "no module 'nowhere' for 'nowhere:build': run shardc in the folder"),
        ("examples.nowhere:build", 2, "package 'examples' has no module 'nowhere'"),
        ("examples/models.py:build", 2, "write package.module:function, with dots and without .py"),
        ("examples.models", 2, "'examples.models' names no function"),
        ("of_user:build", 2, "has no 'build'; its functions: alone, empty, wants, raises, text"),
        ("of_user:number", 2, "'of_user:number' is of type int, not a function"),
        ("of_user:model", 2, "'of_user:model' is of type Linear, not a function"),
        ("of_user:wants", 2, "cannot be called without arguments (missing a required argument: "),
        ("of_user:text", 2, "of_user:text returned a value of type str; it must return"),
        ("of_user:raises", 1, "of_user:raises raised OSError (traceback above): no such weights"),
        ("of_user:empty", 1, "the ReLU has no parameters: there is nothing to shard"),
        ("of_user:lazy", 1, "fully_shard would refuse this model: parameter 'weight' of a lazy"),
        ("of_user:shared", 1, "shares its storage with parameter"),
        ("broken_by_user:build", 1, "importing 'broken_by_user' raised SyntaxError"),
        ("in_need:build", 1, "module 'in_need' needs 'no_such_package', which is not installed"),
    ],
)
def test_targets_that_cannot_be_planned(capsys, tmp_path, target, code, message):
    (tmp_path / "of_user.py").write_text(MODULE)
    (tmp_path / "broken_by_user.py").write_text("def build(:")
    (tmp_path / "in_need.py").write_text("import no_such_package")
    got, out, err = ended(capsys, "plan", target)
    assert (got, out) == (code, "") and message in err
    assert ("Traceback" in err) == ("traceback above" in err)


def test_plan_takes_a_model_without_inputs(capsys, tmp_path):
    (tmp_path / "of_user.py").write_text(MODULE)
    code, out, _ = ended(capsys, "plan", "of_user:alone", "--world-size", "1")
    assert code == 0 and "6 parameters; units: 1, buckets: 1" in out
    assert "the whole model is one unit" in out


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["plan", "a:b", "--world-size", "0"], "--world-size: must be a count, 1 or more"),
        (["plan", "a:b", "--world-size", "many"], "got 'many'"),
        (["plan", "a:b", "--mp", "int8"], "invalid choice: 'int8'"),
        (["plan"], "the following arguments are required: target"),
        (["paln", "a:b"], "invalid choice: 'paln'"),
        (["doctor", "--timeout", "0"], "--timeout must be more than 0 seconds, got 0"),
        ([], "Start with `shardc doctor`"),
    ],
)
def test_wrong_usage(capsys, arguments, message):
    code, out, err = ended(capsys, *arguments)
    assert (code, out) == (2, "") and message in err


TYPED = """
import sys
from shardc.commands.cli import main

for line in sys.stdin.read().splitlines():
    try:
        code = main(line.split())
    except SystemExit as end:
        code = end.code
    print(line, code, "torch" in sys.modules, file=sys.stderr)
"""


def test_wrong_usage_costs_no_import_of_torch():
    wrong = [
        "", "plan", "plan json:dumps", "plan json:nothing", "plan nowhere:build", "fit json:dump",
        "fit json:dump --memory lots", "explain a/b.py:model", "explain nowhere:build",
        "explain json:load --save step.txt", "explain json:load --memory-budget much",
        "explain json:load --reshard 3", "explain json:load --world-size 20000",
        "explain json:load --profile none", "compare one.json", "compare a.html b.html",
        "precompile nowhere:build", "calibrate --device tpu", "doctor --timeout 0",
    ]  # fmt: skip
    right = ["--help", "explain --help"]
    call = [sys.executable, "-c", TYPED]
    lines = "\n".join(wrong + right)
    done = subprocess.run(call, input=lines, capture_output=True, text=True, cwd=ROOT, check=True)
    ends = [line for line in done.stderr.splitlines() if line.endswith(("True", "False"))]
    assert ends == [f"{line} 2 False" for line in wrong] + [f"{line} 0 False" for line in right]


@pytest.mark.parametrize("width", [80, 200])
def test_every_help_has_an_explanation(capsys, monkeypatch, width):
    monkeypatch.setenv("COLUMNS", str(width))
    for name in ("", "plan", "explain", "fit", "compare", "precompile", "doctor", "calibrate"):
        code, out, _ = ended(capsys, *name.split(), "--help")
        assert code == 0 and len(out.splitlines()) > 10
        assert max(map(len, out.splitlines())) <= width
        assert "exit code" in out or "example" in out


def test_the_command_line_knows_the_hardware():
    assert sorted(PROFILES) == sorted(HARDWARE)
