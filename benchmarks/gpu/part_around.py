"""Around a step, on 2 NCCL ranks: the table of `tests/operations.py`, and checkpoints.

Copies, ties, loads, norms and reads beside plain torch; a run that goes on from a checkpoint beside
the run that was saved, bitwise.
"""

import sys
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint import load, save
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_state_dict,
    set_model_state_dict,
    set_state_dict,
)
from training import SMALL, TINY, WITHOUT_VALUES, mesh_of, on_ranks, peers, prepare

from shardc import fully_shard

sys.path.append(str(Path(__file__).resolve().parents[2] / "tests"))
BACKEND = "cpu:gloo,cuda:nccl"
"""Checkpoints exchange objects over gloo."""


def operations(way: str, tiny: bool) -> dict[str, Any]:
    """How many series of operations part from plain torch, and how the first does."""
    found = on_ranks(2, BACKEND, _operations, way, tiny)
    apart = max(found, key=len)
    result: dict[str, Any] = {"series apart": len(apart)}
    return {**result, "error": "; ".join(apart)[:300]} if apart else result


def _operations(rank: int, way: str, tiny: bool) -> list[str]:
    from operations import SERIES, try_series

    torch.set_default_device("cuda")
    mesh, apart = mesh_of(2), []
    for name in list(SERIES)[: 4 if tiny else None]:
        torch._dynamo.reset()
        try:
            try_series(mesh, way, name, rtol=2e-4, atol=2e-5)
        except Exception as error:
            print(f"rank {rank}, {name}: {error}", flush=True)
            if not (WITHOUT_VALUES and isinstance(error, AssertionError)):
                apart.append(f"{name}: {error}")
    return apart


def resumed(way: str, tiny: bool) -> dict[str, Any]:
    """Whether a checkpoint that is loaded gives the parameters of the run that was not ended."""
    with tempfile.TemporaryDirectory() as folder:
        found = on_ranks(2, BACKEND, _resume, way, TINY if tiny else SMALL, folder)
    result: dict[str, Any] = {key: all(each[key] for each in found) for key in found[0]}
    if wrong := [key for key, equal in result.items() if not equal]:
        result["error"] = f"not equal: {', '.join(wrong)}"
    return result


def _resume(rank: int, way: str, shape: peers.Shape, folder: str) -> dict[str, bool]:
    torch.use_deterministic_algorithms(True)
    generator = torch.Generator().manual_seed(rank)
    size = (5, shape.batch, shape.length)
    batches = list(torch.randint(shape.vocab, size, generator=generator).cuda())
    model, optimizer = _train(0, way, shape, batches[:3])
    values = dict(zip(("model", "optimizer"), get_state_dict(model, optimizer), strict=True))
    save(values, checkpoint_id=folder)

    other, its = _train(1, way, shape, [])
    values = dict(zip(("model", "optimizer"), get_state_dict(other, its), strict=True))
    load(values, checkpoint_id=folder)
    set_state_dict(
        other, its, model_state_dict=values["model"], optim_state_dict=values["optimizer"]
    )
    for each, steps in ((model, optimizer), (other, its)):
        _steps(each, steps, batches[3:])

    options = StateDictOptions(full_state_dict=True, cpu_offload=True)
    exported = get_model_state_dict(model, options=options)
    whole = {name: p.full_tensor().cpu() for name, p in model.named_parameters()}
    third, _ = _train(2, way, shape, [])
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    set_model_state_dict(third, dict(exported), options=options)  # which it writes to
    return {
        "resumed": _are_equal(whole, other),
        "exported": _are_equal(exported if rank == 0 else whole, other),
        "broadcast": _are_equal(whole, third),
    }


def _train(
    seed: int, way: str, shape: peers.Shape, batches: list[Tensor]
) -> tuple[Any, torch.optim.Optimizer]:
    torch.manual_seed(seed)
    model = peers.Model(shape).cuda()
    fully_shard(model, mesh=mesh_of(2), units="auto")
    prepare(model, way)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    _steps(model, optimizer, batches)
    return model, optimizer


def _steps(model: Any, optimizer: torch.optim.Optimizer, batches: list[Tensor]) -> None:
    for tokens in batches:
        model(tokens).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()


def _are_equal(values: dict[str, Tensor], model: Any) -> bool:
    found = {name: p.full_tensor().cpu() for name, p in model.named_parameters()}
    dist.barrier()
    same = all(torch.equal(values[name], found[name]) for name in found)
    return WITHOUT_VALUES or (same and len(values) == len(found))


CASES: dict[str, Callable[[bool], dict[str, Any]]] = {
    **{
        f"operations, {way}": partial(operations, way)
        for way in ("uncompiled", "blocks", "eager", "inductor")
    },
    **{
        f"checkpoints, {way}": partial(resumed, way)
        for way in ("uncompiled", "executor", "compiled")
    },
}
