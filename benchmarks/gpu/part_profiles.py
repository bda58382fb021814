"""What the GPU does beside what its data sheet promises, and a plan beside torch's profiler."""

import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import peers
import torch
from part_smoke import BF16
from torch.profiler import ProfilerActivity, profile
from training import SMALL, TINY, mesh_of, on_ranks

from shardc import calibrate, compare_with_profile, fully_shard, report
from shardc.passes.estimate.hardware import current_profile


def calibrated(tiny: bool) -> dict[str, Any]:
    """Rates that are measured over those of the profile that is the default on this GPU."""
    return on_ranks(2, "nccl", _calibrate)[0]


def _calibrate(rank: int) -> dict[str, Any]:
    sheet = current_profile("cuda")
    found = calibrate(mesh_of(2), refresh=True)
    rates, promised = dict(found.flops), dict(sheet.flops)
    return {
        "profile": sheet.name,
        **{f"{name} / sheet": rates[name] / promised[name] for name in rates if name in promised},
        "memory / sheet": found.memory_bandwidth / sheet.memory_bandwidth,
        "link / sheet": found.inside.bandwidth / sheet.inside.bandwidth,
        "host / sheet": found.host_bandwidth / sheet.host_bandwidth,
    }


def profiled(tiny: bool) -> dict[str, Any]:
    """How long collectives took over how long they were planned to take."""
    return on_ranks(2, "nccl", _profile, TINY if tiny else SMALL)[0]


def _profile(rank: int, shape: peers.Shape) -> dict[str, Any]:
    mesh = mesh_of(2)
    calibrate(mesh)
    model = peers.Model(shape).cuda()
    fully_shard(model, mesh=mesh, units="auto", **BF16)
    model.compile(backend="shardc", options={"fallback": False})
    tokens = torch.randint(shape.vocab, (shape.batch, shape.length), device="cuda")
    for _ in range(2):
        model(tokens).backward()
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiler:
        model(tokens).backward()
        torch.cuda.synchronize()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        profiler.export_chrome_trace(str(path))
        comparison = compare_with_profile(report(model), path)
    print(comparison)
    return {"compared": str(comparison).splitlines()[0]}


CASES: dict[str, Callable[[bool], dict[str, Any]]] = {
    "calibrate": calibrated,
    "compare_with_profile": profiled,
}
