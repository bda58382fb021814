"""Waits that a race could hide: each stream is made late in turn, and the step must stay bitwise.

Compute is made late by a kernel that spins before it; the collectives' own stream by a collective
that waits for one. Then the same under torch's CUDA sanitizer.
"""

import os
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from part_smoke import BF16
from torch import Tensor
from torch.distributed import fsdp
from training import SMALL, TINY, WITHOUT_VALUES, Training, mesh_of, on_ranks, peers, prepare

from shardc import fully_shard
from shardc.runtime.comm import host_copies

CYCLES = 50_000_000  # some 25 ms, longer than the step
STEPS = 3


def check(way: str, late: str, sharding: dict[str, Any], tiny: bool) -> dict[str, Any]:
    """Whether parameters after some steps are bitwise those of a step in which nothing is late."""
    training = Training(way=way, mesh=(2,), sharding=sharding)
    offloads = "offload_policy" in sharding
    backend = "cpu:gloo,cuda:nccl" if offloads else "nccl"
    equal = on_ranks(2, backend, _compare, training, late, TINY if tiny else SMALL)
    result: dict[str, Any] = {"equal": all(equal)}
    return result if all(equal) else {**result, "error": f"a wait is missing where {late} is late"}


def _compare(rank: int, training: Training, late: str, shape: peers.Shape) -> bool:
    on_time, delayed = (_train(rank, training, who, shape) for who in ("", late))
    pairs = zip(on_time, delayed, strict=True)
    return WITHOUT_VALUES or all(torch.equal(a, b) for a, b in pairs)


def _train(rank: int, training: Training, late: str, shape: peers.Shape) -> list[Tensor]:
    torch.manual_seed(0)
    torch.use_deterministic_algorithms(True)
    model = peers.Model(shape).cuda()
    fully_shard(model, mesh=mesh_of(2), units="auto", **training.sharding)
    call = prepare(model, training.way)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    generator = torch.Generator().manual_seed(rank)
    for step in range(STEPS):
        tokens = torch.randint(shape.vocab, (shape.batch, shape.length), generator=generator)
        if step > 0:  # the first compiles
            _delay(late)
        loss = call(tokens.cuda())
        _delay(late)
        loss.backward()
        _delay(late)
        optimizer.step()
        optimizer.zero_grad()
    torch.cuda.synchronize()
    return [param.full_tensor().cpu() for param in model.parameters()]


def _delay(late: str) -> None:
    if late == "compute":
        torch.cuda._sleep(CYCLES)
    elif late == "collectives":
        side = torch.cuda.Stream()
        with torch.cuda.stream(side):
            torch.cuda._sleep(CYCLES)
            dist.all_reduce(torch.zeros(1, device="cuda"), async_op=True)
    elif late == "copies":
        for stream in host_copies._streams.values():
            with stream:
                torch.cuda._sleep(CYCLES)


def sanitize(way: str, tiny: bool) -> dict[str, Any]:
    """Two steps under the sanitizer of torch, which ends the process where it finds a race."""
    os.environ["TORCH_CUDA_SANITIZER"] = "1"
    return check(way, "", BF16, tiny)


OFFLOAD = {"offload_policy": fsdp.CPUOffloadPolicy()}
CASES: dict[str, Callable[[bool], dict[str, Any]]] = {
    **{
        f"late {late}, {way}": partial(check, way, late, OFFLOAD if late == "copies" else {})
        for late in ("nothing", "compute", "collectives", "copies")
        for way in ("compiled", "executor", "uncompiled", "graphs")
        if (late, way) != ("copies", "graphs")
    },
    "sanitizer, uncompiled": partial(sanitize, "uncompiled"),
    "sanitizer, executor": partial(sanitize, "executor"),
}
