"""The held-out loss of the demo model by what parameters and gradients travel in.

    torchrun --nproc-per-node 2 benchmarks/wire_loss.py

Every run trains the model of `examples/train_lm.py` on its text for its steps, from each seed. The
table gives every loss beside that of the run with the same seed whose messages are float32. How far
losses are apart by chance, runs show that begin with weights a millionth larger. It takes about 40
minutes on two cores.
"""

import argparse
import copy
import statistics
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from tabulate import tabulate
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from tqdm import tqdm

from shardc import MixedPrecisionPolicy, fully_shard

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "examples"))

import train_lm

INT8, FLOAT8 = torch.int8, torch.float8_e4m3fn
NUDGED = "float32, weights a millionth off"
POLICIES = {
    "float32": MixedPrecisionPolicy(),
    NUDGED: MixedPrecisionPolicy(),
    "gathers int8": MixedPrecisionPolicy(gather_wire_dtype=INT8),
    "reductions int8": MixedPrecisionPolicy(reduce_wire_dtype=INT8),
    **{
        f"int8, blocks of {block}": MixedPrecisionPolicy(
            gather_wire_dtype=INT8, reduce_wire_dtype=INT8, wire_block=block
        )
        for block in (32, 128, 512)
    },
    "int8, blocks of 128, stochastic": MixedPrecisionPolicy(
        gather_wire_dtype=INT8, reduce_wire_dtype=INT8, wire_seed=0
    ),
    **{
        f"gathers {name}": MixedPrecisionPolicy(gather_wire_dtype=name)
        for name in ("mxfp8", "mxfp4", "nvfp4")
    },
    "float8 and int8, blocks of 128": MixedPrecisionPolicy(
        gather_wire_dtype=FLOAT8, reduce_wire_dtype=INT8
    ),
}


def main() -> None:
    """Run all policies and print one table."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2], help="default 0 1 2")
    parser.add_argument("--only", help="policies whose name contains this, besides float32")
    parser.add_argument("--steps", type=int, default=360, help="of each run (default 360)")
    own, others = parser.parse_known_args()
    sys.argv[1:] = [*others, "--steps", str(own.steps)]
    args = train_lm.parse_arguments()
    device = train_lm.start_process_group()
    texts = train_lm.read_standard_library()
    names = [name for name in POLICIES if name == "float32" or (own.only or "") in name]
    losses: dict[str, list[float]] = {name: [] for name in names}
    hide = dist.get_rank() != 0
    with tqdm(total=len(names) * len(own.seeds), unit="run", disable=hide) as progress:
        for seed in own.seeds:
            for name in names:
                progress.set_description(f"{name}, seed {seed}")
                each = copy.copy(args)
                each.seed = seed
                nudge = 1e-6 if name == NUDGED else 0.0
                losses[name].append(_run(each, texts, POLICIES[name], device, nudge))
                progress.update()
                if not hide:
                    tqdm.write(f"{name}, seed {seed}: {losses[name][-1]:.5f}")
    if not hide:
        rows = [_row(name, losses[name], losses["float32"]) for name in names]
        headers = ["", *(f"seed {seed}" for seed in own.seeds), "worst / float32", "mean / float32"]
        print(f"held-out loss in nats after {args.steps} steps on {dist.get_world_size()} ranks")
        print(tabulate(rows, headers=headers))
    dist.destroy_process_group()


def _row(name: str, losses: list[float], exact: list[float]) -> list[str]:
    ratios = [loss / base - 1 for loss, base in zip(losses, exact, strict=True)]
    worst = max(ratios, key=abs)
    shares = [f"{worst:+.2%}", f"{statistics.mean(ratios):+.2%}"]
    return [name, *(f"{loss:.4f}" for loss in losses), *shares]


def _run(
    args: argparse.Namespace,
    texts: dict[str, train_lm.NDArray[train_lm.np.uint8]],
    policy: MixedPrecisionPolicy,
    device: torch.device,
    nudge: float,
) -> float:
    """The held-out loss at the end of a run."""
    torch.manual_seed(args.seed)
    torch.compiler.reset()
    model = train_lm.LanguageModel(args.dim, args.layers, args.length).to(device)
    with torch.no_grad():
        for param in model.parameters():
            param.mul_(1 + nudge)
    mesh = init_device_mesh(device.type, (dist.get_world_size(),))
    for unit in (*model.layers, model):
        fully_shard(unit, mesh=mesh, mp_policy=policy)
    forward = torch.compile(model, backend="shardc")
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr, weight_decay=0.1, fused=True)
    for step in range(1, args.steps + 1):
        for group in optimizer.param_groups:
            group["lr"] = train_lm.learning_rate(step, args)
        forward(*train_lm.batch(texts["training"], step, args, device)).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    held_out = range(train_lm.HELD_OUT_BATCHES)
    with torch.no_grad():
        each = [forward(*train_lm.batch(texts["held-out"], i, args, device)) for i in held_out]
    return train_lm.mean_over_ranks(torch.stack(each).mean())


if __name__ == "__main__":
    main()
