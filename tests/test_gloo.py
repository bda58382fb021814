"""What gloo's threads are given to do, and that it is the same as what was asked for."""

from collections import Counter

import pytest
import torch
import torch.distributed as dist
from models import Stack, compiled, seeded, shard_all, tokens
from ranks import on_ranks
from torch import nn

from shardc.runtime import compat

ops = torch.ops._c10d_functional
SHORT = {"c10d::_allgather_base_", "c10d::allreduce_", "c10d::broadcast_", "c10d::allgather_"}
"""Ops whose works have names of at most 15 characters, which are not on the heap."""


def _given_to_gloo(step):
    """How often the profiler shows each op of a process group in one step."""
    with torch.profiler.profile() as profile:
        step()
    names = (event.name for event in profile.events() if event.name.startswith("c10d::"))
    return Counter(names)


@pytest.mark.parametrize("executor", ["eager", "inductor", None])
@on_ranks(2)
def test_works_of_a_step_have_short_names(mesh, executor):
    model = shard_all(seeded(Stack), mesh)
    call = model if executor is None else compiled(model, executor)

    def step():
        call(tokens(1), tokens(2)).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)

    step()
    given = _given_to_gloo(step)
    reductions = given.pop("c10d::_reduce_scatter_base_", 0)
    reductions += given.pop("c10d::reduce_scatter_tensor_coalesced_", 0)  # all-reduces for gloo
    assert reductions == 3
    assert given.pop("c10d::_allgather_base_") == 5  # two blocks twice, the root once
    assert set(given) <= SHORT, given


@on_ranks(2)
def test_gathers_are_those_of_torch(mesh):
    name, rank = compat.group_name(mesh.get_group()), mesh.get_rank()
    flat, block = torch.arange(3.0), torch.arange(6).reshape(2, 3)
    values = [flat, block, torch.complex(flat, flat), torch.tensor(1.0), torch.empty(0)]
    for value in values:
        got = ops.wait_tensor(ops.all_gather_into_tensor(value + rank, 2, name))
        parts = [value + other for other in range(2)]
        assert torch.equal(got, torch.cat(parts) if value.dim() else torch.stack(parts))
        assert got.dtype == value.dtype
    given = _given_to_gloo(lambda: _gather_together([flat + rank, -flat + rank], name))
    assert given == {"c10d::_allgather_base_": 2}, given


def _gather_together(values, name):
    together = ops.all_gather_into_tensor_coalesced(values, 2, name)
    for got, value in zip(together, values, strict=True):
        base = value - dist.get_rank()
        assert torch.equal(ops.wait_tensor(got), torch.cat([base, base + 1]))
