"""A step of a model of 1B in bfloat16 behind an emulated NVLink wire: shardc and its peers.

A case is a process in which the peers are timed in turn with the unsharded, compiled model, so that
a GPU whose clock changes changes all of them. 8 sequences keep the GPU busy; with 2 a step is as
short as the host needs to start its kernels.
"""

import statistics
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
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
ROUNDS, STEPS = 7, 4
WHOLE = ("shardc", "shardc-tables")
"""Peers that this project plans whole; the second gathers the embedding's table."""
BF16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16)


@dataclass
class _Side:
    """A peer and what was measured of it.

    Attributes:
        call: one forward of it.
        seconds: of a step, by round.
        host: seconds until a step is queued on an idle GPU, by round.
        beyond: bytes allocated during a step beyond what is held between steps.
        sent: seconds that the wire was in use in a step.
    """

    model: nn.Module
    call: Callable[[Tensor], Tensor]
    seconds: list[float]
    host: list[float]
    beyond: int = 0
    sent: float = 0.0

    def step(self, tokens: Tensor) -> None:
        """Forward and backward. No optimizer: it is the same for all."""
        self.call(tokens).backward()
        self.model.zero_grad()


def measure(names: tuple[str, ...], batch: int, tiny: bool) -> dict[str, Any]:
    """Medians of the rounds; of the ratios to the plain step of the same round too."""
    line, mesh = wire.join(WORLD, LATENCY, BANDWIDTH)
    shape = replace(TINY if tiny else LARGE, batch=batch)
    tokens = torch.randint(shape.vocab, (shape.batch, shape.length), device="cuda")
    sides = {name: _side(name, mesh, shape) for name in ("plain", *names)}
    for side in (*sides.values(), *sides.values()):
        time_steps(side.step, tokens, 2)
    for number in range(ROUNDS):
        for side in list(sides.values())[:: -1 if number % 2 else 1]:
            line.log.clear()
            side.seconds.append(time_steps(side.step, tokens, STEPS))
            side.sent = line.busy / STEPS
            _measure_alone(side, tokens)
    traces = {name: _trace(f"{name}-{batch}", side, tokens) for name, side in sides.items()}
    plain = sides["plain"]
    result = {"plain ms": 1e3 * statistics.median(plain.seconds)}
    for name in names:
        side = sides[name]
        ratios = [ours / floor for ours, floor in zip(side.seconds, plain.seconds, strict=True)]
        result[name] = statistics.median(ratios)
        result[f"{name} from, to"] = f"{min(ratios):.3f}, {max(ratios):.3f}"
        result[f"{name} MB"] = side.beyond / 1e6
        if name in WHOLE:
            result |= _planned(f"{name}-{batch}", side, traces[name])
    hosts = {f"{name} host ms": 1e3 * statistics.median(s.host) for name, s in sides.items()}
    return {**result, **hosts, "wire ms": 1e3 * sides[names[0]].sent}


def _side(name: str, mesh: Any, shape: peers.Shape) -> _Side:
    torch.manual_seed(0)
    model = peers.Model(shape).cuda()
    options = {"calibrated": False} if name in WHOLE else {}
    return _Side(model, peers.ALL[name](model, mesh, policy=BF16, **options), [], [])


def time_steps(step: Callable[[Tensor], object], tokens: Tensor, steps: int) -> float:
    """The seconds of one step, of `steps`."""
    torch.cuda.synchronize()
    start = time.perf_counter()
    for _ in range(steps):
        step(tokens)
    torch.cuda.synchronize()
    return (time.perf_counter() - start) / steps


def _measure_alone(side: _Side, tokens: Tensor) -> None:
    torch.cuda.reset_peak_memory_stats()
    held, start = torch.cuda.memory_allocated(), time.perf_counter()
    side.step(tokens)
    side.host.append(time.perf_counter() - start)
    torch.cuda.synchronize()
    side.beyond = torch.cuda.max_memory_allocated() - held


def _planned(name: str, side: _Side, trace: Path) -> dict[str, Any]:
    """What was planned for the step, which is left beside its trace."""
    plan = report(side.model)
    plan.save(FOLDER / f"plan-{name}.json")
    with suppress(ValueError):  # the trace of a stand-in has no kernels
        print(compare_with_profile(plan, trace))
    trained = plan.step_seconds - sum(op.seconds for op in plan.ops if op.phase == "optimizer")
    return {"planned / step": trained / statistics.median(side.seconds)}


def _trace(name: str, side: _Side, tokens: Tensor) -> Path:
    """Leave what the GPU did in a step in a file for Perfetto."""
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiler:
        side.step(tokens)
        torch.cuda.synchronize()
    path = FOLDER / f"step-{name}.json.gz"
    profiler.export_chrome_trace(str(path))
    return path


CASES: dict[str, Callable[[bool], dict[str, Any]]] = {
    "8 x 2048": partial(measure, ("shardc-tables", "fsdp2-blocks"), 8),
    "2 x 2048": partial(measure, ("shardc-tables", "fsdp2-blocks"), 2),
    "2 x 2048, graphs": partial(measure, ("shardc-tables", "shardc-graphs"), 2),
    "8 x 2048, graphs": partial(measure, ("shardc-graphs",), 8),
    "8 x 2048, rows": partial(measure, ("shardc",), 8),
    "8 x 2048, uncompiled": partial(measure, ("shardc-eager", "fsdp2"), 8),
    "8 x 2048, blocks": partial(measure, ("shardc-blocks", "fsdp2-blocks"), 8),
}
