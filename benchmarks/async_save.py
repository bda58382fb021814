"""Steps while a checkpoint is saved in the background, beside steps without a save.

    python benchmarks/async_save.py

Each side trains the same model on gloo ranks, uncompiled, with AdamW. In a round it takes steps
without a save, then calls `dcp.async_save` of the model and the optimizer, and takes steps until
the save is done. "stage" is the call itself, which copies the state; "during" is the mean of the
steps while the save is under way. A side is alone while it is measured, in interleaved rounds; the
slowest rank counts.
"""

import argparse
import functools
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from kept import show
from peers import Model, Shape, fsdp2
from processes import add_round_options, interleave, median_ratio
from step_time import free_port, join
from torch.distributed.checkpoint.state_dict import get_state_dict

import shardc

SIDES = ("shardc", "FSDP2")
SHAPE = Shape(blocks=4, dim=512, batch=4, length=128)


def main() -> None:
    """Run the rounds and print one table."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--ranks", type=int, default=2, help="processes a side (default 2)")
    parser.add_argument("--dim", type=int, default=SHAPE.dim, help=f"width (default {SHAPE.dim})")
    parser.add_argument("--length", type=int, default=SHAPE.length,
                        help=f"tokens of a sequence (default {SHAPE.length})")  # fmt: skip
    add_round_options(parser)
    args = parser.parse_args()
    sides = {}
    for name in SIDES:
        arguments = (name, free_port(), vars(args))
        sides[name] = [functools.partial(prepare, rank, *arguments) for rank in range(args.ranks)]
    results = interleave(sides, args.rounds)
    rows = [[name, *_cells(results[name])] for name in SIDES]
    headers = ["", "step ms", "during / step", "stage ms", "save ms"]
    setting = (
        f"W={args.ranks}, {SHAPE.blocks} blocks of {args.dim}, {args.length} tokens; "
        f"medians of {args.rounds} rounds (min to max)"
    )
    show(headers, rows, args.keep, setting)


def _cells(rounds: list[list[dict[str, float]]]) -> list[str]:
    slowest = {key: [max(f[key] for f in ranks) for ranks in rounds] for key in rounds[0][0]}
    step, stage, save = (
        f"{1e3 * statistics.median(slowest[key]):.0f}" for key in ("step", "stage", "save")
    )
    return [step, median_ratio(slowest["during"], slowest["step"]), stage, save]


def prepare(
    rank: int, name: str, port: int, args: dict[str, Any]
) -> Callable[[], dict[str, float]]:
    """Build and warm one rank of a side in this process; what runs one round of it."""
    torch.set_num_threads(1)
    mesh = join(rank, args["ranks"], port)
    shape = replace(SHAPE, dim=args["dim"], length=args["length"])
    torch.manual_seed(0)
    model = Model(shape)
    if name == "shardc":
        shardc.fully_shard(model, mesh=mesh, units="auto")
    else:
        fsdp2(model, mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    tokens = torch.randint(0, shape.vocab, (shape.batch, shape.length))
    saving = dist.new_group(backend="gloo")

    def step() -> float:
        start = time.perf_counter()
        model(tokens).backward()
        optimizer.step()
        optimizer.zero_grad()
        return time.perf_counter() - start

    step()

    def run() -> dict[str, float]:
        dist.barrier()
        alone = [step() for _ in range(args["steps"])]
        with tempfile.TemporaryDirectory() as folder:
            path = [folder]
            dist.broadcast_object_list(path)
            start = time.perf_counter()
            values, state = get_state_dict(model, optimizer)
            saved = {"model": values, "optimizer": state}
            pending = dcp.async_save(saved, checkpoint_id=path[0], process_group=saving)
            stage = time.perf_counter() - start
            during = []
            while not _everywhere(pending.done()):
                during.append(step())
            pending.result()
            save = time.perf_counter() - start
            dist.barrier()
        return {
            "step": statistics.mean(alone), "during": statistics.mean(during or alone),
            "stage": stage, "save": save,
        }  # fmt: skip

    return run


def _everywhere(done: bool) -> bool:
    agreed = torch.tensor(int(done))
    dist.all_reduce(agreed, op=dist.ReduceOp.MIN)
    return bool(agreed)


if __name__ == "__main__":
    main()
