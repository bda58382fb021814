"""Stock optimizers, clipping and GradScaler on ShardTensors equal the unsharded ones."""

import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch
from models import full
from ranks import mesh_of, on_ranks
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Shard
from torch.nn.utils import clip_grad_norm_, clip_grad_value_
from torch.optim import (
    ASGD,
    SGD,
    Adadelta,
    Adagrad,
    Adam,
    Adamax,
    AdamW,
    NAdam,
    RAdam,
    RMSprop,
    Rprop,
)

from shardc import ShardTensor, fully_shard, strict, units_of
from shardc.runtime.checks import telling
from shardc.runtime.comm import collectives
from shardc.runtime.tensor.whole_value import WholeValue

OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "SGD": partial(SGD, lr=0.1),
    "SGD momentum": partial(SGD, lr=0.1, momentum=0.9, dampening=0.1, weight_decay=0.01),
    "SGD nesterov": partial(SGD, lr=0.1, momentum=0.9, nesterov=True),
    "Adam": partial(Adam, lr=0.02, weight_decay=0.1),
    "Adam amsgrad": partial(Adam, lr=0.02, amsgrad=True, maximize=True),
    "AdamW": partial(AdamW, lr=0.02),
    "AdamW amsgrad": partial(AdamW, lr=0.02, amsgrad=True),
    "Adagrad": partial(Adagrad, lr=0.1, lr_decay=0.1, initial_accumulator_value=0.2),
    "Adadelta": partial(Adadelta, lr=0.5, weight_decay=0.1),
    "Adamax": partial(Adamax, lr=0.02),
    "NAdam": partial(NAdam, lr=0.02, weight_decay=0.1, decoupled_weight_decay=True),
    "RAdam": partial(RAdam, lr=0.02),
    "RMSprop": partial(RMSprop, lr=0.01, momentum=0.5, centered=True),
    "ASGD": partial(ASGD, lr=0.1, t0=1),
    "Rprop": partial(Rprop, lr=0.05),
}
FUSED = ("SGD", "Adam", "AdamW", "Adagrad")
STEPS = 4


class Odd(nn.Module):
    """Shapes that no world size divides; `short`, `scalar` and `none` leave ranks with nothing."""

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        shapes = {"matrix": (19, 37), "bias": (37,), "short": (2,), "scalar": (), "none": (0, 3)}
        for index, (name, shape) in enumerate(shapes.items()):
            value = torch.randn(shape, generator=torch.Generator().manual_seed(index))
            self.register_parameter(name, nn.Parameter(value.to(dtype)))
        self.unused = nn.Parameter(torch.ones(3, dtype=dtype))


def pair(mesh, **kwargs) -> tuple[nn.Module, nn.Module]:
    """A plain model and its sharded twin."""
    plain, sharded = Odd(**kwargs), fully_shard(Odd(**kwargs), mesh=mesh)
    assert not any(isinstance(p, ShardTensor) for p in plain.parameters())
    assert all(isinstance(p, ShardTensor) for p in sharded.parameters())
    return plain, sharded


def gradient(param: Tensor, seed: int) -> Tensor:
    """A full gradient, equal on all ranks; some elements are zero, some change sign."""
    noise = torch.randn(param.shape, generator=torch.Generator().manual_seed(seed))
    return (noise * (noise.abs() > 0.3)).to(param.dtype)


def set_gradients(model: nn.Module, seed: int, scale: float = 1.0) -> None:
    """Full gradients on plain parameters, their parts on sharded ones; `unused` gets none."""
    for index, (name, p) in enumerate(model.named_parameters()):
        p.grad = None
        if name != "unused":
            grad = scale * gradient(p, 100 * seed + index)
            p.grad = torch.empty_like(p).copy_(grad) if isinstance(p, ShardTensor) else grad


def assert_equal_models(plain: nn.Module, sharded: nn.Module, label: str = "") -> None:
    for (name, p), q in zip(plain.named_parameters(), sharded.named_parameters(), strict=True):
        assert isinstance(q[1], ShardTensor)
        torch.testing.assert_close(
            full(q[1]), p.detach(), rtol=1e-6, atol=1e-6,
            msg=lambda m, name=name: f"{label}: {name}: {m}",
        )  # fmt: skip


def assert_equal_states(plain, sharded, label: str = "") -> None:
    """Optimizer states: same keys; sharded where they have the parameter's shape."""
    for p, q in zip(plain.state.values(), sharded.state.values(), strict=True):
        assert p.keys() == q.keys(), label
        for key, value in p.items():
            if isinstance(value, Tensor):
                is_counter = key in ("step", "mu_product", "eta", "mu")
                assert isinstance(q[key], ShardTensor) != is_counter, f"{label} {key}"
                torch.testing.assert_close(full(q[key]), value, rtol=1e-6, atol=1e-6)
            else:
                assert q[key] == value, f"{label}: {key}"


def forms(name: str) -> Iterator[dict[str, Any]]:
    """How an optimizer may be asked to run."""
    yield {"foreach": False}
    yield {"foreach": True}
    if name.split()[0] in FUSED:
        yield {"fused": True}


@on_ranks(2)
def test_every_elementwise_optimizer(mesh):
    for name, make in OPTIMIZERS.items():
        for form in forms(name):
            plain, sharded = pair(mesh)
            start = [full(p) for p in sharded.parameters()]
            optimizers = [make(m.parameters(), **form) for m in (plain, sharded)]
            for seed in range(STEPS):
                for model, optimizer in zip((plain, sharded), optimizers, strict=True):
                    set_gradients(model, seed)
                    optimizer.step()
            label = f"{name} {form}"
            assert_equal_models(plain, sharded, label)
            assert_equal_states(*optimizers, label)
            end = [full(p) for p in sharded.parameters()]
            moved = [not torch.equal(*pair) for pair in zip(start, end, strict=True)]
            assert moved == [True, True, True, True, False, False], label
            assert sharded.unused not in optimizers[1].state or name == "Adagrad"


@on_ranks(2)
def test_of_a_whole_gradient_the_part_counts(mesh):
    for name in ("Adagrad", "AdamW"):
        for form in forms(name):
            plain, sharded = pair(mesh)
            optimizers = [OPTIMIZERS[name](m.parameters(), **form) for m in (plain, sharded)]
            for seed in range(STEPS):
                for model, optimizer in zip((plain, sharded), optimizers, strict=True):
                    set_gradients(model, seed)
                    for p in model.parameters():
                        p.grad = None if p.grad is None else full(p.grad)
                    optimizer.step()
            assert_equal_models(plain, sharded, f"{name} {form}")
            assert_equal_states(*optimizers, f"{name} {form}")


@on_ranks(2)
def test_bf16_and_complex(mesh):
    for dtype in (torch.bfloat16, torch.float64, torch.complex64):
        for form in ({"foreach": False}, {"foreach": True}):
            plain, sharded = pair(mesh, dtype=dtype)
            for model in (plain, sharded):
                optimizer = AdamW(model.parameters(), lr=0.1, **form)
                for seed in range(2):
                    set_gradients(model, seed)
                    optimizer.step()
            assert_equal_models(plain, sharded, f"{dtype} {form}")


@on_ranks(2)
def test_compiled_step(mesh):
    for name, backend, form in [
        ("SGD momentum", "eager", {"foreach": True}),
        ("Rprop", "eager", {"foreach": False}),
        ("RMSprop", "aot_eager", {"foreach": True}),
        ("Adagrad", "aot_eager", {"foreach": False}),
        ("AdamW", "inductor", {}),
    ]:
        _check_compiled(mesh, OPTIMIZERS[name], backend, **form)


def _check_compiled(mesh, make, backend: str, **form) -> None:
    plain, sharded = pair(mesh)
    reference, optimizer = make(plain.parameters(), **form), make(sharded.parameters(), **form)
    torch._dynamo.reset()
    step = torch.compile(optimizer.step, backend=backend)
    buckets = [b for unit in units_of(sharded).values() for b in unit._shardc_unit.buckets]
    for seed in range(3):
        set_gradients(plain, seed)
        set_gradients(sharded, seed)
        before = [bucket.version for bucket in buckets]
        reference.step()
        step()
        assert_equal_models(plain, sharded, f"{make} {backend} {form}")
        assert all(bucket.version != old for bucket, old in zip(buckets, before, strict=True))
    assert_equal_states(reference, optimizer)


# -- optimizer life -------------------------------------------------------------------------------


@on_ranks(2)
def test_optimizer_built_before_fully_shard(mesh):
    plain, sharded = Odd(), Odd()
    kept = list(sharded.parameters())
    optimizers = [AdamW(m.parameters(), lr=0.1, foreach=True) for m in (plain, sharded)]
    fully_shard(sharded, mesh=mesh)
    assert all(p is k for p, k in zip(sharded.parameters(), kept, strict=True))
    for seed in range(2):
        for model, optimizer in zip((plain, sharded), optimizers, strict=True):
            set_gradients(model, seed)
            optimizer.step()
            optimizer.zero_grad(set_to_none=seed == 0)
    assert_equal_models(plain, sharded)
    assert all(not full(p.grad).any() for p in kept if p.grad is not None)
    stale = Odd()
    adagrad = Adagrad(stale.parameters())  # makes its state at once, of full tensors
    fully_shard(stale, mesh=mesh)
    set_gradients(stale, 0)
    for option in ({"foreach": True}, {"foreach": False}):
        adagrad.param_groups[0].update(option)
        strict(not option["foreach"])  # lists are refused at any time
        with pytest.raises(NotImplementedError, match="a plain tensor cannot be updated with a pa"):
            adagrad.step()
        strict(False)


# -- clipping -------------------------------------------------------------------------------------


class CountingOps:
    """Stands in for torch's functional collectives and counts which are issued."""

    def __init__(self) -> None:
        self.issued: Counter[str] = Counter()

    def __getattr__(self, name: str) -> Any:
        self.issued[name] += name != "wait_tensor"
        return getattr(torch.ops._c10d_functional, name)


@contextmanager
def collectives_issued(**expected: int) -> Iterator[None]:
    """Inside, exactly these collectives are issued."""
    counting = CountingOps()
    with mock.patch.object(collectives, "ops", counting):
        yield
    assert +counting.issued == Counter(expected)


@on_ranks(2, 3)
def test_clip_grad_norm(mesh):
    for order in (1, 2, 3, 0.5, -1, float("inf"), float("-inf")):
        for max_norm in (0.7, 1e6):
            plain, sharded = pair(mesh)
            for model in (plain, sharded):
                # torch knows no inf-norm of an empty gradient; ours does
                set_gradients(model, 3)
                if model is plain:
                    model.none.grad = None
            want = clip_grad_norm_(plain.parameters(), max_norm, order)
            with collectives_issued(all_reduce=1):
                got = clip_grad_norm_(sharded.parameters(), max_norm, order)
            assert type(got) is WholeValue and got.shape == () and got.dtype == torch.float32
            torch.testing.assert_close(got, want)
            for p, q in zip(plain.parameters(), sharded.parameters(), strict=True):
                if p.grad is not None:
                    torch.testing.assert_close(full(q.grad), p.grad)


class Mixture(nn.Module):
    """Weights that all ranks have, and an expert of each pair of ranks, plain or a DTensor."""

    def __init__(self, number: int, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.shared = nn.Linear(5, 7)
        self.expert = nn.Linear(7, 9, dtype=dtype)
        for index, p in enumerate(self.parameters()):
            own = 10 * number if index > 1 else 0
            p.grad = torch.randn(p.shape, generator=torch.Generator().manual_seed(own + index)).to(
                p.dtype
            )


def of_experts(mesh, number: int, form: str, dtype: torch.dtype) -> Mixture:
    """Sharded, the expert over one pair of ranks and the rest over all."""
    grid = mesh_of("cpu", (2, 2), ("ep", "edp"))
    model = Mixture(number, dtype)
    if form == "DTensor":  # a row of experts, cut over "ep"
        for name, p in list(model.expert.named_parameters()):
            given = nn.Parameter(DTensor.from_local(p.detach(), grid["ep"], [Shard(0)]))
            given.grad = DTensor.from_local(p.grad, grid["ep"], [Shard(0)])
            setattr(model.expert, name, given)
    fully_shard(model.expert, mesh=grid["edp"])
    return fully_shard(model, mesh=mesh)


@pytest.mark.parametrize("form", ["plain", "DTensor"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@on_ranks(4)
def test_clip_over_several_meshes(mesh, form, dtype):
    """Experts on one mesh, the rest on another: one norm on all ranks, each expert in it once."""
    number = mesh.get_local_rank() // 2
    whole = [Mixture(index, dtype) for index in range(2)]
    grads = [p.grad.double() for p in whole[0].parameters()]
    grads += [p.grad.double() for p in whole[1].expert.parameters()]
    assert not torch.equal(grads[2], grads[4])
    for order in (2, 1, float("inf")):
        for foreach in (None, False):
            model = of_experts(mesh, number, form, dtype)
            groups = {p._shard_spec.group for p in model.parameters()}
            assert len(groups) == 2
            want = torch.linalg.vector_norm(torch.cat([g.flatten() for g in grads]), order)
            got = clip_grad_norm_(model.parameters(), 0.5, order, foreach=foreach)
            torch.testing.assert_close(got.double(), want, rtol=1e-5, atol=0)
            everywhere = [torch.empty_like(got) for _ in range(4)]
            torch.distributed.all_gather(everywhere, got)
            assert all(torch.equal(one, got) for one in everywhere)
            clipped = full(model.shared.weight.grad)
            torch.testing.assert_close(
                clipped.double(), grads[0] * 0.5 / want, rtol=1e-4, atol=1e-6
            )
            if form == "plain":  # by itself, a norm is that of the tensor that is there
                own = torch.linalg.vector_norm(model.expert.weight.grad.full_tensor())
                assert torch.allclose(torch._foreach_norm([model.expert.weight.grad])[0], own)


@on_ranks(4)
def test_copies_count_once(mesh):
    """On a mesh with copies, ranks beside a shard group have the same parameters."""
    grid = mesh_of("cpu", (2, 2), ("replicate", "shard"))
    model = Mixture(0)
    want = torch.linalg.vector_norm(torch.cat([p.grad.flatten() for p in model.parameters()]))
    fully_shard(model.expert, mesh=grid)
    fully_shard(model, mesh=mesh)
    assert {p._shard_spec.world_size for p in model.parameters()} == {2, 4}
    torch.testing.assert_close(clip_grad_norm_(model.parameters(), 0.5), want)


@on_ranks(2)
def test_clip_without_gradients(mesh):
    _, sharded = pair(mesh)
    with collectives_issued():
        assert clip_grad_norm_(sharded.parameters(), 1.0) == 0.0
    for p in sharded.parameters():
        p.grad = torch.zeros_like(p)
    assert clip_grad_norm_(sharded.parameters(), 1.0) == 0.0


@on_ranks(2)
def test_clip_mixed_dtypes_and_plain_parameters(mesh):
    """One all-reduce for each gradient dtype; ignored parameters are counted once, not W times."""

    def build() -> nn.ModuleDict:
        parts = {"a": Odd(), "b": Odd(torch.bfloat16), "ignored": nn.Linear(3, 4)}
        return nn.ModuleDict(parts)

    plain, sharded = build(), build()
    fully_shard(sharded, mesh=mesh, ignored_params=list(sharded["ignored"].parameters()))
    for model in (plain, sharded):
        for part in model.values():
            set_gradients(part, 1)
        model["ignored"].weight.grad.fill_(0.5)
    # torch rounds the norms of bf16 gradients to bf16; ours stay in fp32
    grads = [p.grad.float().flatten() for p in plain.parameters() if p.grad is not None]
    want = torch.cat(grads).norm()
    with collectives_issued(all_reduce=2):
        got = clip_grad_norm_(sharded.parameters(), 1.0)
    torch.testing.assert_close(got, want)
    assert type(sharded["ignored"].weight.grad) is Tensor
    torch.testing.assert_close(sharded["ignored"].weight.grad, torch.full((4, 3), 0.5) / want)
    torch.testing.assert_close(
        full(sharded["b"].matrix.grad), plain["b"].matrix.grad / want.bfloat16(), rtol=0.01, atol=0
    )


@on_ranks(2)
def test_norm_accumulates_in_fp32(mesh):
    """4096 squares of 1/16 in bf16 would stop growing long before their sum."""
    model = nn.Module()
    model.weight = nn.Parameter(torch.zeros(64, 64, dtype=torch.bfloat16))
    fully_shard(model, mesh=mesh)
    model.weight.grad = torch.full_like(model.weight, 0.25)
    for norm in (clip_grad_norm_(model.parameters(), 1e9), model.weight.grad.norm()):
        assert norm.dtype == torch.float32 and norm == 16.0


@on_ranks(2, 3)
def test_non_finite_norms_agree_on_all_ranks(mesh):
    """A NaN that one rank holds reaches all, also where the backend's maximum would drop it."""
    for bad in (float("nan"), float("inf")):
        for order in (2, float("inf"), float("-inf")):
            for rank in range(mesh.size()):
                _, sharded = pair(mesh)
                set_gradients(sharded, 0)
                sharded.none.grad = None
                grad = torch.zeros(19, 37)
                for r in range(mesh.size()):
                    start, stop = sharded.matrix._shard_spec.interval(r)
                    if r == rank and stop > start:
                        grad.view(-1)[start] = bad
                sharded.matrix.grad.copy_(grad)
                got = torch.nn.utils.get_total_norm([sharded.matrix.grad], order)
                want = torch.linalg.vector_norm(grad, order)
                torch.testing.assert_close(got, want, equal_nan=True)
    _, sharded = pair(mesh)
    set_gradients(sharded, 0)
    sharded.matrix.grad[0, 0] = float("inf")
    with pytest.raises(RuntimeError, match="non-finite"):
        clip_grad_norm_(sharded.parameters(), 1.0, error_if_nonfinite=True)


@on_ranks(2)
def test_clip_grad_value(mesh):
    for foreach in (True, False):
        plain, sharded = pair(mesh)
        for model in (plain, sharded):
            set_gradients(model, 0)
            with collectives_issued():
                clip_grad_value_(model.parameters(), 0.4, foreach=foreach)
        for p, q in zip(plain.parameters(), sharded.parameters(), strict=True):
            assert p.grad is None or torch.equal(full(q.grad), p.grad)
        assert full(sharded.matrix.grad).abs().max() == 0.4


# -- GradScaler -----------------------------------------------------------------------------------


@on_ranks(2, 3)
def test_grad_scaler_skips_on_all_ranks(mesh):
    for form in ({"foreach": True}, {"foreach": False}, {"fused": True}):
        plain, sharded = pair(mesh)
        for model in (plain, sharded):
            scaler = torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=2)
            optimizer = AdamW(model.parameters(), lr=0.1, **form)
            scaler.scale(torch.ones(()))
            scales = []
            for seed, spoiled in enumerate((False, True, False, False, True)):
                set_gradients(model, seed, scale=8.0)
                if spoiled:  # one element, so on one rank only
                    with torch.no_grad():
                        model.matrix.grad[18, 36] = float("inf") if seed == 1 else float("nan")
                before = [full(p).clone() for p in model.parameters()]
                if seed == 2 and "fused" not in form:
                    scaler.unscale_(optimizer)
                    clip_grad_norm_(model.parameters(), 1.0)
                scaler.step(optimizer)
                scaler.update()
                scales.append(scaler.get_scale())
                after = [full(p) for p in model.parameters()]
                same = [torch.equal(*pair) for pair in zip(before, after, strict=True)]
                assert all(same) == spoiled, f"{form} step {seed}"
            assert scales == [8.0, 4.0, 4.0, 8.0, 4.0]
        assert_equal_models(plain, sharded, str(form))


def test_no_optimizer_is_left_out():
    """All of torch.optim is either tested above or not elementwise."""
    not_elementwise = {"Adafactor", "LBFGS", "Muon", "SparseAdam", "Optimizer"}
    known = {name.split()[0] for name in OPTIMIZERS} | not_elementwise
    classes = {name for name, c in vars(torch.optim).items() if isinstance(c, type)}
    assert classes - known == set()


# -- parameters in 16 bits -------------------------------------------------------------------------


class Mastered(torch.optim.Optimizer):
    """SGD on a float32 copy of each parameter, as apex and Transformer Engine keep one."""

    def __init__(self, params, master_weights=True):
        super().__init__(params, {})
        self.master_weights = master_weights

    @torch.no_grad()
    def step(self, closure=None):
        for param in (p for group in self.param_groups for p in group["params"]):
            master = param.float() if self.master_weights else param
            if self.master_weights:
                master = self.state[param].setdefault("master_param", master)
            master.sub_(0.1 * param.grad)
            param.copy_(master)


def _rounding(params):
    optimizer = Mastered(params, master_weights=False)
    optimizer.bf16_stochastic_round = True  # as torchao's say it
    return optimizer


_IN_16_BITS: dict[str, tuple[Any, torch.dtype, bool]] = {
    "AdamW": (AdamW, torch.bfloat16, True),
    "fused": (partial(AdamW, fused=True, lr=torch.tensor(0.1)), torch.bfloat16, True),
    "float16": (partial(SGD, lr=0.1), torch.float16, True),
    "no copy": (partial(Mastered, master_weights=False), torch.bfloat16, True),
    "float32": (AdamW, torch.float32, False),
    "copy": (Mastered, torch.bfloat16, False),
    "rounding": (_rounding, torch.bfloat16, False),
}


@pytest.mark.parametrize("case", _IN_16_BITS)
@on_ranks(2)
def test_updates_that_are_lost_by_rounding_are_told_once(mesh, case):
    make, dtype, is_told = _IN_16_BITS[case]
    model = fully_shard(nn.Linear(4, 4).to(dtype), mesh=mesh)
    telling._warned.clear()
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        for optimizer in (make(model.parameters()), make(model.parameters())):
            for _ in range(2):
                model(torch.ones(2, 4, dtype=dtype)).sum().backward()
                optimizer.step()
    texts = [str(w.message) for w in told if "lost by rounding" in str(w.message)]
    assert len(texts) == is_told
    if is_told:
        assert "'weight'" in texts[0] and f"MixedPrecisionPolicy(param_dtype={dtype})" in texts[0]
