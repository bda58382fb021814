"""Train copies of a sharded model that may die and come back, with torchft.

    torchft_lighthouse --bind 127.0.0.1:29510 --min_replicas 1 &
    export TORCHFT_LIGHTHOUSE=http://127.0.0.1:29510
    COPY=0 torchrun --nproc-per-node 2 --master-port 29500 examples/fault_tolerant.py &
    COPY=1 torchrun --nproc-per-node 2 --master-port 29501 examples/fault_tolerant.py

Each copy is a job of its own: its ranks share the parameters, and shardc reduces gradients over
them. What they reduced goes through torchft's manager, which averages it over the copies that are
there. A copy that dies is left out from the next step on; one that comes (back) gets the others'
parameters and optimizer state before its first step. See https://github.com/meta-pytorch/torchft.
"""

import argparse
import os
import sys
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import AdamW
from torchft import Manager, ProcessGroupGloo
from torchft.optim import OptimizerWrapper

from shardc import StateDictOptions, fully_shard, get_model_state_dict

WIDTH = 16


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description="Train copies of a sharded model that may die and come back.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    add = parser.add_argument
    add("--steps", type=int, default=100, help="steps that all copies take together")
    add("--backend", choices=("inductor", "eager", "none"), default="inductor",
        help="what runs the graphs; none: not compiled")  # fmt: skip
    add("--pause", type=float, default=0.0, help="seconds between steps, to watch it")
    add("--save", type=Path, help="where rank 0 writes the trained model")
    return parser.parse_args()


def build() -> nn.Sequential:
    torch.manual_seed(0)
    blocks = (nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(3))
    return nn.Sequential(*blocks)


def batch(step: int, part: int) -> Tensor:
    """Rows of a step, a pure function of (step, part of the global batch)."""
    return torch.randn(8, WIDTH, generator=torch.Generator().manual_seed(1000 * step + part))


def loss_of(outputs: Tensor) -> Tensor:
    return (outputs - 1).square().mean()


def main() -> int:
    args = parse_arguments()
    dist.init_process_group("gloo")  # the ranks of this copy
    rank, world, copy = dist.get_rank(), dist.get_world_size(), os.environ["COPY"]
    model = fully_shard(build(), units="auto")
    opt = AdamW(model.parameters(), lr=1e-2)

    def state() -> dict[str, Any]:
        return {"model": model.state_dict(), "optim": opt.state_dict()}

    def load(state: dict[str, Any]) -> None:
        model.load_state_dict(state["model"])
        opt.load_state_dict(state["optim"])

    manager = Manager(
        pg=ProcessGroupGloo(timeout=timedelta(seconds=20)),
        state_dict=state,
        load_state_dict=load,
        min_replica_size=1,
        use_async_quorum=False,  # a copy that comes back takes part in its first step
        replica_id=f"copy_{copy}_",
    )

    def average(gradient: Tensor) -> None:
        """Over the copies, in place: this rank's part of one reduced gradient."""
        manager.allreduce(gradient).wait()

    model.set_all_reduce_hook(average, recurse=True)
    run = model
    if args.backend != "none":
        run = torch.compile(model, backend="shardc", options={"executor": args.backend})
    safe = OptimizerWrapper(manager, opt)
    while (step := manager.current_step()) < args.steps:
        safe.zero_grad()  # agrees on who is there
        step, place = manager.current_step(), manager.participating_rank()
        assert place is not None
        loss = loss_of(run(batch(step, place * world + rank)))
        loss.backward()
        safe.step()  # only if all copies came through the backward
        if rank == 0:
            done = "done" if manager.current_step() > step else "again"
            there = manager.num_participants()
            print(f"copy {copy} step {step} {done} of {there} loss {loss.item():.5f}", flush=True)
        time.sleep(args.pause)
    if args.save:
        options = StateDictOptions(full_state_dict=True, cpu_offload=True)
        full = get_model_state_dict(model, options=options)
        if rank == 0:
            torch.save(full, args.save)
    manager.shutdown()
    dist.destroy_process_group()
    return 0


if __name__ == "__main__":
    sys.exit(main())
