"""A step of a model of 1B in bfloat16 behind an emulated NVLink wire: shardc and its peers.

One case a peer. `main` of `overlap.py` interleaves; here a case is one process that times several
rounds, and the peer is timed with "plain" in the same process, in turn, so that a GPU whose clock
changes changes both.
"""

import statistics
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import peers
import torch
import wire
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.profiler import ProfilerActivity, profile
from training import FOLDER, TINY

from shardc import compare_with_profile, report

LARGE = peers.Shape(blocks=16, dim=2048, heads=32, vocab=32768, batch=8, length=2048)
WORLD, LATENCY, BANDWIDTH = 8, 20e-6, 360e9
ROUNDS, STEPS = 7, 5
WHOLE = ("shardc", "shardc-tables")
"""Peers that this project plans whole; the second gathers the embedding's table."""
BF16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16)


def measure(name: str, batch: int, tiny: bool) -> dict[str, Any]:
    """Milliseconds a step, medians; the median of the ratios to the plain step of each round."""
    line, mesh = wire.join(WORLD, LATENCY, BANDWIDTH)
    shape = TINY if tiny else replace(LARGE, batch=batch)
    tokens = torch.randint(shape.vocab, (shape.batch, shape.length), device="cuda")
    torch.manual_seed(0)
    models = {each: peers.Model(shape).cuda() for each in ("plain", name)}
    sides = {each: _side(each, model, mesh, tokens) for each, model in models.items()}
    for run in (*sides.values(), *sides.values()):
        run()
    held = torch.cuda.memory_allocated()
    seconds: dict[str, list[float]] = {each: [] for each in sides}
    for number in range(ROUNDS):
        for each in list(sides)[:: -1 if number % 2 else 1]:
            line.log.clear()
            seconds[each].append(sides[each]())
    torch.cuda.reset_peak_memory_stats()
    line.log.clear()
    sides[name]()
    beyond, busy, messages = torch.cuda.max_memory_allocated() - held, line.busy, len(line.log)
    traces = {each: _trace(f"{each}-{batch}", run) for each, run in sides.items()}
    planned = _planned(f"{name}-{batch}", models[name], traces[name]) if name in WHOLE else {}
    ratios = [ours / plain for ours, plain in zip(seconds[name], seconds["plain"], strict=True)]
    return {
        **planned,
        "step ms": 1e3 * statistics.median(seconds[name]),
        "plain ms": 1e3 * statistics.median(seconds["plain"]),
        "step / plain": statistics.median(ratios),
        "least": min(ratios),
        "most": max(ratios),
        "wire ms": 1e3 * busy / STEPS,
        "messages": messages // STEPS,
        "MB beyond held": beyond / 1e6,
    }


def _planned(name: str, model: nn.Module, trace: Path) -> dict[str, Any]:
    """What was planned for the step, which is left beside its trace."""
    plan = report(model)
    plan.save(FOLDER / f"plan-{name}.json")
    with suppress(ValueError):  # the trace of a stand-in has no kernels
        print(compare_with_profile(plan, trace))
    return {"planned ms": 1e3 * plan.step_seconds, "exposed ms": 1e3 * plan.exposed_seconds}


def _trace(name: str, run: Callable[[int], float]) -> Path:
    """Leave what the GPU did in a step in a file for Perfetto."""
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiler:
        run(1)
    path = FOLDER / f"step-{name}.json.gz"
    profiler.export_chrome_trace(str(path))
    return path


def _side(name: str, model: nn.Module, mesh: Any, tokens: Tensor) -> Callable[..., float]:
    options = {"calibrated": False} if name in WHOLE else {}
    call = peers.ALL[name](model, mesh, policy=BF16, **options)

    def run(steps: int = STEPS) -> float:
        torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(steps):
            call(tokens).backward()
            model.zero_grad()
        torch.cuda.synchronize()
        return (time.perf_counter() - start) / steps

    return run


CASES: dict[str, Callable[[bool], dict[str, Any]]] = {
    f"{name}, {batch} x 2048": partial(measure, name, batch)
    for batch in (8, 2)
    for name in (*WHOLE, "fsdp2-blocks", "fsdp2", "shardc-blocks", "shardc-eager")
}
