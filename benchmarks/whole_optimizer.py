"""A step of Muon on sharded matrices: each updated on one rank, or all of them on every rank.

    python benchmarks/whole_optimizer.py --ranks 4

"owners" is `shardc.WholeTensorOptimizer(torch.optim.Muon, ...)`. "gathered" gathers every gradient
and every matrix on every rank, which updates all of them with torch's Muon and keeps its part.
Both sides have the same matrices and gradients on gloo ranks, and must come to the same values; the
slowest rank counts. A side is alone while it is measured, in interleaved rounds. CPU seconds of a
rank say the same on a busy machine.
"""

import argparse
import functools
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from kept import show
from processes import add_round_options, interleave, median_ratio
from step_time import free_port, join
from torch import Tensor, nn

import shardc

SIDES = ("owners", "gathered")


def main() -> None:
    """Run the rounds and print one table."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--ranks", type=int, default=4, help="processes a side (default 4)")
    parser.add_argument("--blocks", type=int, default=8, help="blocks (default 8)")
    parser.add_argument("--dim", type=int, default=256, help="width of a block (default 256)")
    add_round_options(parser)
    args = parser.parse_args()
    sides = {}
    for name in SIDES:
        arguments = (name, free_port(), vars(args))
        sides[name] = [functools.partial(prepare, rank, *arguments) for rank in range(args.ranks)]
    results = interleave(sides, args.rounds)
    checks = {round_[0]["check"] for rounds in results.values() for round_ in rounds[:1]}
    assert len(checks) == 1, f"the sides computed different values: {checks}"
    rows = [[name, *_cells(results[name], results["gathered"])] for name in SIDES]
    headers = ["", "step ms", "step / gathered", "CPU ms", "CPU / gathered"]
    setting = (
        f"W={args.ranks}, {args.blocks} blocks of {args.dim}; "
        f"medians of {args.rounds} rounds (min to max)"
    )
    show(headers, rows, args.keep, setting)


def _cells(rounds: list[list[dict[str, Any]]], base: list[list[dict[str, Any]]]) -> list[str]:
    cells = []
    for key in ("step", "cpu"):
        mine, other = ([max(f[key] for f in ranks) for ranks in side] for side in (rounds, base))
        cells += [f"{1e3 * statistics.median(mine):.0f}", median_ratio(mine, other)]
    return cells


def prepare(rank: int, name: str, port: int, args: dict[str, Any]) -> Callable[[], dict[str, Any]]:
    """Build and warm one rank of a side in this process; what runs one round of it."""
    torch.set_num_threads(1)
    mesh = join(rank, args["ranks"], port)
    torch.manual_seed(0)
    dim = args["dim"]
    model = nn.Sequential(
        *(
            nn.Linear(a, b, bias=False)
            for _ in range(args["blocks"])
            for a, b in ((dim, 3 * dim), (dim, dim), (dim, 4 * dim), (4 * dim, dim))
        )
    )
    shardc.fully_shard(model, mesh=mesh)
    params = list(model.parameters())
    for number, param in enumerate(params):
        draw = torch.Generator().manual_seed(number)
        param.grad = torch.empty_like(param.detach()).copy_(
            torch.randn(param.shape, generator=draw)
        )
    if name == "owners":
        step: Callable[[], Any] = shardc.WholeTensorOptimizer(torch.optim.Muon, params).step
    else:
        step = gathered_step(params)
    step()
    first = sum(float(param.full_tensor().abs().sum()) for param in params)

    def run() -> dict[str, Any]:
        dist.barrier()
        start, cpu = time.perf_counter(), time.process_time()
        for _ in range(args["steps"]):
            step()
        step_seconds = (time.perf_counter() - start) / args["steps"]
        cpu_seconds = (time.process_time() - cpu) / args["steps"]
        return {"step": step_seconds, "cpu": cpu_seconds, "check": round(first, 1)}

    return run


def gathered_step(params: list[Tensor]) -> Callable[[], None]:
    """Muon on whole tensors of which every rank has all."""
    wholes = [nn.Parameter(param.full_tensor()) for param in params]
    optimizer = torch.optim.Muon(wholes)

    def step() -> None:
        for param, whole in zip(params, wholes, strict=True):
            whole.data, whole.grad = param.full_tensor(), param.grad.full_tensor()
        optimizer.step()
        with torch.no_grad():
            for param, whole in zip(params, wholes, strict=True):
                param.copy_(whole)
                whole.grad = None

    return step


if __name__ == "__main__":
    main()
