"""A whole training step on real ranks: time and peak memory, shardc and its peers in one run.

    python benchmarks/step_time.py --ranks 2

A competitor is one process a rank (gloo, or NCCL where there is a GPU for each), alone while it is
measured, in interleaved rounds; the slowest rank counts. A step is forward, backward, AdamW and
zero_grad; "plain" is every rank for itself, unsharded. Peak memory comes from one step more: on a
GPU what its allocator reports; on a CPU the bytes that exist between steps ("held": parameters,
optimizer state, whatever else is kept) and the running sum of what the profiler sees allocated.
shardc's planned peak counts segments, optimizer state and its graphs, not the optimizer's step.
"""

import argparse
import functools
import gc
import itertools
import json
import os
import socket
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import peers
import torch
import torch.distributed as dist
from kept import show
from processes import add_round_options, interleave, median_ratio
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.profiler import ProfilerActivity, profile

BASE = "fsdp2"


def main() -> None:
    """Run the rounds and print one table."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--ranks", type=int, default=2, help="processes a competitor (default 2)")
    peers.add_model_options(parser)
    add_round_options(parser)
    args = parser.parse_args()
    os.environ["KINETO_LOG_LEVEL"] = "6"  # the profiler's notes would garble the progress bar
    sides = {}
    for name in args.peers:
        arguments = (name, free_port(), vars(args))
        sides[name] = [functools.partial(prepare, rank, *arguments) for rank in range(args.ranks)]
    results = interleave(sides, args.rounds)
    base = results.get(BASE, results[args.peers[0]])
    headers = ["", "step ms", f"step / {BASE if BASE in results else args.peers[0]}",
               "peak MB", "held MB", "planned MB", "planned / peak"]  # fmt: skip
    rows = [_row(name, rounds, base) for name, rounds in results.items()]
    setting = (
        f"W={args.ranks} on {_device_type(args.ranks)}, {args.blocks} blocks of {args.dim}; "
        f"medians of {args.rounds} rounds (min to max)"
    )
    show(headers, rows, args.keep, setting)


def _row(
    name: str, rounds: list[list[dict[str, Any]]], base: list[list[dict[str, Any]]]
) -> list[str]:
    steps, base_steps = (
        [max(figures["step"] for figures in ranks) for ranks in side] for side in (rounds, base)
    )
    peak, held, planned = (
        max(figures[key] for figures in rounds[0]) for key in ("peak", "held", "planned")
    )
    return [
        name,
        f"{1e3 * statistics.median(steps):.0f}",
        median_ratio(steps, base_steps),
        f"{peak / 1e6:.1f}",
        f"{held / 1e6:.1f}",
        f"{planned / 1e6:.1f}" if planned else "-",
        f"{planned / peak:.3f}" if planned else "-",
    ]


def prepare(rank: int, name: str, port: int, args: dict[str, Any]) -> Callable[[], dict[str, Any]]:
    """Build and warm one rank of a competitor in this process; what runs one round of it."""
    torch.set_num_threads(1)
    mesh = join(rank, args["ranks"], port)
    torch.manual_seed(0)
    shape = peers.Shape(blocks=args["blocks"], dim=args["dim"])
    model = peers.Model(shape).to(mesh.device_type)
    forward = peers.ALL[name](model, mesh)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    torch.manual_seed(1 + rank)
    tokens = torch.randint(shape.vocab, (shape.batch, shape.length), device=mesh.device_type)

    def step() -> None:
        forward(tokens).backward()
        optimizer.step()
        optimizer.zero_grad()

    def run() -> dict[str, Any]:
        dist.barrier()
        start = time.perf_counter()
        for _ in range(args["steps"]):
            step()
        if mesh.device_type == "cuda":
            torch.cuda.synchronize()
        return {"step": (time.perf_counter() - start) / args["steps"]} | memory

    memory: dict[str, int] = {}
    for _ in range(2):
        run()
    memory = measure_memory(step, model, name)
    return run


def join(rank: int, ranks: int, port: int) -> DeviceMesh:
    """Be `rank` of a process group over real links."""
    kind = _device_type(ranks)
    if kind == "cuda":
        torch.cuda.set_device(rank)
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "LOCAL_RANK": str(rank)}
    dist.init_process_group("nccl" if kind == "cuda" else "gloo", rank=rank, world_size=ranks)
    return init_device_mesh(kind, (ranks,))


def _device_type(ranks: int) -> str:
    return "cuda" if torch.cuda.device_count() >= ranks else "cpu"


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


# -- memory --------------------------------------------------------------------------------------


def measure_memory(step: Callable[[], None], model: nn.Module, name: str) -> dict[str, int]:
    """Bytes of this rank: `held` between steps, `peak` within one, `planned` by shardc (or 0)."""
    gc.collect()
    if next(model.parameters()).device.type == "cuda":
        held = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        step()
        peak = torch.cuda.max_memory_allocated()
    else:
        held = held_bytes()
        if name == "ddp":  # its reducer keeps buckets of all gradients, out of Python's sight
            held += sum(param.nbytes for param in model.parameters())
        peak = held + allocated_peak(step)
    return {"held": held, "peak": peak, "planned": planned_peak() if name == "shardc" else 0}


def held_bytes() -> int:
    """Bytes of every CPU storage that Python can reach; each is counted once.

    Tensor subclasses are left out: what they hold are tensors of their own.
    """
    tensors = [thing for thing in gc.get_objects() if type(thing) in (Tensor, nn.Parameter)]
    storages = [tensor.untyped_storage() for tensor in tensors if tensor.device.type == "cpu"]
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())


def allocated_peak(step: Callable[[], None]) -> int:
    """The largest sum of bytes allocated minus bytes freed since the start of a profiled step."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        step()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        profiler.export_chrome_trace(str(path))
        events = json.loads(path.read_text())["traceEvents"]
    changes = [event for event in events if event["name"] == "[memory]"]
    changes.sort(key=lambda event: event["ts"])
    return max(itertools.accumulate((c["args"]["Bytes"] for c in changes), initial=0))


def planned_peak() -> int:
    """Bytes at the worst moment of any graph that shardc compiled in this process."""
    from shardc.backend.graph_plan import graph_plans

    return max(plan.peak for plan in graph_plans)


if __name__ == "__main__":
    main()
