"""Rows of the table of tensor subclasses (`tables.py`): two ranks train weights of each.

Compared with FSDP2 where FSDP2 runs, and otherwise (a rank of it would wait for one that raised)
with a model that computes the same unsharded: the losses, which are of each rank, and the gradients
of all parameters, in three steps of SGD.
"""

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn, optim
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.fsdp import fully_shard as fsdp2
from torch.distributed.tensor import DTensor
from torchao import float8
from torchao.prototype.quantized_training import Int8MixedPrecisionTrainingConfig
from torchao.prototype.quantized_training.int8_mixed_precision import (
    Int8MixedPrecisionTrainingLinearWeight,
)
from torchao.quantization.quantize_.workflows.nf4.nf4_tensor import to_nf4

import shardc

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))
from subclasses import Fp8, Rowwise, extended, rounding

STEPS, WIDTH = 3, 64
BF16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)


class Subclass(NamedTuple):
    """What is trained.

    Attributes:
        build: makes the model.
        policy: its mixed precision.
        unsharded: makes a model that computes the same where nothing is sharded; None: FSDP2 runs.
        ignores_frozen: whether shardc leaves frozen parameters whole on every rank.
    """

    build: Callable[[], nn.Module]
    policy: MixedPrecisionPolicy = MixedPrecisionPolicy()
    unsharded: Callable[[], nn.Module] | None = None
    ignores_frozen: bool = False


def _plain(rows: int = WIDTH) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(WIDTH, rows), nn.GELU(), nn.Linear(rows, WIDTH))


def _float8() -> nn.Module:
    config = float8.Float8LinearConfig(enable_fsdp_float8_all_gather=True, emulate=True)
    return float8.convert_to_float8_training(_plain(), config=config)


def _int8() -> nn.Module:
    model = _plain()
    for module in (model[0], model[2]):
        weight = Int8MixedPrecisionTrainingLinearWeight(
            module.weight.detach(), Int8MixedPrecisionTrainingConfig()
        )
        module.weight = nn.Parameter(weight)
    return model


def _nf4() -> nn.Module:
    """Frozen weights; their biases are trained."""
    model = _plain(8 * WIDTH)
    for module in (model[0], model[2]):
        module.weight = nn.Parameter(to_nf4(module.weight.detach()), requires_grad=False)
    return model


SUBCLASSES = {
    "float8 (torchao), float8 all-gather": Subclass(_float8, BF16),
    "int8 mixed precision (torchao)": Subclass(_int8, BF16),
    "NF4 (torchao), frozen": Subclass(_nf4),
    "the same in `ignored_params`": Subclass(_nf4, ignores_frozen=True),
    "int8 and a scale a row, two messages": Subclass(lambda: extended(_plain(), Rowwise)),
    "the same, rows that ranks do not divide": Subclass(
        lambda: extended(_plain(33), Rowwise),
        unsharded=lambda: rounding(_plain(33), Rowwise),
    ),
    "float8, one scale of all ranks": Subclass(lambda: extended(_plain(), Fp8)),
    "the same, rows that ranks do not divide ": Subclass(
        lambda: extended(_plain(33), Fp8),
        unsharded=lambda: rounding(_plain(33), Fp8),
    ),
}


def subclass_rows(mesh: Any) -> list[list[str]]:
    """A row for each: name, what it is compared with, what shardc gives uncompiled and compiled."""
    return [[name.strip(), *_row(case, mesh)] for name, case in SUBCLASSES.items()]


def _row(case: Subclass, mesh: Any) -> list[str]:
    beside = "FSDP2" if case.unsharded is None else "unsharded"
    model = _fsdp2(case, mesh) if case.unsharded is None else case.unsharded()
    wanted = _losses_and_gradients(model, mesh)
    return [beside, *(_outcome(case, mesh, compiled, wanted) for compiled in (False, True))]


def _fsdp2(case: Subclass, mesh: Any) -> nn.Module:
    model = case.build()
    for module in (model[0], model[2]):
        fsdp2(module, mesh=mesh, mp_policy=case.policy)
    return fsdp2(model, mesh=mesh, mp_policy=case.policy)


def _outcome(case: Subclass, mesh: Any, compiled: bool, wanted: list[Tensor]) -> str:
    try:
        model = case.build()
        frozen = {p for p in model.parameters() if not p.requires_grad and case.ignores_frozen}
        options = {"mesh": mesh, "mp_policy": case.policy, "ignored_params": frozen}
        for module in (model[0], model[2]):
            shardc.fully_shard(module, **options)
        shardc.fully_shard(model, **options)
        if compiled:
            model.compile(backend="shardc", options={"executor": "eager"}, fullgraph=True)
        found = _losses_and_gradients(model, mesh)
    except Exception as error:
        return f"`{type(error).__name__}`"
    if all(map(torch.equal, found, wanted)):
        return "bitwise"
    off = max(
        float((a - b).abs().max() / b.abs().max()) for a, b in zip(found, wanted, strict=True)
    )
    return "equal" if off <= 1e-5 else f"off by {off:.0e}"


def _losses_and_gradients(model: nn.Module, mesh: Any) -> list[Tensor]:
    optimizer = optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
    found = []
    for step in range(STEPS):
        draw = torch.Generator().manual_seed(10 * step + mesh.get_local_rank())
        loss = model(torch.randn(16, WIDTH, generator=draw)).float().square().mean()
        loss.backward()
        found.append(loss.detach())
        for param in optimizer.param_groups[0]["params"]:
            grad = param.grad
            if isinstance(grad, (DTensor, shardc.ShardTensor)):
                found.append(grad.full_tensor().clone())
            else:  # every rank has its own
                dist.all_reduce(grad)
                grad /= mesh.size()
                found.append(grad.clone())
        optimizer.step()
        optimizer.zero_grad()
    return found
