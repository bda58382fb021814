"""Training equals the unsharded run: loss, every gradient, every parameter."""

import copy
from unittest import mock

import pytest
import torch
from models import (
    Block,
    Stack,
    batch_of,
    check_parity,
    compiled,
    laid_out_for_gpus,
    seeded,
    shard_all,
)
from ranks import on_ranks
from torch import nn

from shardc import ShardTensor, fully_shard, units_of
from shardc.sharding import unit_plan


@pytest.mark.parametrize("executor", ["eager", "inductor"])
@on_ranks(2)
def test_parity(mesh, executor):
    plain, model = seeded(Stack), shard_all(seeded(Stack), mesh)
    check_parity(plain, model, compiled(model, executor, fullgraph=True), batch_of, mesh)


@on_ranks(1, 3)
def test_parity_uncompiled(mesh):
    plain, model = seeded(Stack), shard_all(seeded(Stack), mesh)
    check_parity(plain, model, model, batch_of, mesh)


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
    plain = seeded(lambda: Stack(tied=True))
    model = shard_all(copy.deepcopy(plain), mesh)
    call = compiled(model, fullgraph=True)
    check_parity(plain, model, call, batch_of, mesh)
    call(**batch_of(7)).backward()
    head, embed = model.head.weight, model.embed.weight
    assert head is embed and isinstance(head.grad, ShardTensor) and head.grad is embed.grad
    buckets = [b for unit in units_of(model).values() for b in unit._shardc_unit.buckets]
    names = [slot.name for bucket in buckets for slot in bucket.layout.slots]
    assert len(names) == len(list(plain.parameters())), "a shared parameter has two places"


def _as_on_a_gpu(mesh, least, units="auto"):
    with laid_out_for_gpus(least):
        return fully_shard(seeded(Stack), mesh=mesh, units=units)


def _names(unit):
    return [[slot.name for slot in bucket.layout.slots] for bucket in unit._shardc_unit.buckets]


@pytest.mark.parametrize("way", ["uncompiled", "eager", "blocks"])
@on_ranks(2)
def test_parity_with_vectors_of_blocks_in_a_bucket_of_the_models(mesh, way):
    plain, model = seeded(Stack), _as_on_a_gpu(mesh, least=1)
    units = units_of(model)
    assert _names(units["layers.0"]) == _names(units["layers.1"]) == [["up.weight", "down.weight"]]
    vectors = [name for name, param in plain.named_parameters() if param.ndim < 2]
    assert len(vectors) == 6 and _names(units[""]) == [["embed.weight", "head.weight"], vectors]
    call = model
    if way == "eager":
        call = compiled(model, fullgraph=True)
    elif way == "blocks":
        for layer in model.layers:
            layer.compile(backend="shardc", options={"executor": "eager"})
    check_parity(plain, model, call, batch_of, mesh)
    block, x = model.layers[1], torch.ones(2, 18)  # outside of the forward that gathers its vectors
    block(x).sum().backward()
    plain.layers[1](x).sum().backward()
    for name, param in plain.layers[1].named_parameters():
        torch.testing.assert_close(block.get_parameter(name).full_tensor(), param)
        grad = block.get_parameter(name).grad.full_tensor()
        torch.testing.assert_close(grad, param.grad, msg=name)


@on_ranks(2)
def test_which_vectors_stay_with_their_blocks(mesh):
    """Those of small blocks, of blocks that the user names, and all on CPUs."""
    small = _as_on_a_gpu(mesh, least=2 * 18 * 37 + 1)
    named = _as_on_a_gpu(mesh, least=1, units=Block)
    with mock.patch.object(unit_plan, "_LARGE", 1):
        on_cpu = shard_all(seeded(Stack), mesh)
    for model in (small, on_cpu, named):
        (bucket,) = _names(units_of(model)["layers.0"])
        assert bucket == ["norm.weight", "norm.bias", "up.weight", "up.bias", "down.weight"]
