"""The step with its optimizer as one graph: its bits beside the separate step's, and its speed.

Bits: one rank, parameters after eight steps. Speed: a model of 1B in bfloat16 behind an emulated
NVLink wire, fused AdamW in the step; the plain optimizer updates one rank's part.
"""

import statistics
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import peers
import torch
import torch.distributed as dist
import whole_step
import wire
from part_speed import BANDWIDTH, BF16, LARGE, LATENCY, ROUNDS, STEPS, WORLD, time_steps
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from training import SMALL, TINY, WITHOUT_VALUES, prepare

from shardc import compile_step, fully_shard

CALLS = 8
MODES = {"separate": (False, None), "whole": (True, None), "captured": (True, "reduce-overhead")}


def compare(way: str, clip: bool, tiny: bool) -> dict[str, Any]:
    """Train by each mode on the same batches; the largest difference of a parameter."""
    dist.init_process_group("nccl", rank=0, world_size=1, store=dist.HashStore())
    torch.use_deterministic_algorithms(True, warn_only=True)
    shape = TINY if tiny else SMALL
    trained = {mode: _train(way, clip, shape, *how) for mode, how in MODES.items()}
    result: dict[str, Any] = {}
    for mode in ("whole", "captured"):
        pairs = zip(trained["separate"], trained[mode], strict=True)
        worst = max((one - other).abs().max().item() for one, other in pairs)
        result[f"{mode} differs by"] = worst
        assert WITHOUT_VALUES or worst == 0.0, result
    return result


def _train(way: str, clip: bool, shape: peers.Shape, whole: bool, mode: str | None) -> list[Tensor]:
    torch.manual_seed(0)
    model = peers.Model(shape).cuda()
    fully_shard(model, mesh=init_device_mesh("cuda", (1,)), units="auto", mp_policy=BF16)
    call = prepare(model, way)
    rate = torch.tensor(1e-2, device="cuda")
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    optimizer.param_groups[0]["lr"] = rate  # its constructor would read the value

    def step(tokens: Tensor) -> Tensor:
        loss = call(tokens)
        loss.backward()
        if clip:
            nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()
        optimizer.zero_grad()
        return loss

    run = compile_step(step, mode=mode) if whole else step
    generator = torch.Generator().manual_seed(1)
    size = (CALLS, shape.batch, shape.length)
    for number, tokens in enumerate(torch.randint(shape.vocab, size, generator=generator).cuda()):
        rate.fill_(1e-2 / (1 + number))
        run(tokens)
    if whole:
        assert not run.reasons and len(run.graphs) == 1, run.reasons  # type: ignore[attr-defined]
        assert run.captures == (mode is not None)  # type: ignore[attr-defined]
    return [param.to_local().detach().clone() for param in model.parameters()]  # type: ignore[attr-defined]


def measure(names: tuple[str, ...], batch: int, tiny: bool) -> dict[str, Any]:
    """Medians of the rounds; of the ratios to the plain step of the same round too."""
    _, mesh = wire.join(WORLD, LATENCY, BANDWIDTH)
    shape = replace(TINY if tiny else LARGE, batch=batch)
    tokens = torch.randint(shape.vocab, (shape.batch, shape.length), device="cuda")
    sides = {n: whole_step.build(n, shape, mesh, BF16, False)[1] for n in ("plain", *names)}
    seconds: dict[str, list[float]] = {name: [] for name in sides}
    hosts: dict[str, list[float]] = {name: [] for name in sides}
    for step in sides.values():
        time_steps(step, tokens, 4)
    for number in range(ROUNDS):
        for name in list(sides)[:: -1 if number % 2 else 1]:
            seconds[name].append(time_steps(sides[name], tokens, STEPS))
            start = time.perf_counter()
            sides[name](tokens)
            hosts[name].append(time.perf_counter() - start)
            torch.cuda.synchronize()
    result: dict[str, Any] = {"plain ms": 1e3 * statistics.median(seconds["plain"])}
    for name in names:
        ratios = [ours / floor for ours, floor in zip(seconds[name], seconds["plain"], strict=True)]
        result[name] = statistics.median(ratios)
        result[f"{name} from, to"] = f"{min(ratios):.3f}, {max(ratios):.3f}"
    return result | {f"{n} host ms": 1e3 * statistics.median(each) for n, each in hosts.items()}


SIDES = ("shardc", "shardc-whole", "shardc-captured")
CASES: dict[str, Callable[[bool], dict[str, Any]]] = {
    **{
        f"bits, {way}{', clipped' * clip}": partial(compare, way, clip)
        for way in ("compiled", "blocks", "uncompiled")
        for clip in (False, True)
    },
    "2 x 2048": partial(measure, SIDES, 2),
    "8 x 2048": partial(measure, SIDES, 8),
    "2 x 2048, fsdp2": partial(measure, ("fsdp2-blocks", "shardc-captured"), 2),
}
