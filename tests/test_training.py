"""Training equals the unsharded run: loss, every gradient, every parameter."""

import pytest
import torch
from models import Stack, check_parity, compiled, seeded, shard_all, tokens
from ranks import on_ranks
from torch import nn

from shardc import ShardTensor, fully_shard, units_of


def _batch(seed):
    return {"tokens": tokens(seed), "targets": tokens(seed + 1)}


@pytest.mark.parametrize("executor", ["eager", "inductor"])
@on_ranks(2)
def test_parity(mesh, executor):
    plain, model = seeded(Stack), shard_all(seeded(Stack), mesh)
    check_parity(plain, model, compiled(model, executor, fullgraph=True), _batch, mesh)


@on_ranks(1, 2, 3)
def test_parity_uncompiled(mesh):
    plain, model = seeded(Stack), shard_all(seeded(Stack), mesh)
    check_parity(plain, model, model, _batch, mesh)


@on_ranks(3)
def test_parity_where_every_rank_holds_several_parameters(mesh):
    def build():
        return nn.Sequential(*(nn.Linear(5, 5) for _ in range(6)))

    plain, model = seeded(build), fully_shard(seeded(build), mesh=mesh)
    assert sum(p.to_local().numel() > 0 for p in model.parameters()) > 2
    for p, q in zip(plain.parameters(), model.parameters(), strict=True):
        assert torch.equal(q.full_tensor(), p)
    check_parity(
        plain, model, model, lambda seed: {"input": torch.ones(2, 5) * (1 + seed % 7)}, mesh,
        loss_of=lambda out: out.square().mean(),
    )  # fmt: skip


@on_ranks(1, 3)
def test_parity_tied(mesh):
    plain, model = (
        seeded(lambda: Stack(tied=True)),
        shard_all(seeded(lambda: Stack(tied=True)), mesh),
    )
    call = compiled(model, fullgraph=True)
    check_parity(plain, model, call, _batch, mesh)
    call(**_batch(7)).backward()
    head, embed = model.head.weight, model.embed.weight
    assert head is embed and isinstance(head.grad, ShardTensor) and head.grad is embed.grad
    buckets = [b for unit in units_of(model).values() for b in unit._shardc_unit.buckets]
    names = [slot.name for bucket in buckets for slot in bucket.layout.slots]
    assert len(names) == len(list(plain.parameters())), "a shared parameter has two places"
