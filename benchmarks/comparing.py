"""What it costs that ranks compare every collective as they enter it.

    python benchmarks/comparing.py --ranks 2

Each rank writes what it enters to memory that the ranks of its host share, and reads what they
wrote (`runtime/watch/history.py`). The same processes train with and without that, in turn; the
slowest rank counts. Many small layers make steps short and collectives many, so this is about the
most that comparing can cost.
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
from step_time import _free_port, _join
from torch import nn

WAYS = ("uncompiled", "compiled")


def main() -> None:
    """Run the rounds and print one table."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--ranks", type=int, default=2, help="processes (default 2)")
    add_round_options(parser)
    args = parser.parse_args()
    sides = {}
    for way in WAYS:
        port = _free_port()
        sides[way] = [
            functools.partial(prepare, rank, way, port, vars(args)) for rank in range(args.ranks)
        ]
    rows = []
    for way, rounds in interleave(sides, args.rounds).items():
        compared, alone = (
            [max(seconds[side] for seconds in ranks) for ranks in rounds] for side in (0, 1)
        )
        times = (f"{1e3 * statistics.median(seconds):.2f}" for seconds in (compared, alone))
        rows.append([way, *times, median_ratio(compared, alone)])
    show(["", "compared, ms a step", "not compared", "ratio"], rows, args.keep)


def prepare(rank: int, way: str, port: int, args: dict[str, Any]) -> Callable[[], Any]:
    """Build and warm one rank; what runs one round: seconds a step with and without comparing."""
    from shardc import fully_shard
    from shardc.runtime.watch.history import History

    torch.set_num_threads(1)
    mesh = _join(rank, args["ranks"], port)
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(256, 256) for _ in range(8)))
    for layer in model:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    if way == "compiled":
        model.compile(backend="shardc", fullgraph=True, options={"executor": "eager"})
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    x = torch.randn(32, 256)
    enter = History.enter

    def step() -> None:
        model(x).square().mean().backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()

    def seconds(compared: bool) -> float:
        dist.barrier()  # all ranks change over together
        History.enter = enter if compared else _enter_nothing  # type: ignore[method-assign]
        dist.barrier()
        start = time.perf_counter()
        for _ in range(args["steps"]):
            step()
        return (time.perf_counter() - start) / args["steps"]

    def run() -> tuple[float, float]:
        a, b, c, d = (seconds(compared) for compared in (True, False, False, True))
        return (a + d) / 2, (b + c) / 2

    for _ in range(3):
        run()
    return run


def _enter_nothing(history: Any, digest: int, text: str) -> None:
    pass


if __name__ == "__main__":
    main()
