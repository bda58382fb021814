"""Sharding beside other kinds of parallelism, on four ranks, against the unsharded model.

Tensor parallelism is in test_tensor_parallel.
"""

import contextlib
import copy

import pytest
import torch
import torch.nn.functional as F
from models import Block, Wire, compiled, full, seeded
from ranks import mesh_of, on_ranks
from torch import nn
from torch.distributed._composable.replicate import replicate
from torch.distributed._functional_collectives import (
    all_gather_tensor_autograd,
    all_to_all_single_autograd,
)
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe
from torch.distributed.pipelining._backward import stage_backward_input
from torch.distributed.pipelining.schedules import (
    ScheduleDualPipeV,
    ScheduleInterleaved1F1B,
    ScheduleInterleavedZeroBubble,
    ScheduleZBVZeroBubble,
)

from shardc import ShardTensor, fully_shard
from shardc.integrations.pipelining import ShardedStage

ROWS, WIDTH = 8, 18


def loss_of(output, target):
    return (output - target).square().mean()


def rows(step, rank):
    generator = torch.Generator().manual_seed(100 * step + rank)
    return torch.randn(2, ROWS, WIDTH, generator=generator).unbind()


def check_steps(data, plain, model, train, own_name=lambda name: name):
    """Two steps: `train(x, target)` gives each parameter of `model` its gradient in `plain`.

    `plain` reads the rows of all ranks of the mesh `data`; `own_name` is what a parameter of
    `plain` is called in `model`, if it is there.
    """
    assert any(isinstance(p, ShardTensor) for p in model.parameters())
    for step in range(2):
        for rank in range(data.size()):
            x, target = rows(step, rank)
            (loss_of(plain(x), target) / data.size()).backward()
        train(*rows(step, data.get_local_rank()))
        wanted = {own_name(name): p.grad for name, p in plain.named_parameters()}
        for name, p in model.named_parameters():
            torch.testing.assert_close(
                full(p.grad), wanted[name], msg=lambda m, n=name: f"{n}: {m}"
            )
        plain.zero_grad()
        for p in model.parameters():
            p.grad = None


def backward(model, executor):
    """What trains the model alone for a step, compiled if there is an executor."""
    run = compiled(model, executor) if executor else model
    return lambda x, target: loss_of(run(x), target).backward()


@pytest.mark.parametrize("executor", [None, "eager"])
@on_ranks(4)
def test_replicate_around_a_sharded_module(mesh, executor):
    plain = seeded(lambda: nn.Sequential(Block(WIDTH), Block(WIDTH)))
    model = copy.deepcopy(plain)
    fully_shard(model[1], mesh=mesh)
    check_steps(mesh, plain, model, backward(replicate(model), executor))


def reductions_of(data, plain, model, step):
    """How many units `step` reduces, the second time: the first compiles. Checks both steps."""
    sent = []

    def train(x, target):
        with Wire() if sent else contextlib.nullcontext(Wire()) as wire:
            step(x, target)
        sent.append([message.kind for message in wire.sent].count("reduce_scatter"))

    check_steps(data, plain, model, train)
    return sent[-1]


def four_blocks():
    return nn.Sequential(*(Block(WIDTH) for _ in range(4)))


@pytest.mark.parametrize(
    "kind, schedule, executor",
    [
        (PipelineStage, ScheduleGPipe, None),
        (PipelineStage, Schedule1F1B, None),
        (PipelineStage, Schedule1F1B, "eager"),
        (ShardedStage, ScheduleGPipe, None),
        (ShardedStage, ScheduleGPipe, "eager"),
        (ShardedStage, Schedule1F1B, "eager"),
    ],
)
@on_ranks(4)
def test_stages_of_a_pipeline(mesh, kind, schedule, executor):
    grid = mesh_of("cpu", (2, 2), mesh_dim_names=("stage", "data"))
    place = grid.get_local_rank("stage")
    plain = seeded(four_blocks)
    part = copy.deepcopy(plain[2 * place : 2 * place + 2])
    fully_shard(part, mesh=grid["data"], units="auto")
    if executor:
        part.compile(backend="shardc", options={"executor": executor})
    stage = kind(part, place, 2, torch.device("cpu"), group=grid.get_group("stage"))
    pipeline = schedule(stage, n_microbatches=4, loss_fn=loss_of)

    def step(x, target):
        pipeline.step(x) if place == 0 else pipeline.step(target=target)

    reductions, blocks = reductions_of(grid["data"], plain, part, step), 2
    if kind is ShardedStage or not executor:
        # compiled, a forward takes what waits: GPipe has none waiting at its last forward
        rounds = 2 if executor and schedule is ScheduleGPipe else 1
        assert rounds <= reductions <= rounds * blocks
    else:
        assert reductions >= 4


ROUND, ZIGZAG = ((0, 2), (1, 3)), ((0, 3), (1, 2))
"""The stages of each place, of four."""


@pytest.mark.parametrize(
    "schedule, places, pieces, executor",
    [
        (ScheduleInterleaved1F1B, ROUND, 4, None),
        (ScheduleInterleavedZeroBubble, ROUND, 4, None),
        (ScheduleInterleavedZeroBubble, ROUND, 4, "eager"),
        (ScheduleZBVZeroBubble, ZIGZAG, 4, None),
        (ScheduleDualPipeV, ZIGZAG, 8, None),
    ],
)
@on_ranks(4)
def test_several_stages_a_rank(mesh, schedule, places, pieces, executor):
    """Schedules of two stages a rank, also those that ask for a backward in two halves."""
    grid = mesh_of("cpu", (2, 2), mesh_dim_names=("stage", "data"))
    own = places[grid.get_local_rank("stage")]
    plain = seeded(four_blocks)
    parts = nn.ModuleDict({str(number): copy.deepcopy(plain[number]) for number in own})
    for part in parts.values():
        fully_shard(part, mesh=grid["data"])
        if executor:
            part.compile(backend="shardc", options={"executor": executor})
    device, group = torch.device("cpu"), grid.get_group("stage")
    stages = [ShardedStage(parts[str(n)], n, 4, device, group=group) for n in own]
    pipeline = schedule(stages, n_microbatches=pieces, loss_fn=loss_of)

    def step(x, target):
        pipeline.step(*([x] if 0 in own else []), target=target if 3 in own else None)

    reductions = reductions_of(grid["data"], plain, parts, step)
    assert len(stages) <= reductions <= 2 * len(stages)


@on_ranks(2)
def test_a_split_backward_needs_a_sharded_stage(mesh):
    """`PipelineStage` would lose gradients: those of weights that it does not find in the graph."""
    part, x = fully_shard(Block(WIDTH), mesh=mesh), torch.ones(2, WIDTH, requires_grad=True)
    with pytest.raises(RuntimeError, match=r"shardc\.integrations\.pipelining\.ShardedStage"):
        stage_backward_input([part(x)], [torch.ones(2, WIDTH)], [x], part.parameters())
    weight = next(part.parameters())
    assert isinstance(weight.view_as(weight), ShardTensor)


class Experts(nn.Module):
    """Rows go to the expert that their place names, and come back."""

    group = None

    def __init__(self):
        super().__init__()
        self.experts = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2))

    def forward(self, x):
        if self.group is None:
            parts = zip(self.experts, x.chunk(2), strict=True)
            return x + torch.cat([expert(part) for expert, part in parts])
        (expert,) = self.experts
        there = all_to_all_single_autograd(x, None, None, self.group)
        return x + all_to_all_single_autograd(expert(there), None, None, self.group)


@pytest.mark.parametrize("executor", [None, "eager"])
@on_ranks(4)
def test_experts_on_ranks_of_their_own(mesh, executor):
    grid = mesh_of("cpu", (2, 2), mesh_dim_names=("data", "expert"))
    own = grid.get_local_rank("expert")
    plain = seeded(lambda: nn.Sequential(Block(WIDTH), Experts(), Block(WIDTH)))
    model = copy.deepcopy(plain)
    model[1].experts, model[1].group = model[1].experts[own : own + 1], grid.get_group("expert")
    fully_shard(model[1], mesh=grid["data"]).set_gradient_divide_factor(mesh.size())
    fully_shard(model, mesh=mesh)

    def own_name(name):
        if f"experts.{1 - own}" in name:
            return "on other ranks"
        return name.replace(f"experts.{own}", "experts.0")

    check_steps(mesh, plain, model, backward(model, executor), own_name)


class Attention(nn.Module):
    """Attention over a sequence, `(rows, WIDTH)`, whose parts lie on the ranks of a group."""

    group = None

    def __init__(self):
        super().__init__()
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)

    def forward(self, x):
        query, key, value = self.qkv(x).chunk(3, dim=-1)
        if self.group is not None:
            key, value = (
                all_gather_tensor_autograd(t.contiguous(), 0, self.group) for t in (key, value)
            )
        return x + F.scaled_dot_product_attention(query[None], key[None], value[None])[0]


@pytest.mark.parametrize("executor", [None, "eager"])
@on_ranks(4)
def test_a_sequence_in_parts(mesh, executor):
    grid = mesh_of("cpu", (2, 2), mesh_dim_names=("data", "context"))
    plain = seeded(lambda: nn.Sequential(Block(WIDTH), Attention(), Block(WIDTH)))
    model = copy.deepcopy(plain)
    model[1].group = grid.get_group("context")
    for part in (model[1], model):
        fully_shard(part, mesh=mesh)  # the ranks of both dims hold the same parameters
    own, step = grid.get_local_rank("context"), backward(model, executor)
    check_steps(
        grid["data"], plain, model, lambda x, target: step(x.chunk(2)[own], target.chunk(2)[own])
    )
