"""Blocks compiled by themselves, whose vectors lie in a bucket of the model (as on GPUs)."""

import copy

import pytest
import torch
from models import Stack, batch_of, check_parity, laid_out_for_gpus, seeded
from ranks import on_ranks
from torch import nn
from torch._dynamo.utils import counters
from torch.utils.checkpoint import checkpoint

from shardc import fully_shard
from shardc.runtime.watch.progress import progress


class _Inside(nn.Module):
    """A block that checkpoints its inside."""

    def __init__(self, block):
        super().__init__()
        self.block = block

    def forward(self, x):
        return checkpoint(self.block, x, use_reentrant=False)


def _inside(count):
    model = seeded(lambda: Stack(count))
    model.layers = nn.ModuleList(map(_Inside, model.layers))
    return model


def _sharded(model, mesh):
    with laid_out_for_gpus(least=1):
        return fully_shard(copy.deepcopy(model), mesh=mesh, units="auto")


def _compile_blocks(model, wrapped=False):
    torch._dynamo.reset()
    counters.clear()
    options = {"executor": "eager"}
    for index, layer in enumerate(model.layers):
        if wrapped:
            model.layers[index] = torch.compile(layer, backend="shardc", options=options)
        else:
            layer.compile(backend="shardc", options=options)
    return model


@pytest.mark.parametrize(("wrapped", "frames"), [(False, 1), (True, 12)])
@on_ranks(2)
def test_blocks_share_one_graph(mesh, wrapped, frames):
    """Dynamo guards on the slots that a wrapped block reads: it makes a graph for each block."""
    model = _compile_blocks(_sharded(seeded(lambda: Stack(12)), mesh), wrapped)
    for _ in range(2):
        before = progress.started
        model(**batch_of(0)).backward()
    assert counters["frames"]["ok"] == counters["frames"]["total"] == frames
    # 14 buckets are gathered, those of the 12 blocks again in the backward, and 14 reduced.
    assert progress.started - before == 40


@on_ranks(2)
def test_checkpoints_inside_blocks_read_the_bucket_of_the_model(mesh):
    plain = _inside(4)
    model = _compile_blocks(_sharded(plain, mesh))
    check_parity(plain, model, model, batch_of, mesh)
    before = progress.started
    model(**batch_of(0)).backward()
    assert counters["frames"]["ok"] == counters["frames"]["total"] == 1
    assert progress.started - before == 16


@on_ranks(2)
def test_a_vector_of_one_block_is_frozen(mesh):
    plain = seeded(lambda: Stack(3))
    model = _compile_blocks(_sharded(plain, mesh))
    check_parity(plain, model, model, batch_of, mesh)
    for index in (1, 0):  # the first block is as the graph was compiled, then no longer
        for each in (plain, model):
            each.layers[index].norm.weight.requires_grad_(False)
        check_parity(plain, model, model, batch_of, mesh)
    for each in (plain, model):
        each.layers[1].norm.weight.requires_grad_(True)
    check_parity(plain, model, model, batch_of, mesh)


@on_ranks(2)
def test_a_copy_reads_its_own_bucket(mesh):
    plain = seeded(lambda: Stack(3))
    model = _sharded(plain, mesh)
    other, plain_other = copy.deepcopy(model), copy.deepcopy(plain)
    for each in (other, plain_other):
        with torch.no_grad():
            each.layers[1].norm.bias.add_(1.0)
    _compile_blocks(model)
    for layer in other.layers:
        layer.compile(backend="shardc", options={"executor": "eager"})
    check_parity(plain, model, model, batch_of, mesh)
    check_parity(plain_other, other, other, batch_of, mesh)
    check_parity(plain, model, model, batch_of, mesh)


@pytest.mark.parametrize("moved", [False, True])
@on_ranks(2)
def test_gradients_wait_and_buckets_are_held(mesh, moved):
    plain = seeded(lambda: Stack(3))
    model = _compile_blocks(_sharded(plain, mesh))
    if moved:
        plain.double()
        model.double()
    batches = [batch_of(10 * seed + mesh.get_local_rank()) for seed in range(3)]
    for _ in range(2):
        model.set_reshard_after_backward(False)
        for batch in batches[:-1]:
            with model.no_sync():
                model(**batch).backward()
        model.set_reshard_after_backward(True)
        model(**batches[-1]).backward()
        for seed in range(3):
            for rank in range(mesh.size()):
                (plain(**batch_of(10 * seed + rank)) / mesh.size()).backward()
        for (name, p), q in zip(plain.named_parameters(), model.parameters(), strict=True):
            torch.testing.assert_close(q.grad.full_tensor(), p.grad, msg=name)
            assert p.grad.abs().sum() > 0
            with torch.no_grad():
                p.sub_(0.1 * p.grad)
                q.sub_(0.1 * q.grad)
            p.grad = q.grad = None
