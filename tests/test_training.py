"""Compiled training equals the unsharded run: loss, every gradient, every parameter."""

import pytest
from models import Stack, check_parity, compiled, seeded, shard_all, tokens
from ranks import on_ranks


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


@on_ranks(1, 3)
def test_parity_tied(mesh):
    plain, model = (
        seeded(lambda: Stack(tied=True)),
        shard_all(seeded(lambda: Stack(tied=True)), mesh),
    )
    check_parity(plain, model, compiled(model, fullgraph=True), _batch, mesh)
