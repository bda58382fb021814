"""`examples/pretrain.py`: each layout against the plain model, and resuming."""

import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from models import full
from ranks import on_ranks

from shardc import ShardTensor, materialize

EXAMPLES = Path(__file__).parents[1] / "examples"
sys.path.insert(0, str(EXAMPLES))
import pretrain  # noqa: E402
import train_lm  # noqa: E402
from transformer import CONFIGS, Transformer, balance, initialise  # noqa: E402

CPU = torch.device("cpu")
SMALL = ("--length", "32", "--global-batch", "4")
LLAMA = ("--model", "llama", "--replicate", "2", "--tp", "2")
EXPERTS = ("--model", "moe", "--replicate", "2", "--ep", "2")
PARTS_OF_EXPERTS = ("--model", "moe", "--tp", "2", "--ep", "2", "--checkpoint-blocks")


FEWER_BLOCKS = {
    ("llama", "debug"): replace(CONFIGS["llama", "debug"], layers=1),
    ("moe", "debug"): replace(CONFIGS["moe", "debug"], layers=2),  # the first has no experts
}


def made(*arguments):
    """The model of a command, its grid and its arguments."""
    args = pretrain.parse_arguments([*SMALL, *arguments])
    grid = pretrain.Grid.of(args, CPU)
    return pretrain.build(args, grid), grid, args


def unsharded(args):
    """The model that one process trains."""
    with torch.device("meta"):
        plain = Transformer(CONFIGS[args.model, args.size])
    torch.manual_seed(args.seed)
    return materialize(plain, device=CPU, init_fn=initialise)


@pytest.mark.parametrize(
    ("layout", "backend"),
    [
        (LLAMA, "inductor"),
        (EXPERTS, "none"),
        (PARTS_OF_EXPERTS, "none"),
        (PARTS_OF_EXPERTS, "eager"),
    ],
)
@on_ranks(4)
def test_a_layout_trains_as_one_process_does(mesh, layout, backend):
    with mock.patch.dict(CONFIGS, FEWER_BLOCKS):
        model, grid, args = made(*layout, "--backend", backend)
        plain, run = unsharded(args), pretrain.compiled(model, args)
    assert all(isinstance(p, ShardTensor) for p in model.parameters())
    held = sum(p.to_local().numel() for p in model.parameters())
    assert held < sum(p.numel() for p in plain.parameters())
    for ours, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(full(ours), theirs.detach(), rtol=0, atol=0)
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1, momentum=0.9) for m in (model, plain)]
    text = train_lm.read_standard_library()["training"]
    alone = SimpleNamespace(batches=1, batch=0)
    for step in (1, 2):
        want, all_chosen = plain(*pretrain.batch(text, step, args, alone, CPU))
        want.backward()
        got, chosen = run(*pretrain.batch(text, step, args, grid, CPU))
        got.backward()
        assert abs(train_lm.mean_over_ranks(got) - want.item()) < 1e-5
        for (name, ours), theirs in zip(model.named_parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(
                full(ours.grad), theirs.grad, msg=lambda m, n=name: f"{n}: {m}"
            )
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        dist.all_reduce(chosen)
        assert torch.equal(chosen, all_chosen * args.tp)
        balance(model, chosen, 0.1)
        balance(plain, all_chosen, 0.1)


def trained(*arguments):
    """The parameters of a run of `pretrain.train`."""
    model, grid, args = made(*arguments)
    pretrain.train(model, args, grid, CPU)
    return {name: full(p) for name, p in model.named_parameters()}


@on_ranks(4)
def test_a_run_is_resumed_also_on_another_grid(mesh, tmp_path):
    begin = ("--model", "moe", "--backend", "none", "--save-every", "2", "--checkpoint-dir")
    through = trained(*begin, f"{tmp_path}/through", "--ep", "2", "--steps", "4")
    two = trained(*begin, f"{tmp_path}/two", "--ep", "2", "--steps", "2")
    assert not torch.equal(two["head.weight"], through["head.weight"])
    if dist.get_rank() == 0:
        shutil.copytree(tmp_path / "two", tmp_path / "other")
    dist.barrier()
    resumed = trained(*begin, f"{tmp_path}/two", "--ep", "2", "--steps", "4", "--resume")
    other = trained(*begin, f"{tmp_path}/other", "--tp", "2", "--steps", "4", "--resume")
    for name, value in through.items():
        assert torch.equal(resumed[name], value), name
        torch.testing.assert_close(other[name], value, msg=lambda m, n=name: f"{n}: {m}")


def test_the_command(tmp_path):
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2"]
    options = ["--model", "moe", "--ep", "2", "--steps", "2", "--profile", "h100-nvlink"]
    command = [*torchrun, str(EXAMPLES / "pretrain.py"), *SMALL, *options, "--backend", "none"]
    ran = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=600)
    assert ran.returncode == 0, ran.stderr
    *_, head, first, last = ran.stdout.splitlines()
    assert head.split() == list(pretrain.COLUMNS)
    assert [first.split()[0], last.split()[0]] == ["1", "2"]
    assert float(last.split()[1]) < float(first.split()[1])
    assert last.split()[5].endswith("%")
    assert (tmp_path / "runs/pretrain/step-2/.metadata").exists()


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--size", "16b"), "there is no llama of size 16b"),
        (("--ep", "2"), "--ep needs experts: --model moe"),
    ],
)
def test_wrong_arguments(arguments, said, capsys):
    with pytest.raises(SystemExit):
        pretrain.parse_arguments(arguments)
    assert said in capsys.readouterr().err
