"""Pretrain a language model from nothing: copies, shards, tensor and expert parallelism, compiled.

    torchrun --nproc-per-node 4 examples/pretrain.py --tp 2
    torchrun --nproc-per-node 4 examples/pretrain.py --model moe --ep 2 --checkpoint-blocks
    torchrun --nproc-per-node 4 examples/pretrain.py --model moe --ep 2 --resume

The ranks form a grid (replicate, shard, expert, tensor); --replicate, --ep and --tp give three of
its sizes. Experts are sharded over (shard), with --replicate copied as well; all else is sharded
over (shard, expert) together. The model begins on the meta device, checkpoints are written while
training goes on, and may be resumed on another grid. Text and schedule are those of `train_lm.py`.

A layout changes no number but by rounding: the same --global-batch gives the same losses.
"""

import argparse
import functools
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import train_lm
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.optim import AdamW
from train_lm import say
from transformer import (
    CONFIGS,
    Block,
    Experts,
    MixtureOfExperts,
    Transformer,
    balance,
    flops_per_token,
    initialise,
)

from shardc import (
    MixedPrecisionPolicy,
    describe,
    fully_shard,
    get_profile,
    get_state_dict,
    materialize,
    set_state_dict,
)

BALANCE_RATE = 1e-3  # of the experts' bias, as for DeepSeek-V3
COLUMNS = ("step", "loss", "norm", "rate", "tokens/s", "MFU", "memory")


def parse_arguments(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """From the command line, if none are given."""
    parser = argparse.ArgumentParser(
        description="Pretrain a language model, compiled and sharded.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    add = parser.add_argument
    add("--model", choices=("llama", "moe"), default="llama", help="like Llama 3 or DeepSeek-V3")
    add("--size", default="debug", help="debug; 8b (of llama); 16b (of moe)")
    add("--replicate", type=int, default=1, help="copies of the sharded model (HSDP)")
    add("--tp", type=int, default=1, help="ranks that share each matmul")
    add("--ep", type=int, default=1, help="ranks that share the experts")
    add("--backend", choices=("inductor", "eager", "none"), default="inductor",
        help="what runs the graphs; none: not compiled")  # fmt: skip
    add("--checkpoint-blocks", action="store_true", help="recompute blocks in the backward")
    add("--bf16", action="store_true", help="compute in bfloat16, reduce in float32")
    add("--steps", type=int, default=100, help="optimizer steps in all, resumed ones included")
    add("--global-batch", type=int, default=16, help="sequences per step, over all ranks")
    add("--length", type=int, default=256, help="bytes per sequence")
    add("--lr", type=float, default=1e-3, help="peak learning rate, reached after the warm-up")
    add("--seed", type=int, default=0, help="seed of the initial weights and of the data order")
    add("--log-every", type=int, default=10, help="steps between rows of the table")
    add("--save-every", type=int, default=50, help="steps between checkpoints")
    add("--checkpoint-dir", type=Path, default=Path("runs/pretrain"), help="where they go")
    add("--resume", action="store_true", help="continue from the newest checkpoint, if any")
    add("--profile", help="hardware that MFU is a share of, h100-nvlink for instance")
    args = parser.parse_args(arguments)
    if (args.model, args.size) not in CONFIGS:
        parser.error(f"there is no {args.model} of size {args.size}")
    if args.model == "llama" and args.ep > 1:
        parser.error("--ep needs experts: --model moe")
    return args


# -------------------------------------------------------------------------------------- the grid


@dataclass(frozen=True)
class Grid:
    """Where things lie. Both meshes hold all ranks in the same order."""

    dense: DeviceMesh  # (replicate, data, tensor): all but the experts
    sparse: DeviceMesh  # (replicate, shard, expert, tensor): the experts

    @staticmethod
    def of(args: argparse.Namespace, device: torch.device) -> "Grid":
        world, taken = dist.get_world_size(), args.replicate * args.ep * args.tp
        if world % taken:
            raise SystemExit(f"world size {world} is no multiple of replicate * ep * tp = {taken}")
        shard = world // taken
        return Grid(
            init_device_mesh(
                device.type,
                (args.replicate, shard * args.ep, args.tp),
                mesh_dim_names=("replicate", "data", "tensor"),
            ),
            init_device_mesh(
                device.type,
                (args.replicate, shard, args.ep, args.tp),
                mesh_dim_names=("replicate", "shard", "expert", "tensor"),
            ),
        )

    @property
    def batches(self) -> int:
        """Into how many parts a global batch is cut."""
        return self.dense.size() // self.dense["tensor"].size()

    @property
    def batch(self) -> int:
        """Which of them this rank has."""
        place = self.dense.get_local_rank("replicate")
        return place * self.dense["data"].size() + self.dense.get_local_rank("data")


def build(args: argparse.Namespace, grid: Grid) -> Transformer:
    """The model on its grid, with values. Blocks and experts are units of their own."""
    config = CONFIGS[args.model, args.size]
    with torch.device("meta"):
        model = Transformer(config, recompute=args.checkpoint_blocks)
    if args.tp > 1:
        split(model, grid.dense["tensor"])
    bf16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    precision = bf16 if args.bf16 else MixedPrecisionPolicy()
    shard = functools.partial(fully_shard, mp_policy=precision)
    copies = ("replicate",) if args.replicate > 1 else ()
    for layer in model.layers:
        if isinstance(layer.mlp, MixtureOfExperts):
            experts = layer.mlp.experts
            if args.ep * args.tp > 1:
                distribute(experts, grid.sparse["expert", "tensor"])
            sharded = shard(experts, mesh=grid.sparse[(*copies, "shard")])
            sharded.set_gradient_divide_factor(grid.batches)  # rows come from all of them
        shard(layer, mesh=grid.dense[(*copies, "data")])
    shard(model, mesh=grid.dense[(*copies, "data")])
    torch.manual_seed(args.seed)  # every rank starts from the same weights
    materialize(model, init_fn=initialise)
    return model


def split(model: Transformer, mesh: DeviceMesh) -> None:
    """All linears but the routers, and the embedding, over the ranks of `mesh`."""
    columns, rows = ColwiseParallel(), RowwiseParallel()
    ends = {
        "embedding": RowwiseParallel(input_layouts=Replicate()),
        "head": ColwiseParallel(output_layouts=Replicate()),
    }
    parallelize_module(model, mesh, ends)
    attention = {"query": columns, "key": columns, "value": columns, "out": rows}
    for layer in model.layers:
        assert isinstance(layer, Block)
        parallelize_module(layer.attention, mesh, attention)
        mlp = layer.mlp.shared if isinstance(layer.mlp, MixtureOfExperts) else layer.mlp
        parallelize_module(mlp, mesh, {"gate": columns, "up": columns, "down": rows})


def distribute(experts: Experts, mesh: DeviceMesh) -> None:
    """Experts over the first dim of `mesh`, the hidden units of each over the second."""
    experts.mesh = mesh
    for name, hidden_dim in (("gate", 2), ("up", 2), ("down", 1)):
        whole = getattr(experts, name)
        cut = distribute_tensor(whole, mesh, [Shard(0), Shard(hidden_dim)])
        setattr(experts, name, nn.Parameter(cut))


def compiled(model: Transformer, args: argparse.Namespace) -> Callable[..., tuple[Tensor, Tensor]]:
    if args.backend == "none":
        return model
    return torch.compile(model, backend="shardc", options={"executor": args.backend})


# ----------------------------------------------------------------------------------- checkpoints


class Checkpoints:
    """Sharded checkpoints, each written while training goes on."""

    def __init__(self, model: Transformer, opt: AdamW, folder: Path) -> None:
        self.model, self.opt, self.folder = model, opt, folder
        self.group = dist.new_group(backend="gloo")  # the writing thread's own
        self.pending: Future[Any] | None = None

    def save(self, step: int) -> None:
        """Begin to write; the values are copied before this returns."""
        self.wait()
        path = self.folder / f"step-{step}"
        saved = dcp.async_save(self.state(), checkpoint_id=path, process_group=self.group)
        assert isinstance(saved, Future)
        self.pending = saved

    def wait(self) -> None:
        """Until the last checkpoint is complete."""
        if self.pending is not None:
            self.pending.result()
            self.pending = None

    def close(self) -> None:
        self.wait()
        dist.destroy_process_group(self.group)

    def load(self, resume: bool) -> int:
        """The newest complete checkpoint, in place. Returns the steps already done."""
        complete = self.folder.glob("step-*/.metadata")  # which is written last
        steps = sorted(int(path.parent.name.removeprefix("step-")) for path in complete)
        if not steps:
            return 0
        if not resume:
            raise SystemExit(f"{self.folder} holds checkpoints: add --resume, or remove them")
        state = self.state()
        dcp.load(state, checkpoint_id=self.folder / f"step-{steps[-1]}")
        set_state_dict(
            self.model,
            self.opt,
            model_state_dict=state["model"],
            optim_state_dict=state["optim"],
        )
        return steps[-1]

    def state(self) -> dict[str, Any]:
        model, optim = get_state_dict(self.model, self.opt)
        return {"model": model, "optim": optim}


# -------------------------------------------------------------------------------------- training


class Table:
    """A row every few steps, on rank 0."""

    def __init__(self, args: argparse.Namespace, device: torch.device, flops: float) -> None:
        self.device, self.flops = device, flops  # of one token
        dtype = "bfloat16" if args.bf16 else "float32"
        profile = get_profile(args.profile) if args.profile else None
        self.peak = profile.rate(dtype) * dist.get_world_size() if profile else None
        self.mark, self.tokens = time.perf_counter(), 0
        say(" ".join(f"{name:>10}" for name in COLUMNS))

    def row(self, step: int, loss: float, norm: float, rate: float) -> None:
        speed = self.tokens / (time.perf_counter() - self.mark)
        share = f"{speed * self.flops / self.peak:.1%}" if self.peak else "-"
        figures = (step, f"{loss:.7f}", f"{norm:.4f}", f"{rate:.2e}", f"{speed:,.0f}", share)
        say(" ".join(f"{figure:>10}" for figure in (*figures, self.memory())))
        self.mark, self.tokens = time.perf_counter(), 0

    def memory(self) -> str:
        """The most that tensors took of the device since the last row."""
        if self.device.type != "cuda":
            return "-"
        most = torch.cuda.max_memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        return f"{most / 1e9:.2f} GB"


def batch(
    text: NDArray[np.uint8], step: int, args: argparse.Namespace, grid: Grid, device: torch.device
) -> tuple[Tensor, Tensor]:
    """Tokens and targets of this rank, each (B, T): the same global batch on every grid."""
    generator, share = np.random.default_rng((args.seed, step)), args.global_batch // grid.batches
    starts = generator.integers(len(text) - args.length, size=args.global_batch)
    own = starts[grid.batch * share : (grid.batch + 1) * share]
    return train_lm.windows(text, own, args.length, device)


def train(model: Transformer, args: argparse.Namespace, grid: Grid, device: torch.device) -> None:
    if args.global_batch % grid.batches:
        raise SystemExit(f"--global-batch {args.global_batch} is no multiple of {grid.batches}")
    text = train_lm.read_standard_library()["training"]
    run = compiled(model, args)
    opt = AdamW(model.parameters(), lr=args.lr, betas=(0.9, 0.95), weight_decay=0.1, fused=True)
    checkpoints = Checkpoints(model, opt, args.checkpoint_dir)
    start = checkpoints.load(args.resume)
    if start:
        say(f"continuing after step {start}")
    table = Table(args, device, flops_per_token(model, args.length))
    for step in range(start + 1, args.steps + 1):
        rate = train_lm.learning_rate(step, args)
        for group in opt.param_groups:
            group["lr"] = rate
        loss, chosen = run(*batch(text, step, args, grid, device))
        loss.backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        opt.step()
        opt.zero_grad()
        if chosen.numel():
            dist.all_reduce(chosen)
            balance(model, chosen, BALANCE_RATE)
        table.tokens += args.global_batch * args.length
        if step % args.log_every == 0 or step in (start + 1, args.steps):
            table.row(step, train_lm.mean_over_ranks(loss), float(norm), rate)
        if step % args.save_every == 0 or step == args.steps:
            checkpoints.save(step)
    checkpoints.close()


def main() -> int:
    args = parse_arguments()
    device = train_lm.start_process_group()
    grid = Grid.of(args, device)
    model = build(args, grid)
    say(describe(model))
    train(model, args, grid, device)
    dist.destroy_process_group()
    return 0


if __name__ == "__main__":
    sys.exit(main())
