"""The package as others install it: its names, its import, its wheel, its types."""

import ast
import os
import re
import subprocess
import sys
import venv
from importlib.metadata import version
from pathlib import Path

import pytest

import shardc
from shardc.runtime import compat

ROOT = Path(__file__).parent.parent
PACKAGES = next(Path(entry) for entry in sys.path if Path(entry, "torch").is_dir())


def _python(code: str) -> str:
    run = [sys.executable, "-c", code]
    return subprocess.run(run, check=True, capture_output=True, text=True).stdout


def test_type_checkers_and_python_find_the_same_names():
    tree = ast.parse(Path(shardc.__file__).read_text())
    (block,) = (node for node in tree.body if isinstance(node, ast.If))
    seen = {name.asname: statement.module for statement in block.body for name in statement.names}
    assert seen == shardc._HOME_OF and shardc.__all__ == sorted(seen)
    for name, home in seen.items():
        assert getattr(shardc, name) is getattr(sys.modules[home], name), name
    assert {*seen, "__version__"} <= {*dir(shardc)}
    with pytest.raises(AttributeError, match="'shardc' has no attribute 'fully_sharded'"):
        shardc.fully_sharded  # noqa: B018


def test_import_reads_what_sharding_needs_and_no_more():
    code = """
import sys, shardc
print(*sys.modules, end=";")
import torch.distributed.fsdp
print(*sys.modules, end=";")
from shardc import fully_shard
print(*sys.modules)
"""
    first, theirs, ours = (set(part.split()) for part in _python(code).split(";"))
    assert not [name for name in first if "torch" in name]
    late = ("shardc.backend", "shardc.reports", "shardc.state", "shardc.commands", "torch._dynamo")
    assert not [name for name in ours if name.startswith((*late, "torch._inductor"))]
    beyond = {name for name in ours - theirs if not name.startswith("shardc")}
    assert len(beyond) < 45, sorted(beyond)


def test_dynamo_is_told_before_it_traces():
    code = """
import sys, torch, shardc
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
model = nn.Linear(4, 4)
early = "torch._dynamo" in sys.modules
shardc.fully_shard(model)
def asks(p):
    return p * 2 if isinstance(p, DTensor) else p * 3
with torch.no_grad():
    seen = torch.compile(asks, backend="eager", fullgraph=True)(model.weight)
    print(early, torch.equal(seen.to_local(), model.weight.to_local() * 2))
dist.destroy_process_group()
"""
    assert _python(code) == "False True\n"


def test_the_version_is_that_of_the_package():
    command = [sys.executable, "-m", "shardc", "--version"]
    told = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    assert told == f"shardc {shardc.__version__}\n" and version("shardc") == shardc.__version__


USER = """
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import shardc
from shardc import MixedPrecisionPolicy, ShardedModule, ShardTensor, StateDictOptions


def train(model: nn.Module, steps: int) -> dict[str, object]:
    mesh = init_device_mesh("cpu", (2,))
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
    sharded = shardc.fully_shard(model, mesh=mesh, units="auto", mp_policy=policy)
    assert isinstance(sharded, ShardedModule)
    sharded.set_requires_gradient_sync(True)
    model.compile(backend="shardc", options={"memory_budget": "1GB"})
    optimizer = torch.optim.AdamW(model.parameters())
    for _ in range(steps):
        model(torch.ones(2, 4)).sum().backward()
        optimizer.step()
    for parameter in model.parameters():
        if isinstance(parameter, ShardTensor):
            whole: torch.Tensor = parameter.full_tensor()
            print(whole.shape)
    print(shardc.describe(model), shardc.report(model), shardc.__version__)
    step = shardc.compile_step(lambda: model(torch.ones(2, 4)).sum())
    print(step.reasons)
    options = StateDictOptions(full_state_dict=True)
    return dict(shardc.get_model_state_dict(model, options=options))
"""


def test_user_code_passes_mypy_strict(tmp_path):
    """With the wheel in an environment of its own, where no folder of the project is."""
    build = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation"]
    subprocess.run([*build, "--wheel-dir", str(tmp_path), str(ROOT)], check=True)
    (wheel,) = tmp_path.glob("shardc-*.whl")
    venv.create(tmp_path / "venv")
    (site,) = (tmp_path / "venv" / "lib").glob("python*/site-packages")
    install = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target"]
    subprocess.run([*install, str(site), str(wheel)], check=True)
    assert (site / "shardc" / "py.typed").exists() and (site / "shardc" / "runtime").is_dir()
    (site / "torch.pth").write_text(str(PACKAGES))
    check = [sys.executable, "-m", "mypy", "--strict", "--python-executable"]
    wrong = USER.replace('units="auto"', "units=5").replace("full_state_dict=True", "full=True")
    for text, errors in ((USER, 0), (wrong, 2)):
        (tmp_path / "train.py").write_text(text)
        told = subprocess.run(
            [*check, str(tmp_path / "venv/bin/python"), "train.py"], cwd=tmp_path,
            capture_output=True, text=True, env={**os.environ, "MYPYPATH": ""},
        )  # fmt: skip
        assert told.returncode == bool(errors), told.stdout + told.stderr
        assert told.stdout.count("error:") == errors, told.stdout


def test_a_wheel_has_every_package():
    text = (ROOT / "pyproject.toml").read_text()
    (listed,) = re.findall(r"^packages = \[\n(.*?)^\]", text, re.MULTILINE | re.DOTALL)
    folders = {
        path.parent.relative_to(ROOT).as_posix().replace("/", ".")
        for top in ("shardc", "passes", "runtime")
        for path in (ROOT / top).rglob("__init__.py")
    }
    inside = {name if name.startswith("shardc") else f"shardc.{name}" for name in folders}
    assert set(re.findall(r'"([\w.]+)"', listed)) == inside


def test_the_range_of_torch_is_that_of_the_table():
    oldest, newest = compat.supported()
    text = {path: (ROOT / path).read_text() for path in (
        "pyproject.toml", "Makefile", "README.md", "docs/index.md", ".github/workflows/tests.yml",
    )}  # fmt: skip
    assert f'"torch{compat.specifier()}"' in text["pyproject.toml"]
    first, last = (f"({version.replace('.', ', ')})" for version in (oldest, newest))
    assert f"{first} <= tuple(" in text["Makefile"] and f"<= {last}" in text["Makefile"]
    assert f"torch {oldest} to {newest}" in text["README.md"]
    assert f"torch {oldest} to {newest}" in text["docs/index.md"]
    tried = re.findall(r"torch: \[(.*)\]", text[".github/workflows/tests.yml"])[0]
    made = re.search(r"torch==(\S+)\)", text["Makefile"])[1]  # what `make test` installs
    assert {version.rpartition(".")[0] for version in re.findall(r"[\d.]+", f"{tried} {made}")} == {
        ".".join(map(str, version)) for version in compat.VERSIONS
    }
