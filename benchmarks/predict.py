"""What `shardc.report` predicts beside what is measured: step time and peak memory.

    python benchmarks/predict.py [--whole] [--ahead]

Each configuration is one rank of an emulated wire (`wire.py`), in a process of its own, calibrated
there. A step is forward, backward and a fused AdamW, as one graph if asked. Rounds are interleaved;
the ratio is predicted over the median measured step.
"""

import argparse
import functools
import statistics
import time
from dataclasses import dataclass, field
from typing import Any

import peers
import torch
import wire
from kept import show
from processes import add_round_options, interleave
from step_time import measure_memory
from torch import Tensor, nn


@dataclass(frozen=True)
class Configuration:
    """A model, its ranks, the wire between them (ms a message, GB/s), and how it is sharded."""

    shape: peers.Shape
    world: int
    latency: float
    bandwidth: float
    sharding: dict[str, Any] = field(default_factory=dict)
    options: dict[str, Any] = field(default_factory=dict)


CONFIGURATIONS = {
    "8 x 512, W=8, balanced wire": Configuration(peers.Shape(), 8, 0.5, 0.5),
    "8 x 512, W=8, slow wire": Configuration(peers.Shape(), 8, 0.5, 0.15),
    "8 x 512, W=64, fast wire": Configuration(peers.Shape(), 64, 0.1, 4.0),
    "4 x 768, W=8, kept gathered": Configuration(
        peers.Shape(blocks=4, dim=768, length=64), 8, 0.5, 0.5, {"reshard_after_forward": False}
    ),
    "16 x 256, W=16, many tokens": Configuration(
        peers.Shape(blocks=16, dim=256, batch=8), 16, 0.5, 0.5
    ),
    "8 x 512, W=8, op by op": Configuration(
        peers.Shape(length=64), 8, 0.5, 0.5, options={"executor": "eager"}
    ),
}


def main() -> None:
    """Run the rounds and print one table."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--only", help="configurations whose name contains this")
    parser.add_argument("--whole", action="store_true", help="run the step as one graph")
    parser.add_argument("--ahead", action="store_true", help="the same, and gather ahead")
    add_round_options(parser)
    args = parser.parse_args()
    names = [name for name in CONFIGURATIONS if (args.only or "") in name]
    whole = (args.whole or args.ahead, args.ahead)
    sides = {name: [functools.partial(prepare, name, args.steps, *whole)] for name in names}
    rows = []
    for name, rounds in interleave(sides, args.rounds).items():
        figures = [figure for (figure,) in rounds]
        steps, last = [figure["step"] for figure in figures], figures[-1]
        measured = statistics.median(steps)
        exposed = statistics.median(figure["exposed"] for figure in figures)
        rows.append([
            name, f"{1e3 * last['planned']:.0f}", f"{1e3 * measured:.0f}",
            f"{last['planned'] / measured:.3f}",
            f"{last['planned'] / max(steps):.3f} to {last['planned'] / min(steps):.3f}",
            f"{1e3 * last['planned_exposed']:.0f} / {1e3 * exposed:.0f}",
            f"{last['planned_peak'] / 1e6:.1f}", f"{last['peak'] / 1e6:.1f}",
            f"{last['planned_peak'] / last['peak']:.3f}",
        ])  # fmt: skip
    headers = ["", "planned ms", "step ms", "ratio", "(rounds)", "exposed", "planned MB", "peak MB",
               "ratio"]  # fmt: skip
    show(headers, rows, args.keep)


def prepare(name: str, steps: int, whole: bool, ahead: bool) -> Any:
    """Build, compile and warm one configuration; what runs one round of it."""
    import shardc

    torch.set_num_threads(1)
    torch.set_flush_denormal(True)
    torch.manual_seed(0)
    given = CONFIGURATIONS[name]
    line, mesh = wire.join(given.world, 1e-3 * given.latency, 1e9 * given.bandwidth)
    shardc.calibrate(mesh, refresh=True)
    model: nn.Module = peers.Model(given.shape)
    shardc.fully_shard(model, mesh=mesh, units="auto", **given.sharding)
    forward = torch.compile(model, backend="shardc", fullgraph=True, options=given.options)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True, lr=0.0)
    tokens = torch.randint(given.shape.vocab, (given.shape.batch, given.shape.length))

    def separate(tokens: Tensor) -> None:
        forward(tokens).backward()
        optimizer.step()
        optimizer.zero_grad()

    step = shardc.compile_step(separate, gather_ahead=ahead) if whole else separate

    def run() -> dict[str, Any]:
        line.stalls.clear()
        start = time.perf_counter()
        for _ in range(steps):
            step(tokens)
        elapsed = time.perf_counter() - start
        return {"step": elapsed / steps, "exposed": line.exposed / steps} | planned

    planned: dict[str, Any] = {}
    step(tokens)
    report = shardc.report(model)  # before it finds gathered buckets
    for _ in range(2):
        run()
    if whole:
        report = report.whole_step(ahead)
    planned = {
        "planned": report.step_seconds,
        "planned_exposed": report.exposed_seconds,
        "planned_peak": report.peak.total,
        "peak": measure_memory(lambda: step(tokens), model, "shardc")["peak"],
    }
    return run


if __name__ == "__main__":
    main()
