"""Train a byte-level Llama-style language model, sharded over every rank.

    torchrun --nproc-per-node 2 examples/train_lm.py
    torchrun --nproc-per-node 2 examples/train_lm.py --resume      # after a stop, planned or not

The text is the source of Python's own standard library, so nothing is downloaded; a tenth of its
files is held out. Uses NCCL where every rank has a GPU of its own, gloo on CPU where not.

A resumed run continues exactly: batches and learning rate are pure functions of (seed, step, rank)
and a checkpoint holds everything else, so it prints the losses an uninterrupted run prints, to the
last bit (on GPUs: given `torch.use_deterministic_algorithms(True)` too). Left out, to stay short:
gradient accumulation, mixed precision, and a data loader that reads ahead.
"""

import argparse
import json
import math
import os
import shutil
import statistics
import sys
import sysconfig
import time
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.optim import AdamW, Optimizer
from tqdm import tqdm

from shardc import compile_step, describe, fully_shard

# What a resumed run must share with the one it continues, besides the number of ranks.
FIXED = ("seed", "steps", "batch_size", "length", "dim", "layers", "lr")
HEAD_DIM = 32
WARMUP_STEPS = 20
HELD_OUT_BATCHES = 8  # per rank


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description="Train a byte-level language model, sharded over every rank.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    add = parser.add_argument
    add("--steps", type=int, default=360, help="optimizer steps in all, resumed ones included")
    add("--batch-size", type=int, default=4, help="sequences per rank and step")
    add("--length", type=int, default=256, help="bytes per sequence")
    add("--dim", type=int, default=192, help=f"width of the model, a multiple of {HEAD_DIM}")
    add("--layers", type=int, default=4, help="number of blocks")
    add("--lr", type=float, default=3e-3, help="peak learning rate, reached after the warm-up")
    add("--seed", type=int, default=0, help="seed of the initial weights and of the data order")
    add("--executor", choices=("inductor", "eager"), default="inductor", help="what runs a graph")
    add("--whole-step", action="store_true", help="run a step with its update as one graph")
    add("--log-every", type=int, default=20, help="steps between printed losses")
    add("--save-every", type=int, default=120, help="between checkpoints, and held-out losses")
    add("--checkpoint-dir", type=Path, default=Path("runs/train_lm"), help="keeps the last two")
    add("--resume", action="store_true", help="continue from the newest checkpoint, if any")
    add("--expect-loss-below", type=float, help="exit with 1 unless the held-out loss ends below")
    return parser.parse_args()


# ---------------------------------------------------------------------------------------- model


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary embedding (https://arxiv.org/abs/2104.09864) of x: (B, heads, T, HEAD_DIM)."""
    a, b = x.chunk(2, dim=-1)
    return torch.cat((a * cos - b * sin, a * sin + b * cos), dim=-1)


class Block(nn.Module):
    """Pre-norm attention with rotary embeddings, then a gated MLP (SwiGLU)."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        hidden = 64 * math.ceil(dim * 8 / 3 / 64)
        self.attention_norm = nn.RMSNorm(dim, eps=1e-6)
        self.qkv = nn.Linear(dim, 3 * dim, bias=False)
        self.out = nn.Linear(dim, dim, bias=False)
        self.mlp_norm = nn.RMSNorm(dim, eps=1e-6)
        self.gate = nn.Linear(dim, hidden, bias=False)
        self.up = nn.Linear(dim, hidden, bias=False)
        self.down = nn.Linear(hidden, dim, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """x: (B, T, D); cos, sin: (T, HEAD_DIM / 2). Returns (B, T, D)."""
        qkv = self.qkv(self.attention_norm(x)).unflatten(-1, (3, -1, HEAD_DIM))
        q, k, v = qkv.permute(2, 0, 3, 1, 4).unbind()  # each (B, heads, T, HEAD_DIM)
        q, k = rotate(q, cos, sin), rotate(k, cos, sin)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(y.transpose(1, 2).flatten(2))
        y = self.mlp_norm(x)
        return x + self.down(F.silu(self.gate(y)) * self.up(y))


class LanguageModel(nn.Module):
    """Embedding of the 256 byte values, blocks, norm, head and loss."""

    cos: Tensor
    sin: Tensor

    def __init__(self, dim: int, layers: int, length: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(256, dim)
        self.layers = nn.ModuleList(Block(dim) for _ in range(layers))
        self.norm = nn.RMSNorm(dim, eps=1e-6)
        self.head = nn.Linear(dim, 256, bias=False)
        frequencies = 10_000.0 ** -torch.linspace(0, 1, HEAD_DIM // 2)
        angles = torch.arange(length)[:, None] * frequencies
        self.register_buffer("cos", angles.cos(), persistent=False)
        self.register_buffer("sin", angles.sin(), persistent=False)
        for name, weight in self.named_parameters():
            if weight.dim() == 2:
                ends_residual = name.endswith(("out.weight", "down.weight"))
                nn.init.normal_(weight, std=0.02 / math.sqrt(2 * layers if ends_residual else 1))

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        """tokens, targets: (B, T) int64. Returns the mean cross-entropy in nats, 0-dim."""
        x = self.embedding(tokens)
        for layer in self.layers:
            x = layer(x, self.cos, self.sin)
        return F.cross_entropy(self.head(self.norm(x)).flatten(0, 1), targets.flatten())


# ----------------------------------------------------------------------------------------- data


def read_standard_library() -> dict[str, NDArray[np.uint8]]:
    """The bytes of the standard library's .py files, split by file: "training" and "held-out"."""
    root = Path(sysconfig.get_paths()["stdlib"])
    skipped = {"site-packages", "dist-packages", "test", "tests", "idle_test"}
    files: dict[str, list[bytes]] = {"training": [], "held-out": []}
    for path in sorted(root.rglob("*.py")):
        name = path.relative_to(root)
        if skipped.isdisjoint(name.parts):
            held_out = zlib.crc32(name.as_posix().encode()) % 10 == 0  # the same on every machine
            files["held-out" if held_out else "training"].append(path.read_bytes())
    return {split: np.frombuffer(b"".join(parts), np.uint8) for split, parts in files.items()}


def batch(
    text: NDArray[np.uint8], number: int, args: argparse.Namespace, device: torch.device
) -> tuple[Tensor, Tensor]:
    """Tokens and targets, each (B, T) int64: a pure function of (text, seed, number, rank)."""
    generator = np.random.default_rng((args.seed, number, dist.get_rank()))
    starts = generator.integers(len(text) - args.length, size=args.batch_size)
    return windows(text, starts, args.length, device)


def windows(
    text: NDArray[np.uint8], starts: NDArray[np.int64], length: int, device: torch.device
) -> tuple[Tensor, Tensor]:
    """The bytes from each of `starts` on, and those that come next, each (B, T) int64."""
    each = np.stack([text[start : start + length + 1] for start in starts])
    tokens = torch.from_numpy(each).to(device, torch.int64)
    return tokens[:, :-1], tokens[:, 1:]


# ---------------------------------------------------------------------------------- checkpoints


def training_state(model: nn.Module, opt: Optimizer, args: argparse.Namespace) -> dict[str, Any]:
    """What a checkpoint holds; optimizer state by parameter name.

    AdamW makes its state in its first step: the same zeros, made here, give a load its targets.
    """
    for p in model.parameters():
        if not opt.state[p]:
            zeros = {key: torch.zeros_like(p) for key in ("exp_avg", "exp_avg_sq")}
            opt.state[p] = {"step": torch.zeros((), device=p.device), **zeros}
    moments = {name: opt.state[p] for name, p in model.named_parameters()}
    settings = json.dumps({name: getattr(args, name) for name in FIXED})
    return {"model": model.state_dict(), "optim": moments, "settings": settings}


def saved_steps(folder: Path) -> list[int]:
    return sorted(int(path.name.removeprefix("step-")) for path in folder.glob("step-*"))


def save(folder: Path, step: int, state: dict[str, Any]) -> None:
    """Save under another name, then rename: a kill in between leaves the previous checkpoint."""
    dcp.save(state, checkpoint_id=folder / "partial")
    if dist.get_rank() == 0:
        (folder / "partial").rename(folder / f"step-{step}")
        for old in saved_steps(folder)[:-2]:
            shutil.rmtree(folder / f"step-{old}")
    dist.barrier()


def resume(model: nn.Module, opt: Optimizer, args: argparse.Namespace) -> int:
    """Load the newest checkpoint, if there is one, in place. Returns the steps already done."""
    folder = args.checkpoint_dir
    if dist.get_rank() == 0:
        shutil.rmtree(folder / "partial", ignore_errors=True)  # of a save that was interrupted
    dist.barrier()
    steps = saved_steps(folder)
    if not steps:
        return 0
    if not args.resume:
        raise SystemExit(f"{folder} holds checkpoints: add --resume, or remove them")
    state = training_state(model, opt, args)
    wanted = state["settings"]
    dcp.load(state, checkpoint_id=folder / f"step-{steps[-1]}")
    if state["settings"] != wanted:
        raise SystemExit(f"{folder} was written with {state['settings']}, this run has {wanted}")
    model.load_state_dict(state["model"])
    return steps[-1]


# ------------------------------------------------------------------------------------- training


def learning_rate(step: int, args: argparse.Namespace) -> float:
    """Linear warm-up, then cosine decay to a tenth of the peak."""
    if step <= WARMUP_STEPS:
        return args.lr * step / WARMUP_STEPS
    progress = (step - WARMUP_STEPS) / (args.steps - WARMUP_STEPS)
    return args.lr * (0.55 + 0.45 * math.cos(math.pi * progress))


def mean_over_ranks(value: Tensor) -> float:
    """The mean of a 0-dim tensor; every rank must call it."""
    total = value.detach().clone()
    dist.all_reduce(total)
    return total.item() / dist.get_world_size()


def say(text: str) -> None:
    """Print on rank 0, above the progress bar."""
    if dist.get_rank() == 0:
        tqdm.write(text)


def show(loss: float) -> str:
    """A loss to the last bit of a float32, and as bits per byte."""
    return f"{loss:.9g} nats ({loss / math.log(2):.3f} bits/byte)"


def train(model: nn.Module, args: argparse.Namespace, device: torch.device) -> float:
    """Train to the last step, from the newest checkpoint if any. Returns the held-out loss."""
    texts = read_standard_library()
    say(", ".join(f"{len(text) / 1e6:.1f} MB {split} text" for split, text in texts.items()))
    forward = torch.compile(model, backend="shardc", options={"executor": args.executor})
    opt = AdamW(model.parameters(), lr=args.lr, weight_decay=0.1, fused=True)

    def train_step(tokens: Tensor, targets: Tensor) -> Tensor:
        loss: Tensor = forward(tokens, targets)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        opt.step()
        opt.zero_grad()
        return loss

    run_step = compile_step(train_step) if args.whole_step else train_step

    @torch.no_grad()
    def held_out_loss() -> float:
        batches = (batch(texts["held-out"], i, args, device) for i in range(HELD_OUT_BATCHES))
        return mean_over_ranks(torch.stack([forward(*each) for each in batches]).mean())

    start = resume(model, opt, args)
    held_out = held_out_loss()
    say(f"step {start:5d}  held-out loss {show(held_out)}")
    losses, rates = [], []
    tokens = dist.get_world_size() * args.batch_size * args.length
    mark, marked_step = time.perf_counter(), start  # where training began, or went on after a pause
    hide = None if dist.get_rank() == 0 else True  # None: shown where the output is a terminal
    for step in tqdm(range(start + 1, args.steps + 1), unit="step", disable=hide):
        for group in opt.param_groups:
            group["lr"] = learning_rate(step, args)
        loss = run_step(*batch(texts["training"], step, args, device))
        log = step % args.log_every == 0 or step in (start + 1, args.steps)
        checkpoint = step % args.save_every == 0 or step == args.steps
        if log:
            losses.append(mean_over_ranks(loss))
            rates.append(tokens * (step - marked_step) / (time.perf_counter() - mark))
            say(f"step {step:5d}  loss {show(losses[-1])}  {rates[-1]:,.0f} tokens/s")
        if checkpoint:
            save(args.checkpoint_dir, step, training_state(model, opt, args))
            held_out = held_out_loss()
            say(f"step {step:5d}  held-out loss {show(held_out)}")
        if log or checkpoint:
            mark, marked_step = time.perf_counter(), step

    if losses:
        say(f"first loss     {show(losses[0])}\nlast loss      {show(losses[-1])}")
        say(f"speed          {statistics.median(rates):,.0f} tokens/s, median")
    say(f"held-out loss  {show(held_out)}")
    return held_out


def start_process_group() -> torch.device:
    """Join the ranks that torchrun started: over NCCL if each has a GPU, else over gloo."""
    if torch.cuda.device_count() < int(os.environ["LOCAL_WORLD_SIZE"]):
        dist.init_process_group("gloo")
        return torch.device("cpu")
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(device)
    dist.init_process_group("nccl", device_id=device)
    return device


def main() -> int:
    args = parse_arguments()
    device = start_process_group()
    torch.manual_seed(args.seed)  # every rank starts from the same weights
    model = LanguageModel(args.dim, args.layers, args.length).to(device)
    mesh = init_device_mesh(device.type, (dist.get_world_size(),))
    for block in model.layers:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    say(describe(model))

    held_out = train(model, args, device)
    failed = args.expect_loss_below is not None and not held_out < args.expect_loss_below
    if failed:
        say(f"FAILED: the held-out loss is not below {args.expect_loss_below}")
    else:
        say(f"done; checkpoints are in {args.checkpoint_dir}, and --resume goes on from the last")
    dist.destroy_process_group()
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
