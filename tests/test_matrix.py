"""Cells of {strategy} x {precision} x {accumulation} x {executor}, against FSDP2.

Each two of a strategy, a precision and an accumulation meet in a cell: uncompiled, and compiled,
where an executor has a part of these cells and with Inductor every strategy, precision and
accumulation occurs. SHARDC_MATRIX=full runs all there are.
"""

import os

import pytest
import torch
from fsdp2 import check_against_fsdp2, fsdp2, sharded
from models import Stack, seeded, tokens
from ranks import mesh_of, on_ranks
from tabulate import tabulate

from shardc import MixedPrecisionPolicy

STRATEGIES = {
    "FULL_SHARD": ((4,), True),
    "SHARD_GRAD_OP": ((4,), False),
    "reshard to 2": ((4,), 2),
    "HYBRID_SHARD": ((2, 2), True),
    "_HYBRID_SHARD_ZERO2": ((2, 2), False),
    "NO_SHARD": ((4, 1), True),
}
bf16, fp16, fp32 = torch.bfloat16, torch.float16, torch.float32
PRECISIONS = {
    "fp32": (MixedPrecisionPolicy(), 1e-5),
    "bf16": (MixedPrecisionPolicy(param_dtype=bf16), 2e-2),
    "bf16, reduce fp32": (MixedPrecisionPolicy(param_dtype=bf16, reduce_dtype=fp32), 2e-2),
    "fp16": (MixedPrecisionPolicy(param_dtype=fp16), 4e-3),
}
ACCUMULATIONS = ("none", "every micro-batch reduced", "no_sync")


def _is_run(executor, strategy, precision, accumulation):
    if os.environ.get("SHARDC_MATRIX") == "full":
        return True
    place = list(STRATEGIES).index(strategy)
    kind = list(PRECISIONS).index(precision)
    if ACCUMULATIONS.index(accumulation) != (place + kind) % len(ACCUMULATIONS):
        return False
    with_inductor = place % len(PRECISIONS) == kind  # the other cells are those of "eager"
    return executor == "uncompiled" or with_inductor == (executor == "inductor")


def _step(mesh_rank, kind):
    micro_batches = 1 if kind == "none" else 2

    def step(model, call, number):
        for index in range(micro_batches):
            last = index == micro_batches - 1
            if kind == "no_sync":
                model.set_requires_gradient_sync(last)
            seed = 1000 * number + 10 * index + mesh_rank
            loss = call(tokens(seed), tokens(seed + 500))
            (loss / micro_batches).backward()
            grads = [p.grad for p in model.parameters()]
            assert last or kind != "no_sync" or all(grad is None for grad in grads)

    return step


def _cell(mesh, strategy, precision, accumulation, executor):
    _, reshard = STRATEGIES[strategy]
    policy, tolerance = PRECISIONS[precision]
    kwargs = {"reshard_after_forward": reshard, "mp_policy": policy}
    theirs = fsdp2(seeded(lambda: Stack(1)), mesh, **kwargs)
    ours = sharded(seeded(lambda: Stack(1)), mesh, **kwargs)
    step = ours
    if executor != "uncompiled":
        options = {"executor": executor, "fallback": False}
        step = torch.compile(ours, backend="shardc", options=options, fullgraph=True)
    rank = torch.distributed.get_rank()
    check_against_fsdp2(theirs, ours, step, _step(rank, accumulation), 2, tolerance)


@pytest.mark.timeout(3600)
@pytest.mark.parametrize("executor", ["uncompiled", "eager", "inductor"])
@on_ranks(4, timeout=3500)
def test_matrix(mesh, executor):
    rows, failed = [], []
    meshes = {
        shape: mesh_of("cpu", shape, mesh_dim_names=("replicate", "shard")[-len(shape) :])
        for shape, _ in STRATEGIES.values()
    }
    for strategy, (shape, _) in STRATEGIES.items():
        for precision in PRECISIONS:
            cells = []
            for accumulation in ACCUMULATIONS:
                if not _is_run(executor, strategy, precision, accumulation):
                    cells.append("with SHARDC_MATRIX=full")
                    continue
                torch._dynamo.reset()
                try:
                    _cell(meshes[shape], strategy, precision, accumulation, executor)
                    cells.append("pass")
                except Exception as error:
                    cells.append(f"{type(error).__name__}: {error}"[:300])
                    failed.append((strategy, precision, accumulation, cells[-1]))
            rows.append([strategy, precision, *cells])
    if mesh.get_local_rank() == 0:
        print(f"\n{tabulate(rows, headers=[executor, 'precision', *ACCUMULATIONS])}", flush=True)
    assert not failed, failed
