"""A step with its optimizer behind an emulated wire: separate calls, one graph, and the peers.

    python benchmarks/whole_step.py --world 8 --latency 0.5 --bandwidth 0.5

One process a competitor, all on this machine, each alone while it is measured, in interleaved
rounds. A step is forward, backward, fused AdamW and `zero_grad`. The optimizer of the plain step
updates one rank's part of each parameter. `exposed ms` is the time that a step waits for messages,
`host ms` the CPU time of the process.
"""

import argparse
import functools
import statistics
import time
from collections.abc import Callable
from typing import Any

import peers
import torch
import wire
from kept import show
from processes import add_round_options, interleave, median_ratio
from step_time import measure_memory
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy

_ALL_KEPT = 2**50
ENDS: dict[str, dict[str, Any]] = {
    "-whole": {},
    "-captured": {"mode": "reduce-overhead"},
    "-kept": {"accumulate": {"gathered_bytes": _ALL_KEPT}},
    "-ahead": {"gather_ahead": True},
    "-once": {"accumulate": {"gathered_bytes": _ALL_KEPT, "reduce_once": True}},
}
"""Ends of the names of competitors whose step is one graph, with arguments of `compile_step`."""


def main() -> None:
    """Run the rounds and print one table."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--world", type=int, default=8, help="emulated ranks (default 8)")
    parser.add_argument("--latency", type=float, default=0.5, help="ms a message (default 0.5)")
    parser.add_argument("--bandwidth", type=float, default=0.5, help="GB/s (default 0.5)")
    parser.add_argument("--clip", action="store_true", help="clip the gradients' norm to 1")
    parser.add_argument("--batch", type=int, default=4, help="sequences a rank (default 4)")
    parser.add_argument("--length", type=int, default=128, help="tokens of each (default 128)")
    parser.add_argument("--parts", type=int, default=1, help="micro-batches (default 1)")
    parser.add_argument("--bf16", action="store_true", help="compute and gather in bfloat16")
    sides = ["plain", "fsdp2-blocks", "shardc", "shardc-whole", "shardc-ahead"]
    more = [f"{name}{end}" for name in peers.ALL for end in ENDS]
    peers.add_model_options(parser, default=sides, more=more)
    add_round_options(parser)
    args = parser.parse_args()
    started = {name: [functools.partial(prepare, name, vars(args))] for name in args.peers}
    results = {
        name: [figures for (figures,) in rounds]
        for name, rounds in interleave(started, args.rounds).items()
    }
    rows = [_row(name, rounds, results.get("plain", rounds)) for name, rounds in results.items()]
    headers = ["", "step ms", "step / plain", "exposed ms", "host ms", "messages", "peak MB"]
    setting = (
        f"W={args.world}, {args.latency} ms + {args.bandwidth} GB/s, {args.blocks} blocks of "
        f"{args.dim}, {args.parts} x {args.batch} x {args.length} tokens, {args.vocab} rows, "
        f"fused AdamW{', clipping' * args.clip}{', bfloat16' * args.bf16}; "
        f"medians of {args.rounds} rounds (min to max)"
    )
    show(headers, rows, args.keep, setting)


def _row(name: str, rounds: list[dict[str, Any]], floor: list[dict[str, Any]]) -> list[Any]:
    median = {key: statistics.median(each[key] for each in rounds) for key in rounds[0]}
    return [
        name,
        f"{1e3 * median['step']:.1f}",
        median_ratio([each["step"] for each in rounds], [each["step"] for each in floor]),
        f"{1e3 * median['exposed']:.1f}",
        f"{1e3 * median['host']:.1f}",
        rounds[0]["messages"],
        f"{median['peak'] / 1e6:.1f}",
    ]


def prepare(name: str, args: dict[str, Any]) -> Callable[[], dict[str, Any]]:
    """Build and warm one competitor in this process, for rounds of `--steps` steps."""
    torch.set_num_threads(1)
    torch.set_flush_denormal(True)  # gathered weights are whatever the memory holds
    line, mesh = wire.join(args["world"], 1e-3 * args["latency"], 1e9 * args["bandwidth"])
    device = mesh.device_type
    size = {key: args[key] for key in ("blocks", "dim", "vocab", "batch", "length")}
    shape = peers.Shape(**size, heads=max(8, args["dim"] // 64))
    policy = MixedPrecisionPolicy(torch.bfloat16) if args["bf16"] else peers.FULL
    model, step = build(name, shape, mesh, policy, args["clip"], args["parts"])
    size = (shape.batch, shape.length)
    tokens = [torch.randint(shape.vocab, size, device=device) for _ in range(args["parts"])]

    def run() -> dict[str, Any]:
        line.log.clear()
        line.stalls.clear()
        start, busy = time.perf_counter(), time.process_time()
        for _ in range(args["steps"]):
            step(*tokens)
        if device == "cuda":
            torch.cuda.synchronize()
        elapsed, host = time.perf_counter() - start, time.process_time() - busy
        return {
            "step": elapsed / args["steps"],
            "exposed": line.exposed / args["steps"],
            "host": host / args["steps"],
            "messages": len(line.log) // args["steps"],
            "peak": memory,
        }

    memory = 0
    for _ in range(2):
        run()
    memory = measure_memory(lambda: step(*tokens), model, name)["peak"]
    return run


def build(
    name: str,
    shape: peers.Shape,
    mesh: DeviceMesh,
    policy: MixedPrecisionPolicy,
    clip: bool,
    parts: int,
) -> tuple[nn.Module, Callable[..., Tensor]]:
    """A competitor's model, and one training step of it on `parts` micro-batches.

    `clip` clips the gradients' norm to 1.
    """
    torch.manual_seed(0)
    with torch.device(mesh.device_type):
        model = peers.Model(shape)
    end = next((end for end in ENDS if name.endswith(end)), "")
    forward = peers.ALL[name.removesuffix(end)](model, mesh, policy=policy)
    update = _Update(model, mesh.size() if name == "plain" else 1)

    def step(*tokens: Tensor) -> Tensor:
        for part in tokens:
            loss: Tensor = forward(part) / parts
            loss.backward()
        if clip:
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        update()
        model.zero_grad()
        return loss

    if end:
        from shardc import compile_step

        return model, compile_step(step, **ENDS[end])
    return model, step


class _Update:
    """Fused AdamW on the first of `parts` parts of each parameter."""

    def __init__(self, model: nn.Module, parts: int) -> None:
        self.given = list(model.parameters())
        self.parts = parts
        own = self.given
        if parts > 1:
            own = [nn.Parameter(self._part(param.detach())) for param in own]
        self.optimizer = torch.optim.AdamW(own, lr=1e-4, fused=True)
        self.own = own

    def _part(self, value: Tensor) -> Tensor:
        return value.flatten()[: -(-value.numel() // self.parts)]

    def __call__(self) -> None:
        if self.parts > 1:
            for own, param in zip(self.own, self.given, strict=True):
                own.grad = None if param.grad is None else self._part(param.grad)
        self.optimizer.step()


if __name__ == "__main__":
    main()
