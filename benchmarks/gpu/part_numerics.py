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
    "own groups": Training(
        mesh=(2,), controls=("set_separate_reduce_scatter_group", "set_separate_all_gather_group")
    ),
    "memory of NCCL": Training(
        mesh=(2,), controls=("set_allocate_memory_from_process_group_for_comm",)
    ),
    "float8 sent": Training(mesh=(2,), sharding={"mp_policy": SENT_SHORT}),
}
MORE = {
    "default": ["graphs", "rows"],
    "bfloat16": ["graphs", "rows"],
    "hsdp": ["graphs"],
    "tensor parallel": ["graphs"],
}
"""Ways to run that some strategies are tried in too."""


def check_strategy(training: Training, tiny: bool) -> dict[str, Any]:
    """As `check`; what is offloaded is compared over gloo."""
    offloads = "offload_policy" in training.sharding
    return check(training, tiny, "cpu:gloo,cuda:nccl" if offloads else "nccl")


CASES: dict[str, Callable[[bool], dict[str, Any]]] = {
    f"{name}, {way}": partial(check_strategy, replace(training, way=way))
    for name, training in STRATEGIES.items()
    for way in ("compiled", "uncompiled", *MORE.get(name, []))
}
