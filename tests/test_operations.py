"""Operations around a step: each row of `operations` is equal to plain torch, or refused."""

import copy
import warnings

import pytest
import torch
from models import full, seeded
from operations import OPERATIONS, PAGE, WIDTH, Model, Operation, Side, page
from ranks import on_ranks

from shardc import fully_shard

ROWS = {row.name: index for index, row in enumerate(OPERATIONS)}
CASES = [
    pytest.param(way, name, id=f"{way}-{name}")
    for way in ("uncompiled", "blocks", "eager", "inductor")
    for name in ROWS
]


def _batch(rank: int) -> torch.Tensor:
    return torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(rank)) + rank


def _sharded(model: Model, mesh, way: str) -> Model:
    for layer in model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    if way == "blocks":
        for layer in model.layers:
            layer.compile(backend="shardc", options={"executor": "eager"})
    elif way != "uncompiled":
        model.compile(backend="shardc", options={"executor": way})
    return model


def _step(side: Side, batches: list[torch.Tensor]) -> list[torch.Tensor]:
    """A step on the mean over `batches`: the last loss, and every gradient."""
    side.optimizer.zero_grad()
    for x in batches:
        loss = side.model(x.to(side.x.dtype))
        (loss / len(batches)).backward()
    grads = [p.grad for p in side.model.parameters()]
    side.optimizer.step()
    return [torch.zeros(()) if g is None else full(g).clone() for g in grads]


def _run(side: Side, row: Operation, batches: list[torch.Tensor]) -> list[torch.Tensor]:
    found = []
    if not row.early:
        found += _step(side, batches)
    row.run(side)
    found += [full(value).detach() for value in side.seen]
    found += _step(side, batches)
    found += _step(side, batches)
    return [*found, *side.whole().values()]


@pytest.mark.parametrize(("way", "name"), CASES)
@on_ranks(2)
def test_an_operation(mesh, way, name):
    row, rank = OPERATIONS[ROWS[name]], mesh.get_local_rank()
    plain = seeded(Model)
    plain.beside = row.beside and row.beside.__get__(plain)
    model = copy.deepcopy(seeded(Model))
    model.beside = row.beside and row.beside.__get__(model)
    model = _sharded(model, mesh, way)
    batches = [_batch(r) for r in range(mesh.size())]
    sides = [
        Side(m, torch.optim.SGD(m.parameters(), lr=0.1), batches[rank].clone())
        for m in (model, plain)
    ]
    if row.refused:
        with pytest.raises((RuntimeError, NotImplementedError), match=row.refused):
            _run(sides[0], row, [batches[rank]])
        return
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        got = _run(sides[0], row, [batches[rank]])
        want = _run(sides[1], row, batches)
    assert len(got) == len(want)
    before = seeded(Model).head.weight
    assert not torch.equal(want[-2].to(before.dtype), before), "nothing was trained"
    largest = max(b.abs().max().item() for b in want)
    assert largest < 1e3, f"{name} diverges to {largest}: on other CPUs it would round otherwise"
    for index, (a, b) in enumerate(zip(got, want, strict=True)):
        torch.testing.assert_close(a, b, msg=lambda m, i=index: f"{name}, value {i}: {m}")


def test_the_page_is_the_table():
    assert PAGE.read_text() == page(), "run: PYTHONPATH=tests python -m operations --write"
