"""Statistics of ShardTensors, and ops that need all of one, equal those of the full tensor."""

import copy
import logging
import re
import warnings
from collections.abc import Callable
from unittest import mock

import pytest
import torch
from models import compiled
from ranks import on_ranks
from test_optimizers import collectives_issued
from test_shard_tensor import assert_whole, plain, sharded
from torch import Tensor, nn
from torch.distributed.tensor import Shard, distribute_tensor

from shardc import ShardTensor, fully_shard, report
from shardc.runtime.tensor.shard_gathers import gather_counts
from shardc.runtime.tensor.whole_value import WholeValue

# The first is cut inside rows of all dims on 2 and on 3 ranks: intervals of several rectangles.
ODD = {"odd": (5, 3, 7), "before": (4,), "matrix": (61, 37), "vector": (23,), "scalar": ()}

STATISTICS: dict[str, Callable[..., Tensor]] = {
    "sum": lambda t, **d: t.sum(**d),
    "sum as double": lambda t, **d: t.sum(dtype=torch.float64, **d),
    "mean": lambda t, **d: t.mean(**d),
    "std": lambda t, **d: t.std(**d),
    "var": lambda t, **d: t.var(unbiased=False, **d),
    "var of 3": lambda t, **d: torch.var(t, correction=3, **d),
    "amax": lambda t, **d: t.amax(**d),
    "amin": lambda t, **d: t.abs().amin(**d),
    "any": lambda t, **d: (t > 2).any(**d),
    "all": lambda t, **d: (t > -2).all(**d),
    "count_nonzero": lambda t, **d: (t > 0).count_nonzero(
        **{k: v for k, v in d.items() if k == "dim"}
    ),
    **{
        f"norm {order}": lambda t, order=order, **d: torch.linalg.vector_norm(t, order, **d)
        for order in (2, 1, 3, 0, float("inf"), -float("inf"))
    },
    "torch.norm": lambda t, **d: torch.norm(t, **d),
}


def noise(shape: tuple[int, ...], dtype: torch.dtype = torch.float32) -> Tensor:
    values = torch.randn(shape, generator=torch.Generator().manual_seed(3)) * 3 + 1
    return values.to(dtype)


def filled(mesh, dtype: torch.dtype = torch.float32) -> tuple[dict, dict]:
    """Sharded parameters with noise in them, detached, and the same plain."""
    params = {name: p.detach() for name, p in sharded(mesh, ODD, dtype).items()}
    want = {name: noise(p.shape, dtype) for name, p in params.items()}
    for name, p in params.items():
        p.copy_(want[name])
    held = [p.to_local().numel() for p in params.values()]
    assert any(0 < n < p.numel() for n, p in zip(held, params.values(), strict=True))
    return params, want


def dims_of(tensor: Tensor) -> list[dict]:
    every = [{}]
    if tensor.dim():
        every += [{"dim": 0}, {"dim": -1, "keepdim": True}]
    if tensor.dim() > 1:
        every += [{"dim": (0, 1)}, {"dim": tuple(range(tensor.dim())), "keepdim": True}]
    if tensor.dim() > 2:
        every += [{"dim": (0, 2)}, {"dim": 1}]
    return every


@on_ranks(3)
def test_statistics(mesh):
    params, want = filled(mesh)
    before = +gather_counts.counts
    for label, call in STATISTICS.items():
        for name, p in params.items():
            q = want[name]
            for dims in dims_of(q):
                if label == "torch.norm" and isinstance(dims.get("dim"), tuple):
                    continue  # norms of matrices
                tell = f"{label} {name} {dims}"
                with torch.no_grad(), warnings.catch_warnings():  # a variance of one element
                    warnings.simplefilter("ignore")
                    expected = call(q, **dims)
                    got = call(p, **dims)
                assert type(got) in (Tensor, WholeValue) and got.dtype == expected.dtype, tell
                torch.testing.assert_close(
                    got, expected, equal_nan=True, msg=lambda m, t=tell: f"{t}: {m}"
                )
    assert +gather_counts.counts == before, "a statistic gathered"


@on_ranks(3)
def test_statistics_without_dims(mesh):
    params, want = filled(mesh)
    p, q = params["odd"], want["odd"]
    for call in (Tensor.max, Tensor.min, lambda t: t.abs().max(), lambda t: t.isnan().any()):
        assert torch.equal(call(p), call(q)) and type(call(p)) is WholeValue
    with collectives_issued(all_reduce=1):
        p.sum()
    with collectives_issued(all_reduce=2):
        p.std(dim=1)
    assert torch.equal(p, p) and torch.equal(p, q) and torch.equal(q, p)
    assert torch.allclose(p, q) and torch.allclose(q, p + 1e-7) and not torch.allclose(p, q + 1)
    q[4, 2, 6] = 0.5  # one element, which one rank has
    assert not torch.equal(p, q) and not torch.equal(p, q[0]) and not torch.equal(p[0], p[1])
    p[4, 2, 6] = float("nan")
    assert p.max().isnan() and p.amin(dim=0)[2, 6].isnan() and p.amax(dim=0).isnan().sum() == 1
    assert p.isnan().any() and p.isnan().count_nonzero() == 1


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64, torch.int64, torch.complex64])
@on_ranks(2)
def test_statistics_of_other_dtypes(mesh, dtype):
    params, want = filled(mesh, torch.float32)
    for name in ("odd", "scalar"):
        p, q = params[name].to(dtype), want[name].to(dtype)
        calls = [Tensor.sum, Tensor.count_nonzero, lambda t: t.sum(dim=0) if t.dim() else t.sum()]
        if dtype.is_floating_point:
            calls += [Tensor.mean, Tensor.std, Tensor.amax, lambda t: t.norm()]
        if dtype.is_complex:
            calls += [Tensor.mean, Tensor.var]
        if dtype == torch.int64:
            q = q + 2**60  # fp64 would round it
            p = p + 2**60
            calls = [Tensor.amax, Tensor.min, lambda t: (t - 2**60).sum()]
        for call in calls:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                got, expected = call(p), call(q)
            assert got.dtype == (
                torch.float32 if dtype == torch.bfloat16 and call is calls[-1] else expected.dtype
            )
            torch.testing.assert_close(got, expected, check_dtype=False, equal_nan=True)


@on_ranks(2)
def test_statistics_have_gradients(mesh):
    for call in (
        lambda t: t.sum(),
        lambda t: (t * t).sum() + t.mean() + (t + 1).sum(dim=0).square().sum(),
        lambda t: t.var(),
        lambda t: t.max() + t.amax(dim=0).sum(),
    ):
        p, q = sharded(mesh)["matrix"], plain()["matrix"]
        for t in (p, q):
            call(t).backward()
            call(t).backward()
        assert type(p.grad) is ShardTensor
        torch.testing.assert_close(p.grad.full_tensor(), q.grad)


# -- ops on gathered values --------------------------------------------------------------------

OPS: dict[str, Callable[[Tensor], object]] = {
    "mm": lambda t: t.mm(torch.ones(37, 2)),
    "matmul": lambda t: torch.ones(2, 61) @ t,
    "t": lambda t: t.t() * 2,
    "permute": lambda t: t.permute(1, 0) + 0,
    "slice": lambda t: t[::2].clone(),
    "select": lambda t: t[:, 1].clone(),
    "index": lambda t: t[[1, 2]],
    "mask": lambda t: t[torch.arange(61) > 50],
    "cat": lambda t: torch.cat([t, t]),
    "stack": lambda t: torch.stack([t, t]),
    "expand": lambda t: t.expand(2, 61, 37) + 0,
    "svdvals": torch.linalg.svdvals,
    "matrix_norm": lambda t: torch.linalg.matrix_norm(t, 2),
    "sort": lambda t: t.sort(dim=1)[1],
    "max along": lambda t: t.max(0)[1],
    "cumsum": lambda t: t.cumsum(0),
    "nonzero": lambda t: (t > 3).nonzero(),
    "median": lambda t: t.median(),
    "prod": lambda t: (t / t.abs().max()).prod(),
    "row": lambda t: t * torch.arange(37.0),
    "column": lambda t: torch.arange(61.0).view(61, 1) * t,
    "larger": lambda t: t + torch.ones(2, 61, 37),
    "other view": lambda t: t.view(-1) + t.flip(0).reshape(-1),
    "row of it": lambda t: t - t[3],
    "its mean row": lambda t: t / t.mean(dim=0),
    "kron": lambda t: torch.kron(t, torch.ones(2, 1)),
    "einsum": lambda t: torch.einsum("ij,ik->jk", t, t),
    "bytes": lambda t: t.view(torch.int32) + 1,
    "foreach_max": lambda t: torch._foreach_max([t, t])[0],
}


def as_full(value: object) -> object:
    return value.full_tensor() if isinstance(value, ShardTensor) else value


@on_ranks(2)
def test_ops_that_need_the_whole_tensor(mesh):
    params, want = filled(mesh)
    for label, call in OPS.items():
        got, expected = call(params["matrix"]), call(want["matrix"])
        assert got.shape == expected.shape and got.dtype == expected.dtype, label
        torch.testing.assert_close(as_full(got), expected, msg=lambda m, t=label: f"{t}: {m}")
    for label in ("row", "column", "its mean row"):  # cut, not gathered
        before = +gather_counts.counts
        assert type(OPS[label](params["matrix"])) is ShardTensor
        assert +gather_counts.counts == before
    assert params["scalar"].item() == want["scalar"].item()
    assert float(params["scalar"]) == float(want["scalar"])
    assert params["matrix"].t()[0].tolist() == want["matrix"].t()[0].tolist()
    assert params["matrix"].t().numpy().shape == (37, 61)
    assert repr(params["matrix"].t()) == repr(want["matrix"].t())
    assert type(params["matrix"] @ want["matrix"].t()) is Tensor
    with pytest.raises(NotImplementedError, match="bernoulli"):  # ranks could draw differently
        torch.bernoulli(params["matrix"])


WRITES: dict[str, Callable[[Tensor, Tensor], object]] = {
    "copy_": lambda t, x: t.copy_(x),
    "add_": lambda t, x: t.add_(x),
    "mul_ by a row": lambda t, x: t.mul_(x[0]),
    "copy_ of a row": lambda t, x: t.copy_(x[1]),
    "sub_ of a column": lambda t, x: t.sub_(x[:, :1]),
    "column": lambda t, x: t[:, 1].zero_(),
    "every other row": lambda t, x: t[::2].mul_(3),
    "corner": lambda t, x: t[1:4, 2:5].copy_(x[:3, :3]),
    "transposed": lambda t, x: t.t().copy_(x.t() * 2),
    "transposed twice": lambda t, x: t.t()[3].t().add_(5),
    "addmm_": lambda t, x: t.addmm_(x[:, :2], x[:2]),
    "index_fill_": lambda t, x: t.index_fill_(1, torch.tensor([0, 3]), 7.0),
    "index_copy_": lambda t, x: t.index_copy_(0, torch.tensor([2, 60]), x[:2]),
    "masked_scatter_": lambda t, x: t.masked_scatter_(x > 0, x),
    "out": lambda t, x: torch.mm(x[:, :2], x[:2], out=t),
    "of itself": lambda t, x: t.add_(t.flip(1)),
    "foreach": lambda t, x: torch._foreach_add_([t, t], [x, x[0] + x]),
    "data": lambda t, x: t.data[:, 2:4].fill_(-1),
}


@on_ranks(3)
def test_writes_of_whole_values_reach_the_parts(mesh):
    params, want = sharded(mesh, ODD), plain(ODD)
    p, q, x = params["matrix"], want["matrix"], noise((61, 37))
    with torch.no_grad():
        for label, write in WRITES.items():
            before, version = q.clone(), p.to_local()._version
            write(p, x)
            write(q, x)
            assert not torch.equal(before, q), label
            torch.testing.assert_close(p.full_tensor(), q.detach(), msg=lambda m, t=label: t + m)
            assert p.to_local()._version > version, label
            assert torch.equal(params["odd"].full_tensor(), want["odd"])
        column, same = p[:, 5], q[:, 5]
        p.mul_(2)
        q.mul_(2)
        torch.testing.assert_close(column + 0, same)  # gathered again
        full = torch.ones(61, 37)
        assert type(full.add_(p)) is Tensor and torch.equal(full, 1 + q)
        a, b = params["odd"], sharded(mesh, {"b": (2,), "odd": (5, 3, 7)})["odd"]
        assert a._shard_spec != b._shard_spec
        assert_whole(a + b, want["odd"] * 2)  # cut differently
    with pytest.raises(NotImplementedError, match="room for its shape only"):
        p.detach().resize_(3)
    with pytest.raises(RuntimeError, match="doesn't match the broadcast shape"):
        p.detach().copy_(torch.ones(2, 61, 37))


@on_ranks(2)
def test_gathered_ops_have_a_backward(mesh):
    p = sharded(mesh)["matrix"]
    x = torch.full((37, 2), 1.0 + mesh.get_local_rank(), requires_grad=True)
    (p @ x).sum().backward(inputs=[x])  # that of the plain operand is right
    torch.testing.assert_close(x.grad, p.full_tensor().sum(0)[:, None].expand(37, 2))
    (p @ x).sum().backward()
    assert_whole(p.grad, torch.full((61, 37), 2 * 1.5))  # the mean over the ranks


@on_ranks(2)
def test_gathers_are_counted_and_warned_of(mesh):
    p = sharded(mesh)["matrix"]
    optimizer = torch.optim.SGD([p], lr=0.0)
    with (
        mock.patch.object(gather_counts, "counts", type(gather_counts.counts)()),
        mock.patch.object(gather_counts, "_seen", {}),
        mock.patch.object(logging.getLogger("shardc"), "debug") as debug,
        mock.patch.object(logging.getLogger("shardc"), "isEnabledFor", lambda level: True),
        warnings.catch_warnings(record=True) as told,
    ):
        warnings.simplefilter("always")
        for step in range(5):
            for _ in range(2):
                p.detach().mm(torch.ones(37, 1))
            assert len(told) == (step >= 2)  # once, in the third step
            optimizer.step()
        assert gather_counts.counts == {"aten.mm.default": 10}
        assert debug.call_count == 10
    said = r"aten\.mm\.default gathers .* in every step.*test_whole_tensors\.py:"
    assert re.search(said, str(told[0].message))


@on_ranks(2)
def test_report_counts_gathers(mesh):
    model = fully_shard(nn.Linear(4, 4), mesh=mesh)
    call = compiled(model)
    with mock.patch.object(gather_counts, "counts", type(gather_counts.counts)()):
        call(torch.ones(2, 4)).sum().backward()
        assert not any(f.kind == "gathered for an op" for f in report(call).findings)
        with torch.no_grad():
            model.weight @ model.weight
        found = [f for f in report(call).findings if f.kind == "gathered for an op"]
    assert len(found) == 1 and "aten.mm.default once" in found[0].what, found


@on_ranks(2)
def test_what_would_go_wrong_on_other_ranks_is_refused(mesh):
    p = sharded(mesh)["matrix"]
    with pytest.raises(ValueError, match="do you want to call `redistribute` instead"):
        distribute_tensor(p.detach(), mesh, [Shard(0)])
    with pytest.raises(NotImplementedError):
        torch.distributed.broadcast(p.detach(), 0)


@on_ranks(2)
def test_muon_on_shards_is_exact(mesh):
    torch.manual_seed(0)
    want = nn.Linear(37, 61, bias=False)
    model = fully_shard(copy.deepcopy(want), mesh=mesh)
    assert isinstance(model.weight, ShardTensor)
    optimizers = [torch.optim.Muon(m.parameters(), lr=0.1) for m in (want, model)]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for step in range(3):
            grad = noise((61, 37)) + step
            want.weight.grad = grad.clone()
            model.weight.grad = torch.empty_like(model.weight.detach()).copy_(grad)
            for optimizer in optimizers:
                optimizer.step()
    got = model.weight.full_tensor()
    torch.testing.assert_close(got, want.weight.detach(), rtol=1e-5, atol=1e-5)
