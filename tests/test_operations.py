"""Operations around a step: each row of `operations` is equal to plain torch, or refused."""

import warnings

import pytest
import torch
from models import full, seeded
from operations import OPERATIONS, PAGE, WIDTH, Model, Operation, Side, page
from ranks import on_ranks

from shardc import fully_shard

SERIES: dict[str, list[Operation]] = {}
"""The rows that one model goes through, a step after each: what is early or last is alone."""
for _row in OPERATIONS:
    SERIES.setdefault(_row.name if _row.early or _row.last else _row.group, []).append(_row)
CASES = [
    *((way, name) for way in ("uncompiled", "blocks", "eager") for name in SERIES),
    *(("inductor", name) for name in ("Copies", "Other values", "In the forward")),
    ("inductor", "Hooks, flags, optimizers"),
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
    """A step on the mean over `batches`: every gradient."""
    side.optimizer.zero_grad()
    for x in batches:
        loss = side.model(x.to(side.x.dtype))
        (loss / len(batches)).backward()
    grads = [p.grad for p in side.model.parameters()]
    side.optimizer.step()
    return [torch.zeros(()) if g is None else full(g).clone() for g in grads]


def _run(side: Side, rows: list[Operation], batches: list[torch.Tensor]) -> dict:
    """What each row and the steps around it give, by the row's name."""
    found = {"before": [] if rows[0].early else _step(side, batches)}
    for row in rows:
        side.seen.clear()
        if not row.refused:
            row.run(side)
        elif side.is_sharded:
            with pytest.raises((RuntimeError, NotImplementedError), match=row.refused):
                row.run(side)
            if row.early or row.last:
                return {}
        found[row.name] = [full(value).detach() for value in side.seen] + _step(side, batches)
    found["after"] = [*_step(side, batches), *side.whole().values()]
    return found


@pytest.mark.parametrize(("way", "name"), CASES, ids=lambda text: text)
@on_ranks(2)
def test_operations(mesh, way, name):
    rows, rank = SERIES[name], mesh.get_local_rank()
    besides = [row.beside for row in rows if row.beside]

    def beside(model, x):
        return sum(each(model, x) for each in besides)

    plain, model = seeded(Model), seeded(Model)
    for each in (plain, model) if besides else ():
        each.beside = beside.__get__(each)
    model = _sharded(model, mesh, way)
    batches = [_batch(r) for r in range(mesh.size())]
    sides = [
        Side(m, torch.optim.SGD(m.parameters(), lr=0.1), batches[rank].clone())
        for m in (model, plain)
    ]
    with warnings.catch_warnings(), torch._dynamo.config.patch(recompile_limit=64):
        warnings.simplefilter("ignore", UserWarning)
        got = _run(sides[0], rows, [batches[rank]])
        if not got:
            return
        want = _run(sides[1], rows, batches)
    before = seeded(Model).head.weight
    assert not torch.equal(want["after"][-2].to(before.dtype), before), "nothing was trained"
    for row, values in want.items():
        largest = max((b.abs().max().item() for b in values), default=0.0)
        assert largest < 1e3, f"{row} diverges to {largest}: on other CPUs it would round otherwise"
        for index, (a, b) in enumerate(zip(got[row], values, strict=True)):
            torch.testing.assert_close(a, b, msg=lambda m, n=row, i=index: f"{n}, value {i}: {m}")


def test_the_page_is_the_table():
    assert PAGE.read_text() == page(), "run: PYTHONPATH=tests python -m operations --write"
