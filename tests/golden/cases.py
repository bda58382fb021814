"""The cases: each compiles a step of a small model, with one thing that changes its graphs."""

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from models import Gated, Stack, seeded, tokens
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

import shardc
from shardc import MixedPrecisionPolicy, fully_shard
from shardc.passes.estimate.hardware import PROFILES
from shardc.runtime import compat

RANKS = 8
BF16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
INT8 = MixedPrecisionPolicy(gather_wire_dtype=torch.int8, reduce_wire_dtype=torch.int8)
WITH_HOST = replace(
    PROFILES["cpu"], name="with host", host_bandwidth=1e10, memory_bandwidth=1e9, overhead=1e-7
)
"""A device with a link to the host that is fast beside its memory."""


class Loss(nn.Module):
    """A stack of blocks with its loss, of one batch of tokens."""

    def __init__(self, **given: Any) -> None:
        super().__init__()
        self.stack = Stack(**given)

    def forward(self, batch: Tensor) -> Tensor:
        return self.stack(batch, batch.flip(0))


class Broken(Stack):
    """A stack whose forward breaks the graph between its blocks."""

    def forward(self, batch: Tensor) -> Tensor:
        x = self.layers[0](self.embed(batch))
        torch._dynamo.graph_break()
        return self.head(self.layers[1](x)).square().mean()


def partly_frozen() -> nn.Module:
    model = Loss()
    model.stack.layers[0].requires_grad_(False)
    return model


def checkpointed() -> nn.Module:
    model = Gated(2)
    model.checkpointed = (0, 1)
    return model


def explained(
    build: Callable[[], nn.Module] = Loss, batch: Callable[[], Tensor] | None = None, **given: Any
) -> Callable[[], shardc.Report]:
    """A case that `shardc.explain` plans for 8 GPUs."""

    def run() -> shardc.Report:
        with torch.device("meta"):
            model = build()
            inputs = batch() if batch else torch.empty(4, 8, dtype=torch.long)
        sizes = {} if "mesh" in given else {"world_size": RANKS}
        return shardc.explain(model, inputs, **sizes, **given)

    return run


def rows(*size: int) -> Callable[[], Tensor]:
    return lambda: torch.empty(*size)


@contextmanager
def fake_ranks() -> Iterator[None]:
    compat.join_fake_group(RANKS)
    try:
        yield
    finally:
        dist.destroy_process_group()


def ran(build: Callable[[], nn.Module], batch: Tensor, passes: int = 1) -> Callable[[], None]:
    """A case that runs as rank 0 on a CPU; all but the last of its passes keep their gradients."""

    def run() -> None:
        with fake_ranks():
            model = seeded(build)
            step = torch.compile(model, backend="shardc", options={"executor": "eager"})
            for number in range(passes):
                model.set_requires_gradient_sync(number == passes - 1)
                step(batch).backward()

    return run


def sharded(build: Callable[[], nn.Module], **given: Any) -> nn.Module:
    return fully_shard(build(), units="auto", **given)


def tensor_parallel() -> nn.Module:
    grid = init_device_mesh("cpu", (RANKS // 2, 2), mesh_dim_names=("dp", "tp"))
    head = ColwiseParallel(output_layouts=Replicate())
    model = parallelize_module(Loss(vocab=32), grid["tp"], {"stack.head": head})
    return fully_shard(model, mesh=grid["dp"], units="auto")


GATED = functools.partial(Gated, 2, 64)
BATCH = rows(8, 64, 64)


def within_6mb(**options: bool) -> Callable[[], shardc.Report]:
    """A case with a tight budget and a host, on which these options decide how it is kept."""
    return explained(GATED, BATCH, memory_budget="6MB", profile=WITH_HOST, options=options)


CASES: dict[str, Callable[[], object]] = {
    "resharded": explained(),
    "kept gathered": explained(reshard_after_forward=False),
    "the bucket read first kept": explained(options={"keep_read_first": True}),
    "resharded to two ranks": explained(reshard_after_forward=2),
    "one unit": explained(units=lambda module: False),
    "two copies": explained(mesh=(2, 4)),
    "in two steps": explained(devices_per_node=4),
    "mixed precision": explained(mp_policy=BF16),
    "int8 on the wire": explained(functools.partial(Loss, dim=256), mp_policy=INT8),
    "rows of an embedding": explained(
        functools.partial(Loss, vocab=4096), options={"embedding_rows": True}
    ),
    "tied weights": explained(functools.partial(Loss, tied=True)),
    "frozen block": explained(partly_frozen),
    "checkpointed": explained(checkpointed, rows(2, 16, 32)),
    "on the host": explained(offload_policy=shardc.CPUOffloadPolicy()),
    "no backward": explained(train=False),
    "graph break": explained(Broken),
    "budget that keeps gathered": explained(GATED, BATCH, memory_budget="1GB"),
    "budget that recomputes": within_6mb(offload_activations=False, offload_optimizer_state=False),
    "budget that saves on the host": within_6mb(offload_optimizer_state=False),
    "budget that moves state": within_6mb(offload_activations=False),
    "accumulated": ran(functools.partial(sharded, Loss), tokens(0, (4, 8)), passes=3),
    "tensor parallel": ran(tensor_parallel, tokens(0, (4, 8))),
}

REPORTS = ("resharded", "two copies", "int8 on the wire", "budget that recomputes", "checkpointed")
"""Cases whose reports are kept as well."""
