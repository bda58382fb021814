"""A step of a model of 1B in bfloat16 behind an emulated NVLink wire: shardc and its peers.

One case a peer. `main` of `overlap.py` interleaves; here a case is one process that times several
rounds, and the peer is timed with "plain" in the same process, in turn, so that a GPU whose clock
changes changes both.
"""

import statistics
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import peers
import torch
import wire
from torch import Tensor
from torch.distributed.fsdp import MixedPrecisionPolicy
from training import TINY

from shardc.backend.graph_plan import graph_plans

LARGE = peers.Shape(blocks=16, dim=2048, heads=32, vocab=32768, batch=2, length=2048)
WORLD, LATENCY, BANDWIDTH = 8, 20e-6, 360e9
ROUNDS, STEPS = 7, 5
BF16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16)


def measure(name: str, tiny: bool) -> dict[str, Any]:
    """Milliseconds a step, medians; the median of the ratios to the plain step of each round."""
    line, mesh = wire.join(WORLD, LATENCY, BANDWIDTH)
    shape = TINY if tiny else LARGE
    tokens = torch.randint(shape.vocab, (shape.batch, shape.length), device="cuda")
    sides = {each: _side(each, mesh, shape, tokens) for each in ("plain", name)}
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
    ratios = [ours / plain for ours, plain in zip(seconds[name], seconds["plain"], strict=True)]
    return {
        "step ms": 1e3 * statistics.median(seconds[name]),
        "plain ms": 1e3 * statistics.median(seconds["plain"]),
        "step / plain": statistics.median(ratios),
        "least": min(ratios),
        "most": max(ratios),
        "wire ms": 1e3 * line.busy / STEPS,
        "messages": len(line.log) // STEPS,
        "MB beyond held": (torch.cuda.max_memory_allocated() - held) / 1e6,
    }


def _side(name: str, mesh: Any, shape: peers.Shape, tokens: Tensor) -> Callable[[], float]:
    torch.manual_seed(0)
    model = peers.Model(shape).cuda()
    options = {"calibrated": False} if name == "shardc" else {}
    call = peers.PEERS[name](model, mesh, policy=BF16, **options)

    def run() -> float:
        torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(STEPS):
            call(tokens).backward()
            model.zero_grad()
        torch.cuda.synchronize()
        return (time.perf_counter() - start) / STEPS

    return run


def predicted(tiny: bool) -> dict[str, Any]:
    """The step that was planned with the data sheet's profile beside the one that is measured."""
    from shardc import report

    _, mesh = wire.join(WORLD, LATENCY, BANDWIDTH)
    shape = TINY if tiny else LARGE
    model = peers.Model(shape).cuda()
    call = peers.PEERS["shardc"](model, mesh, policy=BF16, calibrated=False)
    tokens = torch.randint(shape.vocab, (shape.batch, shape.length), device="cuda")
    for _ in range(3):
        call(tokens).backward()
        model.zero_grad()
    torch.cuda.synchronize()
    start = time.perf_counter()
    for _ in range(STEPS):
        call(tokens).backward()
        model.zero_grad()
    torch.cuda.synchronize()
    step = (time.perf_counter() - start) / STEPS
    planned = report(model).step_seconds
    assert graph_plans
    return {"step ms": 1e3 * step, "planned ms": 1e3 * planned, "planned / step": planned / step}


CASES: dict[str, Callable[[bool], dict[str, Any]]] = {
    **{
        name: partial(measure, name)
        for name in ("shardc", "fsdp2", "fsdp2-blocks", "shardc-blocks", "shardc-eager")
    },
    "prediction": predicted,
}
