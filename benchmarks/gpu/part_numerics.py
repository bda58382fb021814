"""2 and 4 ranks on the one GPU: gradients of every strategy beside those of the unsharded model."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from part_smoke import BF16, check
from torch.distributed import fsdp
from training import Training

from shardc import MixedPrecisionPolicy

SENT_SHORT = MixedPrecisionPolicy(
    torch.bfloat16, gather_wire_dtype=torch.float8_e4m3fn, reduce_wire_dtype=torch.int8
)
STRATEGIES = {
    "default": Training(mesh=(2,)),
    "bfloat16": Training(mesh=(2,), sharding=BF16),
    "no reshard": Training(mesh=(2,), sharding={"reshard_after_forward": False}),
    "accumulate": Training(mesh=(2,), accumulate=1),
    "offload": Training(mesh=(2,), sharding={"offload_policy": fsdp.CPUOffloadPolicy()}),
    "four ranks": Training(mesh=(4,)),
    "reshard to 2": Training(mesh=(4,), sharding={"reshard_after_forward": 2}),
    "hsdp": Training(mesh=(2, 2)),
    "hsdp, accumulate": Training(mesh=(2, 2), accumulate=1),
    "tensor parallel": Training(mesh=(2,), tensor_parallel=2),
    "float8 sent": Training(mesh=(2,), sharding={"mp_policy": SENT_SHORT}),
}
GRAPHS = ("default", "bfloat16", "hsdp", "tensor parallel")
"""Strategies that CUDA graphs are tried with too."""


def check_with_either(training: Training, tiny: bool) -> dict[str, Any]:
    """Over NCCL; over gloo where NCCL refuses several ranks on one GPU."""
    offloads = "offload_policy" in training.sharding
    try:
        backend = "cpu:gloo,cuda:nccl" if offloads else "nccl"
        return {"backend": "nccl", **check(training, tiny, backend)}
    except Exception as error:
        print(error)
        return {"backend": "gloo", **check(training, tiny, "gloo")}


CASES: dict[str, Callable[[bool], dict[str, Any]]] = {
    f"{name}, {way}": partial(check_with_either, replace(training, way=way))
    for name, training in STRATEGIES.items()
    for way in ("compiled", "uncompiled", *(["graphs"] if name in GRAPHS else []))
}
