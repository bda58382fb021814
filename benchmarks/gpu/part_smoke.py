"""Whether anything runs: one rank, each way to run, loss and gradients beside the unsharded."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch.distributed import fsdp
from training import SMALL, TINY, Training, gradients, on_ranks

BF16 = {"mp_policy": fsdp.MixedPrecisionPolicy(param_dtype=torch.bfloat16)}


def check(training: Training, tiny: bool, backend: str = "nccl") -> dict[str, Any]:
    """The worst differences of any rank, and seconds until the first gradients are there."""
    shape = TINY if tiny else SMALL
    found = on_ranks(training.ranks, backend, _gradients, training, shape)
    result: dict[str, Any] = {key: max(each[key] for each in found) for key in found[0]}
    result["ok"] = max(result["loss"], result["gradient"]) < _tolerance(training)
    if not result["ok"]:
        result["error"] = "differs from the unsharded model"
    return result


def _tolerance(training: Training) -> float:
    policy = training.sharding.get("mp_policy")
    if policy is None:
        return 1e-4
    return 2e-2 if getattr(policy, "gather_wire_dtype", None) is None else 0.15


def _gradients(rank: int, training: Training, shape: Any) -> dict[str, float]:
    return gradients(training, rank, shape)


WAYS = ("uncompiled", "executor", "blocks", "compiled")
CASES: dict[str, Callable[[bool], dict[str, Any]]] = {
    f"{way} {dtype}": partial(check, Training(way=way, sharding=sharding))
    for dtype, sharding in (("float32", {}), ("bfloat16", BF16))
    for way in WAYS
}
