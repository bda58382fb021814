"""The cost of a start, release by release: CPU seconds of commands, traced ops, compiled kernels.

    python benchmarks/releases.py abb79bf HEAD --pairs 3

Releases are commits of this repository, each installed in a folder of its own; their commands run
in turn. "import" is `from shardc import fully_shard` in CPU time of FSDP2's import. "explain" is
the command for models of `examples/models.py` in bfloat16: 8B and 70B at 1,024 ranks, 405B at
16,384. "ops a block" are those that AOT autograd traces for each further block of a Llama model
of width 256, "kernels" those that Inductor makes of 8 blocks: once with the layout of a CPU, once
with that of a GPU, where vectors of blocks lie in the model's bucket. Both are counts of this
process and no times: they are the same everywhere, and a test holds those of today.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any
from unittest import mock

from compile_time import cpu_seconds, llama
from kept import add_keep_option, show
from processes import median_ratio
from tqdm import tqdm

ROOT = Path(__file__).parent.parent
IMPORTS = {
    "import": "from shardc import fully_shard",
    "FSDP2's": "from torch.distributed.fsdp import fully_shard",
}
PLANS = {"8B": ("llama3_8b", 1024), "70B": ("llama3_70b", 1024), "405B": ("llama3_405b", 16384)}
LAYOUTS = {"CPU": None, "GPU": "h100-nvlink"}
_FEW, _MORE = 8, 16
"""Blocks of the two models whose difference tells what a block costs."""


def main() -> None:
    """Run the pairs and print one table."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("releases", nargs="*", default=["HEAD"],
                        help="commits, the first is what others are compared with")  # fmt: skip
    parser.add_argument("--pairs", type=int, default=3, help="interleaved pairs (default 3)")
    parser.add_argument("--models", choices=PLANS, nargs="*", default=list(PLANS),
                        help=f"that are explained, of {', '.join(PLANS)}")  # fmt: skip
    add_keep_option(parser)
    parser.add_argument("--count", choices=LAYOUTS, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.count:
        print(json.dumps(counts(LAYOUTS[args.count])))
        return
    with tempfile.TemporaryDirectory() as folder:
        installed = {commit: _installed(commit, folder) for commit in args.releases}
        commands = {name: ["-c", code] for name, code in IMPORTS.items()}
        commands |= {name: _explain(name) for name in args.models}
        seconds = _measured(installed, commands, args.pairs)
        counted = {commit: _counted(path) for commit, path in installed.items()}
    first = args.releases[0]
    headers = ["", "import", *(f"explain {name}" for name in args.models)]
    headers += [f"{what}, {layout}" for what in ("ops a block", "kernels") for layout in LAYOUTS]
    rows = []
    for commit, name in zip(args.releases, map(_named, args.releases), strict=True):
        ratio = median_ratio(seconds[commit, "import"], seconds[commit, "FSDP2's"])
        rows.append([name, ratio, *(_cell(seconds, commit, first, m) for m in args.models)])
        rows[-1] += map(str, counted[commit])
    show(headers, rows, args.keep)


def _cell(seconds: dict[tuple[str, str], list[float]], commit: str, first: str, name: str) -> str:
    text = f"{statistics.median(seconds[commit, name]):.1f} s"
    if commit == first:
        return text
    return f"{text}, {median_ratio(seconds[commit, name], seconds[first, name])}"


def _explain(name: str) -> list[str]:
    model, ranks = PLANS[name]
    return ["-m", "shardc", "explain", f"examples.models:{model}", "--world-size", str(ranks),
            "--mp", "bf16"]  # fmt: skip


def _installed(commit: str, folder: str) -> Path:
    """A commit's packages, in a folder of their own."""
    source, target = Path(folder, f"{commit}-source"), Path(folder, commit)
    source.mkdir()
    made = subprocess.run(["git", "archive", commit], cwd=ROOT, capture_output=True, check=True)
    subprocess.run(["tar", "-x"], cwd=source, input=made.stdout, check=True)
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", target]
    subprocess.run([*pip, source], check=True)
    return target


def _named(commit: str) -> str:
    form = ["git", "log", "-1", "--format=%h (%as)", commit]
    return subprocess.run(form, cwd=ROOT, capture_output=True, text=True, check=True).stdout.strip()


def _measured(
    installed: dict[str, Path], commands: dict[str, list[str]], pairs: int
) -> dict[tuple[str, str], list[float]]:
    """CPU seconds by commit and command, one for each pair; odd pairs go in reverse order."""
    runs = [(commit, name) for name in commands for commit in installed]
    seconds: dict[tuple[str, str], list[float]] = {run: [] for run in runs}
    with tqdm(total=len(runs) * pairs, unit="run", leave=False) as bar:
        for number in range(pairs):
            for commit, name in runs[:: -1 if number % 2 else 1]:
                bar.set_description(f"{commit}, {name}")
                before = cpu_seconds()
                _run(installed[commit], commands[name])
                seconds[commit, name].append(cpu_seconds() - before)
                bar.update()
    return seconds


def _run(path: Path, command: list[str]) -> str:
    """What a command says with a release's packages and today's models."""
    env = os.environ | {"PYTHONPATH": str(path), "OMP_NUM_THREADS": "1"}
    started = {"cwd": _with_models(path), "env": env, "capture_output": True, "text": True}
    done: Any = subprocess.run([sys.executable, *command], **started)
    if done.returncode and not done.stdout:  # a step that does not fit: its report, and status 1
        raise SystemExit(f"{' '.join(command)} failed:\n{done.stderr}")
    return str(done.stdout)


def _with_models(path: Path) -> Path:
    """A folder to run in that has examples/models.py and no other version of shardc."""
    folder = path.parent / "models"
    if not folder.exists():
        folder.mkdir()
        (folder / "examples").symlink_to(ROOT / "examples")
    return folder


def _counted(path: Path) -> list[int]:
    """`counts` of a release, in processes of their own: (ops, ops, kernels, kernels)."""
    found = [json.loads(_run(path, [__file__, "--count", layout])) for layout in LAYOUTS]
    return [each[at] for at in (0, 1) for each in found]


def counts(laid_out_for: str | None) -> tuple[int, int]:
    """Ops that AOT autograd traces for a further block, and Inductor's kernels for `_FEW` blocks.

    Args:
        laid_out_for: the profile of the device whose layout the model gets; None: this one's.
    """
    import torch.distributed as dist
    import torch.testing._internal.distributed.fake_pg  # noqa: F401 (makes "fake" known)
    from torch._inductor import metrics
    from torch._inductor.async_compile import AsyncCompile
    from torch._inductor.utils import fresh_cache
    from torch.fx.experimental import proxy_tensor

    dist.init_process_group("fake", rank=0, world_size=2)
    traced = []
    for blocks in (_FEW, _MORE):
        with mock.patch.object(proxy_tensor, "proxy_call", wraps=proxy_tensor.proxy_call) as call:
            _compile(blocks, laid_out_for, "eager")
        traced.append(call.call_count)
    metrics.reset()
    no_compiler = mock.patch.object(AsyncCompile, "cpp_pybinding", lambda *_: lambda *_: None)
    with fresh_cache(), no_compiler:  # counted when their code is written; they compute nothing
        _compile(_FEW, laid_out_for, "inductor")
    dist.destroy_process_group()
    return (traced[1] - traced[0]) // (_MORE - _FEW), metrics.generated_kernel_count


def _compile(blocks: int, laid_out_for: str | None, executor: str) -> None:
    """Run one forward and backward of a Llama model that was compiled for two ranks."""
    import peers
    import torch
    from torch.distributed.device_mesh import init_device_mesh

    torch._dynamo.reset()
    mesh, model = init_device_mesh("cpu", (2,)), llama(blocks, 256)
    settings = {"calibrated": False, "laid_out_for": laid_out_for, "executor": executor}
    tokens = torch.randint(512, (2, 16))
    peers.shardc(model, mesh, **settings)(tokens, labels=tokens).loss.backward()


if __name__ == "__main__":
    main()
