"""Gathers across nodes first and inside of each then; reductions the other way: every gradient."""

import os
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from models import (
    QUICK,
    Stack,
    Wire,
    batch_of,
    check_parity,
    compiled,
    full,
    mean_over_ranks,
    seeded,
    shard_all,
    tokens,
)
from ranks import on_ranks
from test_backend import Graphs
from torch.distributed.fsdp import CPUOffloadPolicy
from torch.utils.checkpoint import checkpoint

import shardc
from shardc import MixedPrecisionPolicy, fully_shard
from shardc.passes.estimate.cost import node_seconds
from shardc.passes.nodes import FETCH, is_collective, is_wait, kind_of, waits_for
from shardc.runtime import compat

GATHER, REDUCE, EXCHANGE = "all_gather", "reduce_scatter", "all_to_all"


def _mesh():
    """Two nodes of as many ranks each."""
    return shardc.hierarchical_mesh(dist.get_world_size() // 2)


def _sent(call):
    with Wire() as forward:
        loss = call(**batch_of(dist.get_rank()))
    with Wire() as backward:
        loss.backward()
    return [[(m.kind, m.ranks) for m in wire.sent] for wire in (forward, backward)]


@on_ranks(4)
def test_the_mesh(mesh):
    with mock.patch.dict(os.environ, LOCAL_WORLD_SIZE="2"):
        by_default = shardc.hierarchical_mesh()
    made = shardc.hierarchical_mesh(2)
    assert by_default.get_group() is made.get_group(), "made once"
    assert made.mesh.tolist() == [0, 2, 1, 3]
    node, place = divmod(dist.get_rank(), 2)
    assert made.get_local_rank() == 2 * place + node
    ranks = fully_shard(seeded(Stack), mesh=made)._shardc_unit.buckets[0].ranks
    groups = ranks.shard, ranks.hierarchy.across, ranks.hierarchy.inside
    members = [dist.get_process_group_ranks(compat.resolve_group(group)) for group in groups]
    assert members == [[0, 2, 1, 3], [place, place + 2], [2 * node, 2 * node + 1]]
    code = fully_shard(seeded(Stack), mesh=made)._shardc_unit.buckets[0].key.code
    gathers, reductions = code.hierarchy, code.reduction.hierarchy
    assert {gathers.across, gathers.inside}.isdisjoint({reductions.across, reductions.inside})
    for size in (1, 4):
        assert shardc.hierarchical_mesh(size).mesh.tolist() == [0, 1, 2, 3]
    with pytest.raises(ValueError, match="4 ranks cannot be split into nodes of 3"):
        shardc.hierarchical_mesh(3)


@pytest.mark.parametrize("way", ["uncompiled", "eager", "inductor"])
@on_ranks(4)
def test_training_is_that_of_the_unsharded_model(mesh, way):
    plain, nodes = seeded(Stack), _mesh()
    model = shard_all(seeded(Stack), nodes)
    call = model if way == "uncompiled" else compiled(model, way, fullgraph=True)
    check_parity(plain, model, call, batch_of, nodes)


@on_ranks(4)
def test_what_is_sent(mesh):
    model = shard_all(seeded(Stack), _mesh(), reshard_after_forward=True)
    for call in (compiled(model, fullgraph=True), model):
        forward, backward = _sent(call)
        assert sorted(forward) == [(GATHER, 2)] * 6
        assert sorted(backward) == [(GATHER, 2)] * 6 + [(REDUCE, 2)] * 6


@on_ranks(4)
def test_compute_hides_both_steps(mesh):
    nodes = _mesh()
    model = shard_all(seeded(lambda: Stack(6)), nodes)
    options = {"executor": "eager", "profile": QUICK}
    call = torch.compile(model, backend="shardc", options=options, fullgraph=True)
    with Graphs() as graphs:
        call(**batch_of(0)).backward()
    for phase in ("forward", "backward"):
        (gm,) = [gm for kind, gm in graphs.seen if kind == phase]
        order = [node for node in gm.graph.nodes if node.op == "call_function"]
        computes = [node_seconds(node, QUICK) > 0 and not is_wait(node) for node in order]
        hidden = {GATHER: 0, REDUCE: 0}
        for start in filter(is_collective, order):
            (wait,) = waits_for(start)
            hidden[kind_of(start)] += any(computes[order.index(start) + 1 : order.index(wait)])
        assert hidden[GATHER] >= 5, (phase, hidden)
        if phase == "backward":  # of seven in two steps the last cannot be
            assert hidden[REDUCE] >= 10, hidden


INT8 = MixedPrecisionPolicy(
    gather_wire_dtype=torch.int8, reduce_wire_dtype=torch.int8, wire_block=32
)


@pytest.mark.parametrize("way", ["uncompiled", "eager", "inductor"])
@on_ranks(4)
def test_only_the_network_carries_quantised_sums(mesh, way):
    def build():
        return Stack(2, dim=64, vocab=64)

    batch = [tokens(seed + dist.get_rank(), vocab=64) for seed in (0, 50)]
    plain, model = seeded(build), shard_all(seeded(build), _mesh(), mp_policy=INT8)
    call = model if way == "uncompiled" else compiled(model, way, fullgraph=True)
    call(*batch).backward()
    model.zero_grad()
    with Wire() as wire:
        call(*batch).backward()
    plain(*batch).backward()
    sent = {(m.kind, m.ranks, m.dtype) for m in wire.sent}
    exact = {(GATHER, 2, torch.float32), (REDUCE, 2, torch.float32)}  # of vectors, or inside nodes
    assert sent == {*exact, (GATHER, 2, torch.int8), (EXCHANGE, 2, torch.int8)}
    off = []
    for p, q in zip(plain.parameters(), model.parameters(), strict=True):
        exact, arrived = mean_over_ranks(p.grad, mesh), full(q.grad)
        off.append(((arrived - exact).abs().max() / exact.abs().max()).item())
    assert 1e-4 < max(off) < 0.03, off


@on_ranks(4)
def test_a_memory_budget_and_hints(mesh):
    plain, nodes = seeded(Stack), _mesh()
    model = shard_all(seeded(Stack), nodes)
    for options in ({"memory_budget": "2MB"}, {"prefetch": 0}, {"prefetch": 2}):
        torch._dynamo.reset()
        options = {"executor": "eager", **options}
        call = torch.compile(model, backend="shardc", options=options, fullgraph=True)
        check_parity(plain, model, call, batch_of, nodes, steps=1)


@on_ranks(4)
def test_rows_of_tables(mesh):
    def build():
        return Stack(2, vocab=400)

    nodes = _mesh()
    model, plain = seeded(build), seeded(build)
    fully_shard([model.embed], mesh=nodes)
    shard_all(model, nodes)
    options = {"executor": "eager", "embedding_rows": True}
    call = torch.compile(model, backend="shardc", options=options, fullgraph=True)
    with Graphs() as graphs:
        check_parity(plain, model, call, batch_of, nodes)
    assert any(node.target is FETCH for _, gm in graphs.seen for node in gm.graph.nodes)


@on_ranks(4)
def test_checkpoints_are_those_of_one_step(mesh, tmp_path):
    model, other = shard_all(seeded(Stack), _mesh()), shard_all(seeded(Stack, 1), mesh)
    dcp.save(model.state_dict(), checkpoint_id=tmp_path)
    state = other.state_dict()
    dcp.load(state, checkpoint_id=tmp_path)
    for p, q, r in zip(
        model.parameters(), other.parameters(), seeded(Stack).parameters(), strict=True
    ):
        assert torch.equal(full(p), full(q)) and torch.equal(full(q), r)


SETTINGS = {
    "kept": {"reshard_after_forward": False},
    "to a node": {"reshard_after_forward": 2},
    "offload": {"offload_policy": CPUOffloadPolicy()},
    "own communicators": {},
    "checkpoints": {},
}


@pytest.mark.parametrize("way", ["uncompiled", "eager"])
@pytest.mark.parametrize("case", SETTINGS)
@on_ranks(4)
def test_settings(mesh, case, way):
    plain, nodes = seeded(Stack), _mesh()
    model = shard_all(seeded(Stack), nodes, **SETTINGS[case])
    if case == "own communicators":
        model.set_separate_reduce_scatter_group(True)
    if case == "checkpoints":
        for layer in model.layers:
            inner = layer.forward
            layer.forward = lambda x, inner=inner: checkpoint(inner, x, use_reentrant=False)
    call = model if way == "uncompiled" else compiled(model, fullgraph=True)
    check_parity(plain, model, call, batch_of, nodes)
    if case == "to a node" and way == "eager":
        _, backward = _sent(call)
        assert sorted(backward) == [(GATHER, 2)] * 3 + [(REDUCE, 2)] * 6, "across nodes once"
