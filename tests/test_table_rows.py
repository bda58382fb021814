"""Embeddings that fetch the rows they look up: exact, and nothing else is sent for them."""

from dataclasses import replace
from functools import partial
from unittest import mock

import pytest
import torch
from models import QUICK, Stack, Wire, check_gradients, full, mean_over_ranks, seeded, tokens
from ranks import mesh_of, on_ranks
from torch import Tensor, nn
from torch.distributed.fsdp import CPUOffloadPolicy

import shardc
from shardc import MixedPrecisionPolicy, fully_shard
from shardc.backend.agreements import Agreements
from shardc.backend.graph_plan import graph_plans
from shardc.passes.estimate.hardware import Link
from shardc.runtime.layout.layout import Param, plan_buckets

VOCAB, DIM = 203, 16


def _build(tied: bool = False) -> Stack:
    return Stack(2, dim=DIM, vocab=VOCAB, tied=tied).double()


def _shard(model: nn.Module, mesh, **kwargs) -> nn.Module:
    """With units for the embedding and for each block."""
    for unit in (model.embed, *model.layers):
        fully_shard(unit, mesh=mesh, **kwargs)
    return fully_shard(model, mesh=mesh, **kwargs)


def _compile(model, executor="eager", rows=True, **kwargs):
    options = {"executor": executor, "embedding_rows": rows}
    return torch.compile(model, backend="shardc", options=options, fullgraph=True, **kwargs)


def _kinds(call, *batch) -> list[str]:
    with Wire() as wire:
        call(*batch).backward()
    return [message.kind for message in wire.sent]


def _check(model, call, plain, mesh, batches=((2, 7), (2, 7), (3, 5)), vocab=VOCAB) -> None:
    """Three steps of SGD like the unsharded model's, every gradient compared."""
    rank = torch.distributed.get_rank()
    for seed, size in enumerate(batches):
        seed = seed + 10 * rank
        batch = tokens(seed, size, vocab), tokens(seed + 50, size, vocab)
        got, want = call(*batch), plain(*batch)
        torch.testing.assert_close(got, want)
        got.backward()
        want.backward()
        for (name, q), p in zip(model.named_parameters(), plain.parameters(), strict=True):
            assert (q.grad is None) == (p.grad is None) == (not p.requires_grad)
            if p.grad is None:
                continue
            exact = mean_over_ranks(p.grad, mesh)
            assert not torch.equal(exact, p.grad)  # ranks have batches of their own
            torch.testing.assert_close(full(q.grad), exact, msg=name)
            with torch.no_grad():
                p.sub_(0.1 * exact)
                q.sub_(0.1 * q.grad)
            p.grad = q.grad = None


@pytest.mark.parametrize("executor", ["eager", "inductor"])
@on_ranks(2)
def test_training(mesh, executor):
    _train(mesh, False, executor)


@on_ranks(3)
def test_a_tied_table_on_three_ranks(mesh):
    _train(mesh, True, "eager")


def _train(mesh, tied, executor):
    plain = seeded(lambda: _build(tied))
    model = _shard(seeded(lambda: _build(tied)), mesh)
    call = _compile(model, executor)
    _check(model, call, plain, mesh)
    batch = tokens(0, vocab=VOCAB), tokens(1, vocab=VOCAB)
    kinds = _kinds(call, *batch)
    assert kinds.count("all_to_all") == 5, kinds
    if executor == "inductor":
        return
    whole = _compile(_shard(seeded(lambda: _build(tied)), mesh), rows=False)
    whole(*batch).backward()
    dense = _kinds(whole, *batch)
    assert "all_to_all" not in dense, dense
    fewer = 0 if tied else 1
    for kind in ("all_gather", "reduce_scatter"):
        assert kinds.count(kind) == dense.count(kind) - fewer


class Looking(nn.Module):
    """Looks up rows of one table in two places, among them a row that gets no gradient."""

    def __init__(self, rows: int = VOCAB) -> None:
        super().__init__()
        self.embed = nn.Embedding(rows, DIM, padding_idx=-3)
        self.layers = nn.ModuleList([nn.Linear(DIM, DIM)])
        self.embed2 = nn.Linear(DIM, 1)

    def forward(self, ids: Tensor, targets: Tensor) -> Tensor:
        x = self.embed(ids).tanh() + self.layers[0](self.embed(targets.int()))
        return self.embed2(x).square().mean()


INT8 = MixedPrecisionPolicy(
    gather_wire_dtype=torch.int8, reduce_wire_dtype=torch.int8, wire_block=16
)


@pytest.mark.parametrize("case", ["twice", "offload", "kept", "frozen", "dynamic", "int8"])
@on_ranks(2)
def test_settings(mesh, case):
    build = (lambda: Looking().double()) if case == "twice" else _build
    plain, model = seeded(build), seeded(build)
    kwargs = {
        "kept": {"reshard_after_forward": False},
        "offload": {"offload_policy": CPUOffloadPolicy()},
    }.get(case, {})
    for each in (plain, model):
        each.embed.requires_grad_(case != "frozen")
    if case == "int8":  # the table would travel so, its rows do not
        for each in (plain, model):
            each.embed.float().register_forward_hook(lambda _, given, out: out.double())
        fully_shard(model.embed, mesh=mesh, mp_policy=INT8)
    for unit in (*model.layers, *([] if case == "int8" else [model.embed])):
        fully_shard(unit, mesh=mesh, **kwargs)
    model = fully_shard(model, mesh=mesh, **kwargs)
    call = _compile(model, dynamic=True if case == "dynamic" else None)
    if case == "frozen":
        batch = tokens(0, vocab=VOCAB), tokens(1, vocab=VOCAB)
        call(*batch).backward()
        assert _kinds(call, *batch).count("all_to_all") == 3
        model.zero_grad()
    batches = ((2, 7), (3, 5), (4, 9)) if case == "dynamic" else ((2, 7), (2, 7), (3, 5))
    _check(model, call, plain, mesh, batches)
    batch = tokens(0, (3, 5), VOCAB), tokens(1, (3, 5), VOCAB)
    assert "all_to_all" in _kinds(call, *batch)
    with torch.no_grad():
        torch.testing.assert_close(call(*batch), plain(*batch))


@on_ranks(4)
def test_among_copies(mesh):
    plain, copies = seeded(_build), mesh_of("cpu", (2, 2))
    model = _shard(seeded(_build), copies)
    call = _compile(model)
    _check(model, call, plain, mesh)
    kinds = _kinds(call, tokens(0, vocab=VOCAB), tokens(1, vocab=VOCAB))
    assert kinds.count("all_to_all") == 5 and kinds.count("all_reduce") == 4


@on_ranks(2)
def test_every_rank_has_a_size_of_its_own(mesh):
    """One rank compiles anew for it, and what ranks have agreed on stands."""
    plain, model = seeded(_build), _shard(seeded(_build), mesh)
    call = _compile(model)
    rank = torch.distributed.get_rank()
    _check(model, call, plain, mesh, ((2 + rank, 7), (2, 5 + rank), (2, 5 + rank), (1, 1 + rank)))


@on_ranks(2)
def test_what_is_sent(mesh):
    """As many rows as differ, in the dtype that is computed in; gradients in that of the sum."""
    policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32)
    model = _shard(seeded(lambda: _build().float()), mesh, mp_policy=policy)
    call = _compile(model)
    batch = tokens(0, (2, 40), vocab=9), tokens(1, (2, 40), vocab=9)
    call(*batch).backward()
    with Wire() as wire:
        call(*batch).backward()
    sent = [message.dtype for message in wire.sent if message.kind == "all_to_all"]
    # the host learns how many rows there are while segments are dealt out
    assert sent == [torch.bfloat16, torch.uint8, torch.bfloat16, torch.float32, torch.float32]


@on_ranks(2)
def test_gradients_that_wait_are_those_of_the_whole_table(mesh):
    plain, model = seeded(_build), _shard(seeded(_build), mesh)
    call, rank = _compile(model), torch.distributed.get_rank()
    batches = [(tokens(seed + rank, vocab=VOCAB), tokens(9, vocab=VOCAB)) for seed in (0, 20)]
    for number, batch in enumerate(batches):
        model.set_requires_gradient_sync(number == 1)
        call(*batch).backward()
        plain(*batch).backward()
    check_gradients(plain, model, mesh)


@on_ranks(2)
def test_an_id_that_is_no_row(mesh):
    model = _shard(seeded(_build), mesh)
    call = _compile(model)
    ids = tokens(0, vocab=VOCAB)
    for wrong in (VOCAB, -1):
        ids[1, 3] = wrong
        match = f"index {wrong} is out of range of an embedding of 203"
        with pytest.raises(IndexError, match=match):
            call(ids, ids.clamp(0, VOCAB - 1))


@on_ranks(4)
def test_the_wire_decides(mesh):
    """Few rows of a large table are fetched; where a table is small, or all of it is read, not."""
    wire = replace(QUICK, inside=Link(1e-7, 1e5), across=Link(1e-7, 1e5))
    sizes = (20000, (2, 7), True), (21000, (40, 300), False), (40, (2, 7), False)
    for rows, size, fetched in sizes:
        torch._dynamo.reset()
        model = _shard(seeded(partial(Looking, rows)), mesh)
        options = {"executor": "eager", "profile": wire}
        call = torch.compile(model, backend="shardc", options=options, fullgraph=True)
        batch = tokens(0, size, rows), tokens(1, size, rows)
        call(*batch).backward()
        assert ("all_to_all" in _kinds(call, *batch)) == fetched, (rows, size)


@on_ranks(2)
def test_all_ranks_fetch_or_none(mesh):
    """A rank with many more ids than the other has the whole table gathered."""
    plain, model = seeded(_build), _shard(seeded(_build), mesh)
    seen = []

    def other(self, group, what, facts, choice):
        seen.append((what, facts(True), choice))
        return frozenset([choice, "[false]"])

    call = _compile(model)
    with mock.patch.object(Agreements, "choices", other):
        _check(model, call, plain, mesh)
        assert "all_to_all" not in _kinds(call, *2 * [tokens(0, (3, 5), VOCAB)])
    asked = {choice for what, _, choice in seen if what == "which embeddings fetch rows"}
    assert asked == {"[true]"}


def test_what_a_plan_says():
    """A rank sends its part of the table and the rows; while it does, it holds them, and as many
    that arrive."""
    model, ids = nn.Sequential(nn.Embedding(4000, 64), nn.Linear(64, 8)), torch.arange(100)
    table, row = 4000 * 64 * 4, 64 * 4
    graph_plans.clear()
    reports = [
        shardc.explain(model, ids, world_size=8, units=nn.Embedding, profile=QUICK, options=options)
        for options in ({"executor": "eager"}, {"executor": "eager", "embedding_rows": False})
    ]
    fetched, whole = ({row.kind: row for row in report.collectives} for report in reports)
    assert {"fetch_rows", "return_rows"} == fetched.keys() - whole.keys()
    sent = fetched["fetch_rows"].nbytes
    assert sent == table / 8 + 100 * row + 4000
    assert fetched["return_rows"].nbytes == table / 8 + 100 * row
    forward, _, dense, _ = graph_plans
    place = next(i for i, name in enumerate(forward.liveness.nodes) if name.startswith("fetch"))
    assert 2 * sent <= forward.liveness.live[place] < 3 * sent
    assert dense.liveness.peak > table
    assert "fetch-rows" in str(reports[0]) or "fetch_rows" in str(reports[0])


@on_ranks(2)
def test_cuda_graphs_have_the_whole_table(mesh):
    """The host cannot wait inside of what is replayed."""
    model = _shard(seeded(lambda: _build().float()), mesh)
    options = {"embedding_rows": True, "inductor": {"triton.cudagraphs": True}}
    call = torch.compile(model, backend="shardc", options=options)
    batch = tokens(0, vocab=VOCAB), tokens(1, vocab=VOCAB)
    call(*batch).backward()
    assert "all_to_all" not in _kinds(call, *batch)


def test_a_large_table_is_alone():
    """So that nothing else has it gathered; small ones share a bucket."""
    params = [Param("embed", (5000, 64), is_table=True), Param("norm", (64,))]
    params += [Param("positions", (50, 64), is_table=True), Param("head", (5000, 64))]
    layouts = plan_buckets(params, 4, grain=2**17)
    names = [[slot.name for slot in layout.slots] for layout in layouts]
    assert names == [["embed"], ["norm", "positions", "head"]]
    assert layouts[0].segment % 64 == 0
    together = plan_buckets([*params[:3], Param("head", (50, 64))], 4, grain=2**22)
    assert len(together) == 1
