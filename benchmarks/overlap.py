"""Exposed communication behind an emulated wire, shardc and its peers in one run.

    python benchmarks/overlap.py --world 8 --latency 0.5 --bandwidth 0.5

One process a competitor, all on this machine, each alone while it is measured, in interleaved
rounds. A step is forward and backward; no optimizer, because the sharded ones would update a part
only. `step / plain` compares with the unsharded compiled step of the same round; `step / wire` with
the time the wire itself needs.
"""

import argparse
import functools
import statistics
import time
from typing import Any

import peers
import torch
import wire
from kept import show
from processes import add_round_options, interleave, median_ratio


def main() -> None:
    """Run the rounds and print one table."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--world", type=int, default=8, help="emulated ranks (default 8)")
    parser.add_argument("--latency", type=float, default=0.5, help="ms a message (default 0.5)")
    parser.add_argument("--bandwidth", type=float, default=0.5, help="GB/s (default 0.5)")
    peers.add_model_options(parser)
    add_round_options(parser)
    args = parser.parse_args()
    sides = {name: [functools.partial(prepare, name, vars(args))] for name in args.peers}
    results = {
        name: [figures for (figures,) in rounds]
        for name, rounds in interleave(sides, args.rounds).items()
    }
    rows = [_row(name, rounds, results.get("plain", rounds)) for name, rounds in results.items()]
    shape = f"{args.blocks} blocks of {args.dim}, {args.vocab} rows"
    headers = [
        "", "step ms", "wire ms", "over plain ms", "step / plain", "step / wire", "messages",
        "MB sent",
    ]  # fmt: skip
    setting = (
        f"W={args.world}, {args.latency} ms + {args.bandwidth} GB/s, {shape}; "
        f"medians of {args.rounds} rounds (min to max)"
    )
    show(headers, rows, args.keep, setting)


def _row(name: str, rounds: list[dict[str, Any]], floor: list[dict[str, Any]]) -> list[Any]:
    steps, plain_steps = ([figures["step"] for figures in side] for side in (rounds, floor))
    sent = rounds[0]["wire"]
    return [
        name,
        f"{1e3 * statistics.median(steps):.0f}",
        f"{1e3 * sent:.0f}",
        f"{1e3 * (statistics.median(steps) - statistics.median(plain_steps)):.0f}",
        median_ratio(steps, plain_steps),
        median_ratio(steps, [sent] * len(steps)) if sent else "-",
        rounds[0]["messages"],
        f"{rounds[0]['moved'] / 1e6:.1f}",
    ]


def prepare(name: str, args: dict[str, Any]) -> Any:
    """Build and warm one competitor in this process; what runs one round of it."""
    torch.set_num_threads(1)
    torch.set_flush_denormal(True)  # gathered weights are whatever the memory holds
    torch.manual_seed(0)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    line, mesh = wire.join(args["world"], 1e-3 * args["latency"], 1e9 * args["bandwidth"])
    shape = peers.Shape(args["blocks"], args["dim"], vocab=args["vocab"])
    model = peers.Model(shape).to(device)
    step = peers.ALL[name](model, mesh)
    tokens = torch.randint(shape.vocab, (shape.batch, shape.length), device=device)

    def run() -> dict[str, Any]:
        line.log.clear()
        start = time.perf_counter()
        for _ in range(args["steps"]):
            step(tokens).backward()
            model.zero_grad()
        if device == "cuda":
            torch.cuda.synchronize()
        elapsed = time.perf_counter() - start
        return {
            "step": elapsed / args["steps"],
            "wire": line.busy / args["steps"],
            "messages": len(line.log) // args["steps"],
            "moved": line.moved / args["steps"],
        }

    for _ in range(2):
        run()
    return run


if __name__ == "__main__":
    main()
