"""ShardTensor: initialisers exactly as unsharded, views and copies, refusals by name, versions."""

import copy
import pickle
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
import torch
from models import compiled
from ranks import on_ranks
from torch import Tensor, nn

from shardc import ShardTensor, fully_shard, strict
from shardc.runtime.tensor.shard_spec import ShardSpec
from shardc.runtime.tensor.whole_value import WholeValue

SHAPES = {
    "conv": (8, 6, 3, 3), "matrix": (61, 37), "wide": (5, 300), "row": (1, 9), "vector": (23,),
    "short": (2,), "scalar": (), "none": (0, 4),
}  # fmt: skip
"""Two ranks cut the matrix, three cut it and the wide one; the small ones are on the last rank."""
CUT = {"conv": (8, 6, 3, 3)}


class Holder(nn.Module):
    """Parameters of given shapes, counting up, so that every element has a value of its own."""

    def __init__(self, shapes: dict[str, tuple[int, ...]], dtype: torch.dtype) -> None:
        super().__init__()
        for name, shape in shapes.items():
            count = torch.arange(torch.Size(shape).numel()) % 251 + 1
            self.register_parameter(name, nn.Parameter(count.view(shape).to(dtype)))


def sharded(mesh, shapes=None, dtype=torch.float32) -> dict[str, ShardTensor]:
    """Sharded parameters by name. Reading them from the dict keeps their module alive."""
    module = fully_shard(Holder(shapes or SHAPES, dtype), mesh=mesh)
    params = dict(module.named_parameters())
    assert all(type(p) is ShardTensor and isinstance(p, nn.Parameter) for p in params.values())
    return params


def plain(shapes=None, dtype=torch.float32) -> dict[str, nn.Parameter]:
    return dict(Holder(shapes or SHAPES, dtype).named_parameters())


def assert_whole(shard: Tensor, want: Tensor, label: str = "") -> None:
    """`shard` is sharded, its metadata is that of `want`, and its value equals it exactly."""
    assert type(shard) is ShardTensor, label
    assert (shard.shape, shard.dtype, shard.device) == (want.shape, want.dtype, want.device), label
    assert torch.equal(shard.full_tensor(), want.detach()), label


# -- what it is -----------------------------------------------------------------------------------


@on_ranks(1, 2, 3)
def test_attributes(mesh):
    rank, world = mesh.get_local_rank(), mesh.size()
    params, want = sharded(mesh), plain()
    held = {name: p.to_local().flatten() for name, p in params.items()}
    for name, p in params.items():
        assert_whole(p, want[name], name)
        start, stop = p._shard_spec.interval()
        assert torch.equal(held[name], want[name].detach().flatten()[start:stop]), name
        assert p.stride() == want[name].stride() and p.is_contiguous() and p.is_leaf
        assert p.requires_grad and p.grad is None
        expected = (
            f"ShardTensor(shape={tuple(p.shape)}, dtype=torch.float32, device=cpu, rank {rank} of "
            f"{world} holds elements [{start}, {stop}) of {p.numel()}: {held[name].detach()})"
        )
        assert repr(p) == expected
    if world > 1:
        assert held["matrix"].numel() < 61 * 37
        assert (held["matrix"].numel() == 0) == (rank == 2)
        assert (held["vector"].numel(), held["scalar"].numel()) == (
            (23, 1) if rank == world - 1 else (0, 0)
        )
    base = params["matrix"].to_local()
    assert all(x.untyped_storage()._cdata == base.untyped_storage()._cdata for x in held.values())


@on_ranks(2)
def test_requires_grad(mesh):
    p = sharded(mesh)["matrix"]
    p.requires_grad = False
    assert not p.requires_grad
    assert p.requires_grad_() is p and p.requires_grad
    doubled = p * 2
    assert doubled.requires_grad and not doubled.is_leaf
    with pytest.raises(RuntimeError, match="leaf"):
        doubled.requires_grad = False
    p.grad = torch.ones_like(p)
    p.grad = None
    assert p.grad is None
    with pytest.raises(RuntimeError, match="size"):
        p.grad = torch.ones(3)


@on_ranks(2)
def test_refuses_what_would_part_it_from_its_segment(mesh):
    p = sharded(mesh)["matrix"]
    with pytest.raises(RuntimeError, match=r"\.data of parameter 'matrix'.*\(2,\).*its shape only"):
        p.data = torch.zeros(2)
    for save in (pickle.dumps, copy.copy, lambda x: torch.save({"x": x}, "/dev/null")):
        with pytest.raises(RuntimeError, match=r"parameter 'matrix'.*state_dict\(\).*full_tensor"):
            save(p)
    again = pickle.loads(pickle.dumps(p.detach()))
    assert_whole(again, p.full_tensor())
    copied = copy.deepcopy({"x": p.detach()})["x"]
    assert_whole(copied, p.full_tensor())
    copied.zero_()
    copy.deepcopy(p).data.zero_()
    assert p.full_tensor().any()


# -- views, copies, arithmetic --------------------------------------------------------------------


@on_ranks(3)
def test_elementwise(mesh):
    params, want = sharded(mesh), plain()
    with torch.no_grad():
        for name, p in params.items():
            q, other = want[name], torch.rand(p.shape)
            assert_whole(p + 1, q + 1, name)
            assert_whole(p * torch.tensor(0.5), q * 0.5, name)
            assert_whole(p.lerp(p * 2, 0.25), q.lerp(q * 2, 0.25), name)
            assert_whole(torch.where(p > 3, p, 0.0), torch.where(q > 3, q, 0.0), name)
            assert_whole(p - other, q - other, name)
            assert_whole(other / p, other / q, name)
            assert_whole(p == 5, q == 5, name)
            assert_whole(torch.zeros_like(p), torch.zeros_like(q), name)
            assert_whole(
                torch.full_like(p, 7, dtype=torch.int32), torch.full_like(q, 7).int(), name
            )
            assert_whole(p.clone(), q, name)
            assert_whole(p.double(), q.double(), name)
            assert_whole(p.detach(), q, name)
            assert_whole(torch.frexp(p)[1], torch.frexp(q)[1], name)
            assert_whole(torch.maximum(p, p + 1, out=torch.empty_like(p)), q + 1, name)
            assert_whole(p.masked_fill(p > 4, 0.0), q.masked_fill(q > 4, 0.0), name)
        matrix, q = params["matrix"], want["matrix"]
        for step in (
            lambda x: x.lerp_(x.detach() * 3, 0.5),
            lambda x: x.copy_(torch.arange(61 * 37).view(37, 61).t()),  # another dtype and stride
            lambda x: x.addcdiv_(x, x + 2, value=-0.1),
            lambda x: x.masked_fill_(x > 4, -1.0),
            lambda x: x.clamp_(-0.5, 3).ge_(1),
            lambda x: x.fill_(7),
            lambda x: x.zero_(),
        ):
            assert step(matrix) is matrix
            step(q)
            assert_whole(matrix, q)


@on_ranks(2)
def test_types_promote_as_unsharded(mesh):
    shapes = {"matrix": (4, 5), "scalar": ()}
    params, want = sharded(mesh, shapes, torch.bfloat16), plain(shapes, torch.bfloat16)
    for name, p in params.items():
        for other in (torch.tensor(0.3), torch.full((1,) * p.dim(), 0.3), torch.full(p.shape, 0.3)):
            assert_whole(p.detach() * other, want[name].detach() * other, name)
        for number in (2, 0.3):
            assert_whole(p.detach() * number, want[name].detach() * number, name)


@on_ranks(3)
def test_views(mesh):
    p, q = sharded(mesh, CUT)["conv"].detach(), plain(CUT)["conv"].detach()
    assert 0 < p.to_local().numel() < 432
    for view in (
        lambda x: x.view(-1), lambda x: x.view(48, 9), lambda x: x.flatten(1), lambda x: x[None],
        lambda x: x[:, None].squeeze(), lambda x: x.reshape(6, -1), lambda x: x[3], lambda x: x[-1],
        lambda x: x[2:5], lambda x: x[1:-2][1], lambda x: x[5:3], lambda x: x[4][1:],
        lambda x: x.chunk(2)[1], lambda x: x.unbind()[2],
    ):  # fmt: skip
        assert_whole(view(p), view(q))
    p[3].fill_(-1)
    p.view(16, 27)[10:12].mul_(2)
    q[3].fill_(-1)
    q.view(16, 27)[10:12].mul_(2)
    assert_whole(p, q)
    embedding = fully_shard(nn.Embedding(11, 3, padding_idx=4), mesh=mesh)
    embedding.weight.data[4].add_(1)
    assert embedding.weight.full_tensor().sum(1)[4] == 3
    embedding.reset_parameters()
    assert embedding.weight.full_tensor().sum(1)[4] == 0


@on_ranks(3)
def test_assignment(mesh):
    p, q = sharded(mesh, CUT)["conv"], plain(CUT)["conv"]
    mask = torch.rand(q.shape) > 0.5
    with torch.no_grad():
        for index, value in [
            ((3, 2, 1, 0), 1.0), (2, 5), (slice(1, 7), -2.0), ((slice(None), 1), 0.5),
            ((..., -1), torch.arange(3)), (mask, 9), ((torch.tensor([0, 5, 7]), 3), 4.0),
            ([1, 2], torch.rand(1, 1, 6, 1, 3)), (Ellipsis, torch.rand(q.shape)),
            (slice(None, None, 3), 6.0), (slice(2, 4), torch.rand(6, 3, 3)), (None, 1.5),
        ]:  # fmt: skip
            p[index] = value
            q[index] = value
            assert_whole(p, q, f"{index} {value}")
        p[p == 1.5] = 0.25
        q[q == 1.5] = 0.25
        assert_whole(p, q)
    for index in (0, (0, 1), slice(1, 2), mask):
        with pytest.raises(RuntimeError):  # a leaf that requires grad
            p[index] = 0.0
    with pytest.raises(NotImplementedError, match="to a part of another"):
        p.detach()[0] = p.detach()[1]


@on_ranks(2)
def test_new_tensors(mesh):
    p = sharded(mesh)["matrix"]
    assert_whole(p.new_zeros(61, 37), torch.zeros(61, 37))
    assert_whole(p.new_full((61, 37), 2, dtype=torch.int64), torch.full((61, 37), 2))
    assert type(p.new_zeros(3)) is Tensor and p.new_zeros(3).shape == (3,)
    assert type(p.new_tensor([1.0, 2.0])) is Tensor
    assert type(p.new_empty((61, 37), device="cpu")) is ShardTensor  # as dcp.async_save asks for it
    assert type(p.new_empty((61, 37))) is Tensor  # as orthogonal_ does


@on_ranks(2, 3)
def test_norms_and_autograd(mesh):
    params, want = sharded(mesh), plain()
    for p, q in zip(params.values(), want.values(), strict=True):
        for order in (1, 2, 3, 0, *([float("inf"), float("-inf")] if q.numel() else [])):
            got = torch.linalg.vector_norm(p, order)
            assert type(got) is WholeValue
            torch.testing.assert_close(got, torch.linalg.vector_norm(q, order))
    p, q = params["matrix"], want["matrix"]
    for loss in (lambda x: (x * x).norm(), lambda x: x.pow(2).add(x).norm()):
        loss(p).backward()
        loss(q).backward()
        assert type(p.grad) is ShardTensor
        torch.testing.assert_close(p.grad.full_tensor(), q.grad)
    assert (p == 3).any() and not (p == -3).any() and (p > 0).all() and not (p > 1).all()


# -- initialisers ---------------------------------------------------------------------------------

INITS: dict[str, Callable[..., object]] = {
    "uniform_": lambda t, **g: nn.init.uniform_(t, -1, 2, **g),
    "normal_": lambda t, **g: nn.init.normal_(t, 1, 0.1, **g),
    "trunc_normal_wide": lambda t, **g: nn.init.trunc_normal_(t, std=1, a=-1, b=2, **g),
    "trunc_normal_narrow": lambda t, **g: nn.init.trunc_normal_(t, std=1, a=0.4, b=0.6, **g),
    "trunc_normal_default": lambda t, **g: nn.init.trunc_normal_(t, std=0.02, **g),
    "constant_": lambda t: nn.init.constant_(t, 0.3),
    "ones_": lambda t: nn.init.ones_(t),
    "zeros_": lambda t: nn.init.zeros_(t),
    "eye_": lambda t: nn.init.eye_(t),
    "dirac_": lambda t: nn.init.dirac_(t),
    "dirac_groups": lambda t: nn.init.dirac_(t, 2),
    "xavier_uniform_": lambda t, **g: nn.init.xavier_uniform_(t, **g),
    "xavier_normal_": lambda t, **g: nn.init.xavier_normal_(t, 2, **g),
    "kaiming_uniform_": lambda t, **g: nn.init.kaiming_uniform_(t, 5**0.5, **g),
    "kaiming_normal_": lambda t, **g: nn.init.kaiming_normal_(t, mode="fan_out", **g),
    "orthogonal_": lambda t, **g: nn.init.orthogonal_(t, 1.5, **g),
    "orthogonal_data": lambda t, **g: nn.init.orthogonal_(t.data, **g),
    "sparse_": lambda t, **g: nn.init.sparse_(t, 0.3, **g),
}
MATRICES = {"xavier_uniform_", "xavier_normal_", "kaiming_uniform_", "kaiming_normal_",
            "orthogonal_", "orthogonal_data"}  # fmt: skip
TWO_D = {"eye_", "sparse_"}
METHODS: dict[str, Callable[..., object]] = {
    "normal_": lambda t, **g: t.normal_(1, 2, **g),
    "uniform_": lambda t, **g: t.uniform_(-3, 1, **g),
    "bernoulli_": lambda t, **g: t.bernoulli_(0.3, **g),
    "random_": lambda t, **g: t.random_(**g),
    "random_to": lambda t, **g: t.random_(3, 50, **g),
    "exponential_": lambda t, **g: t.exponential_(2, **g),
    "cauchy_": lambda t, **g: t.cauchy_(**g),
    "geometric_": lambda t, **g: t.geometric_(0.4, **g),
    "log_normal_": lambda t, **g: t.log_normal_(**g),
    "bernoulli_tensor": lambda t, **g: t.bernoulli_(torch.full(t.shape, 0.6), **g),
    "randn_like": lambda t, **g: t.copy_(torch.randn_like(t, **g)),
    "rand_like": lambda t, **g: t.copy_(torch.rand_like(t, **g)),
    "randint_like": lambda t, **g: t.copy_(torch.randint_like(t, 9, **g)),
    "normal_out": lambda t, **g: torch.normal(0.5, 2.0, t.shape, out=t.detach(), **g),
    "fill_": lambda t: t.fill_(0.7),
    "fill_tensor": lambda t: t.fill_(torch.tensor(0.7)),
    "zero_": lambda t: t.zero_(),
}


def _suits(name: str, shape: tuple[int, ...]) -> bool:
    if name in TWO_D:
        return len(shape) == 2
    if name.startswith("dirac"):
        return len(shape) == 4
    return name not in MATRICES or len(shape) >= 2


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@on_ranks(2, 3)
def test_initialisers_equal_an_unsharded_init(mesh, dtype):
    params, want, own = sharded(mesh, dtype=dtype), plain(dtype=dtype), torch.Generator()
    before = {name: p for name, p in params.items()}
    for label, init in [*INITS.items(), *((f"Tensor.{n}", m) for n, m in METHODS.items())]:
        if dtype == torch.bfloat16 and label.startswith("orthogonal"):
            continue  # torch has no bf16 QR
        draws = "g" in init.__code__.co_varnames
        for name, p in params.items():
            if not _suits(label, SHAPES[name]):
                continue
            for generator in (torch.default_generator, own) if draws else (None,):
                states = []
                for target in (p, want[name]):
                    torch.manual_seed(5)
                    own.manual_seed(6)
                    with torch.no_grad():
                        init(target, **({"generator": generator} if generator else {}))
                    states.append(torch.cat([torch.get_rng_state(), own.get_state()]))
                assert_whole(p, want[name], f"{label} of {name}")
                assert torch.equal(*states), f"generator after {label} of {name}"
    assert all(params[name] is p and p.requires_grad for name, p in before.items())


# -- refusals -------------------------------------------------------------------------------------


@contextmanager
def strictly() -> Iterator[None]:
    """Inside, ops that need whole tensors are refused."""
    strict()
    try:
        yield
    finally:
        strict(False)


REFUSED: dict[str, Callable[[Tensor], object]] = {
    "aten.mm.default": lambda t: t.mm(torch.rand(37, 2)),
    "aten.cat.default": lambda t: torch.cat([t, t]),
    "aten.stack.default": lambda t: torch.stack([t, t]),
    "aten.index.Tensor": lambda t: t[[1, 2]],
    "aten.slice.Tensor": lambda t: t[::2],
    "aten.select.int": lambda t: t[:, 1],
    "aten.transpose.int": lambda t: t.transpose(0, 1),
    "aten.t.default": lambda t: t.t(),
    "aten.permute.default": lambda t: t.permute(1, 0),
    "aten.expand.default": lambda t: t.expand(2, 61, 37),
    "aten.view.dtype": lambda t: t.view(torch.int32),
    "aten.cumsum.default": lambda t: t.cumsum(0),
    "aten.max.dim": lambda t: t.max(0),
    "aten.median.default": lambda t: t.median(),
    "aten.sort.default": lambda t: t.sort(),
    "aten.nonzero.default": lambda t: t.nonzero(),
    "aten.rrelu_with_noise.default": lambda t: nn.functional.rrelu(t, training=True),
    "aten.bernoulli.default": lambda t: torch.bernoulli(t),
    "aten.normal.Tensor_float": lambda t: torch.normal(t, 1.0),
    "aten._foreach_max.default": lambda t: torch._foreach_max([t, t]),
    "aten._foreach_mul_.Tensor": lambda t: torch._foreach_mul_([t, t], t),
    "aten.eye.m_out": lambda t: torch.eye(3, 5, out=t),
    "aten.mm.out": lambda t: torch.mm(t, torch.rand(37, 37), out=torch.empty_like(t)),
    "aten.set_.source_Tensor": lambda t: t.set_(torch.rand(2)),
    r".item\(\)": lambda t: t[0:1].view(-1)[:1].item(),
}


@on_ranks(2)
def test_refuses_other_ops_by_name(mesh):
    t = sharded(mesh)["matrix"].detach()
    whole = t.full_tensor()
    for op, call in REFUSED.items():
        try:
            with strictly():
                result = call(t)
        except NotImplementedError as error:
            assert re.match(rf"{op} is not supported on a Sh.*full_tensor\(\)", str(error)), error
        else:
            raise AssertionError(f"{op} gave {result}")
    scalar = sharded(mesh)["scalar"]
    for call in (float, bool, int, Tensor.item):
        with strictly(), pytest.raises(NotImplementedError, match=r"^\.item\(\) is not support"):
            call(scalar)
    for call in (t.numpy, t.tolist, lambda: list(t[:, 0]), lambda: t @ whole.t()):
        with strictly(), pytest.raises((RuntimeError, NotImplementedError)):
            call()
    with strictly():
        assert torch.equal(t.sum(), whole.sum())  # no gather
    assert torch.equal(t.t() + 0, whole.t())


@on_ranks(2)
def test_refuses_mixed_cuts(mesh):
    params = {name: p.detach() for name, p in sharded(mesh, {"a": (6, 4), "b": (6, 4)}).items()}
    a, b, full = params["a"], params["b"], torch.ones(6, 4)
    before = a.full_tensor()
    for call, why in [
        (lambda: a * torch.rand(4), r"\(6, 4\) \(sharded\) with \(4,\) \(plain\) broadcasts"),
        (lambda: a * torch.rand(6, 1), r"\(6, 4\) \(sharded\) with \(6, 1\) \(plain\) broadcasts"),
        (lambda: a * torch.rand(1, 1, 1), "broadcasts"),
        (lambda: a * torch.rand(2, 6, 4), "broadcasts"),
        (lambda: a.copy_(torch.rand(4)), "broadcasts"),
        (lambda: a * a.to_local()[:5], "broadcasts"),
        (lambda: a + b, r"cut differently: \(6, 4\) at offset 0 of .* at offset 24 of"),
        (lambda: a + a.view(4, 6), "cut differently"),
        (lambda: a[0] * a, "cut differently"),
        (lambda: full.add_(a), "a plain tensor cannot be updated"),
        (lambda: full.copy_(a), "a plain tensor cannot be updated"),
        (lambda: torch.add(a, a, out=full), "a plain tensor cannot be updated"),
        (lambda: torch._foreach_add_([full, a], [a, a]), "a plain tensor cannot be updated"),
        (lambda: torch._foreach_mul([a, b], [b, a]), "cut differently"),
    ]:
        with (
            strictly(),
            pytest.raises(NotImplementedError, match=rf"aten\..*is not supported.*{why}"),
        ):
            call()
    assert torch.equal(full, torch.ones(6, 4)) and torch.equal(a.full_tensor(), before)


# -- versions -------------------------------------------------------------------------------------


def _updates() -> dict[str, Callable[[list[nn.Parameter]], object]]:
    """Ways to update all parameters in place."""

    def step(**kwargs) -> Callable[[list[nn.Parameter]], object]:
        return lambda ps: torch.optim.AdamW(ps, **kwargs).step()

    return {
        "add_": lambda ps: ps[0].add_(1),
        "empty local part": lambda ps: [p.mul_(2) for p in ps if not p.to_local().numel()],
        "data": lambda ps: ps[0].data.zero_(),
        "view": lambda ps: ps[0].data.view(-1).zero_(),
        "row": lambda ps: ps[0].data[0].zero_(),
        "foreach on a row": lambda ps: torch._foreach_mul_([ps[0].data[0]], 2.0),
        "assignment": lambda ps: ps[0].__setitem__((0, 0), 1.0),
        "init": lambda ps: nn.init.normal_(ps[0]),
        "out": lambda ps: nn.init.eye_(ps[0]),
        "foreach": lambda ps: torch._foreach_mul_(ps, 2.0),
        "single": step(foreach=False),
        "foreach AdamW": step(foreach=True),
        "fused AdamW": step(fused=True),
    }


@on_ranks(2)
def test_backward_refuses_weights_updated_since_the_forward(mesh):
    _check_updates_are_seen(mesh, _updates())


@on_ranks(2)
def test_backward_refuses_weights_that_a_compiled_step_updated(mesh):
    def step(ps):  # Inductor's kernels write without a new version
        torch.compile(torch.optim.SGD(ps).step, backend="inductor")()

    _check_updates_are_seen(mesh, {"compiled": step})


def _check_updates_are_seen(mesh, updates: dict[str, Callable[[list[nn.Parameter]], object]]):
    module = nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 2), nn.LayerNorm(2))
    model = fully_shard(module, mesh=mesh, reshard_after_forward=True)
    forward = compiled(model)
    params = list(model.parameters())
    x = torch.rand(3, 6, requires_grad=True)
    forward(x).sum().backward()  # nothing was updated: this works
    for name, update in updates.items():
        for p in params:
            p.grad = torch.ones_like(p)
        loss = forward(x).square().sum()
        with torch.no_grad():
            update(params)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()
            raise AssertionError(f"used weights that {name} had changed")


def test_narrowed_spec():
    spec = ShardSpec(8, 30, 16, 1, 3, "g")
    assert spec.interval() == (8, 24) and spec.interval(2) == (24, 30)
    assert spec.narrowed(5, 10) == ShardSpec(13, 10, 16, 1, 3, "g")
    assert [spec.narrowed(5, 10).interval(rank) for rank in range(3)] == [(0, 3), (3, 10), (10, 10)]
