"""Features together, as users combine them: three steps against FSDP2 each, every gradient."""

import functools
from dataclasses import dataclass

import pytest
import torch
import torch.distributed as dist
from fsdp2 import check_against_fsdp2, fsdp2, sharded
from models import Checkpointed, Stack, compiled, seeded, tokens
from ranks import mesh_of, on_ranks

from shardc import CPUOffloadPolicy, MixedPrecisionPolicy

bf16, fp32 = torch.bfloat16, torch.float32
EXACT, LOW = 1e-5, 2e-2
FULL_PRECISION = MixedPrecisionPolicy()
LOW_PRECISION = MixedPrecisionPolicy(bf16, fp32)
TIED = functools.partial(Stack, tied=True)


def _divide(module):
    module.set_force_sum_reduction_for_comms(True)  # gloo has no sum that multiplies first
    module.set_gradient_divide_factor(5.0)


def _hook(module):
    module.set_all_reduce_hook(lambda grad: grad.mul_(3))


def _freeze(module):
    for parameter in getattr(module, "layers", [module])[0].parameters():
        parameter.requires_grad_(False)


@dataclass(frozen=True)
class Case:
    """What is combined."""

    build: object = Stack
    shape: tuple = (4,)
    reshard: bool | int | None = None
    precision: MixedPrecisionPolicy = FULL_PRECISION
    offload: bool = False
    waits: str = ""
    kept: bool = False
    setup: object = None
    clip: bool = False
    executor: str | None = "eager"
    tolerance: float = EXACT


CASES = {
    "HSDP ZeRO-2, bf16, all-reduce last": Case(
        shape=(2, 2), reshard=False, precision=LOW_PRECISION, waits="all_reduce", tolerance=LOW
    ),
    "to 2, bf16, recomputation": Case(
        Checkpointed, reshard=2, precision=LOW_PRECISION, tolerance=LOW
    ),
    "offload, bf16, no_sync, AdamW with clipping": Case(
        precision=LOW_PRECISION, offload=True, waits="sync", clip=True, tolerance=LOW
    ),
    "HSDP, frozen, no_sync": Case(shape=(2, 2), setup=_freeze, waits="sync"),
    "HSDP, divide factor, no_sync": Case(shape=(2, 2), setup=_divide, waits="sync"),
    "ZeRO-2, hook, bf16 reduced": Case(
        reshard=False, precision=MixedPrecisionPolicy(bf16), setup=_hook, tolerance=LOW
    ),
    "to 2, tied, no_sync": Case(TIED, reshard=2, waits="sync"),
    "HSDP, recomputation, bf16, uncompiled": Case(
        Checkpointed, (2, 2), precision=LOW_PRECISION, executor=None, tolerance=LOW
    ),
    "ZeRO-3, kept between micro-batches, no_sync": Case(reshard=True, kept=True, waits="sync"),
}


def _step(case, model, call, number):
    micro_batches = 3 if case.waits or case.kept else 1
    for index in range(micro_batches):
        last = index == micro_batches - 1
        if case.waits == "sync":
            model.set_requires_gradient_sync(last)
        if case.waits == "all_reduce":
            model.set_requires_all_reduce(last)
        if case.kept:
            model.set_reshard_after_backward(last)
        seed = 1000 * number + 10 * index + dist.get_rank()
        (call(tokens(seed), tokens(seed + 500)) / micro_batches).backward()
    if case.clip:
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)


@pytest.mark.parametrize("name", CASES)
@on_ranks(4)
def test_combination(mesh, name):
    case = CASES[name]
    dims = ("replicate", "shard")[-len(case.shape) :]
    mesh = mesh_of("cpu", case.shape, mesh_dim_names=dims)
    kwargs = {"reshard_after_forward": case.reshard, "mp_policy": case.precision}
    if case.offload:
        kwargs["offload_policy"] = CPUOffloadPolicy(pin_memory=False)
    theirs, ours = (make(seeded(case.build), mesh, **kwargs) for make in (fsdp2, sharded))
    if case.setup:
        for model in (theirs, ours):
            for module in [model] if case.setup is _freeze else [*model.layers, model]:
                case.setup(module)
    call = compiled(ours, case.executor, fullgraph=True) if case.executor else ours
    adam = lambda params: torch.optim.AdamW(params, lr=1e-4, eps=1e-3)  # noqa: E731
    optimizer = {"optimizer": adam} if case.clip else {}
    step = functools.partial(_step, case)
    check_against_fsdp2(theirs, ours, call, step, 3, case.tolerance, **optimizer)
