"""Gradients of sharded parameters behave as unsharded ones do, averaged over ranks."""

import gc
import itertools
import time
import warnings
import weakref

import pytest
import torch
from models import (
    Stack,
    check_gradients,
    check_parity,
    compiled,
    full,
    mean_over_ranks,
    seeded,
    shard_all,
    tokens,
)
from ranks import on_ranks
from torch import nn

from shardc import ShardTensor, fully_shard, units_of


class Branches(nn.Module):
    """Two linear layers, of which the caller chooses; `both` is always used."""

    def __init__(self):
        super().__init__()
        self.left, self.right, self.both = (nn.Linear(5, 5) for _ in range(3))

    def forward(self, x, left=True):
        return self.both(self.left(x) if left else self.right(x)).pow(2).mean()


def _pair(mesh, build, executor="eager", **kwargs):
    plain, model = seeded(build), fully_shard(seeded(build), mesh=mesh)
    return plain, model, compiled(model, executor, **kwargs)


@on_ranks(2)
def test_accumulation_over_backwards(mesh):
    """Also with forwards without gradients between them."""
    plain, model, step = _pair(mesh, Stack)
    for number in range(3):
        x = tokens(10 * number + mesh.get_local_rank())
        plain(x, x).backward()
        step(x, x).backward()
        with torch.no_grad():
            torch.testing.assert_close(step(x, x), plain(x, x).detach())
    check_gradients(plain, model, mesh)


@pytest.mark.parametrize("executor", ["eager", None])
@on_ranks(2)
def test_zero_grad(mesh, executor):
    plain, model, step = _pair(mesh, Stack, executor or "eager")
    step = step if executor else model
    x = tokens(mesh.get_local_rank())
    plain(x, x).backward()
    for before_forward, set_to_none in itertools.product((True, False), repeat=2):
        for _ in range(2):
            if before_forward:
                model.zero_grad(set_to_none)
            loss = step(x, x)
            if not before_forward:
                model.zero_grad(set_to_none)
            loss.backward()
        check_gradients(plain, model, mesh)
        flat = [weakref.ref(p.grad.to_local().untyped_storage()) for p in model.parameters()]
        model.zero_grad(set_to_none)
        if set_to_none:
            assert _are_gone(flat)
        else:
            assert all(storage() is not None for storage in flat)
            assert not any(full(p.grad).any() for p in model.parameters())


def _are_gone(storages):
    """Whether none of them is held, once gloo's threads have let go of theirs."""
    for _ in range(100):
        gc.collect()
        if not any(storage() is not None for storage in storages):
            return True
        time.sleep(0.02)
    return False


def _without_gradient(module, x):
    with torch.no_grad():
        return module(x)


def _row_by_row(module, x):
    return torch.vmap(module)(x)


class Peeking(nn.Module):
    """Reads its weight twice: first where no gradient is kept, or for each row, then as usual."""

    def __init__(self, peek):
        super().__init__()
        self.peek, self.linear = peek, nn.Linear(5, 5)

    def forward(self, x):
        scale = 1 + self.peek(self.linear, x).detach().abs().mean()
        return (self.linear(x) / scale).pow(2).mean()


@pytest.mark.parametrize("executor", ["eager", None])
@pytest.mark.parametrize("peek", [_without_gradient, _row_by_row])
@on_ranks(2)
def test_a_weight_that_is_first_read_in_another_mode(mesh, peek, executor):
    plain, model = seeded(lambda: Peeking(peek)), fully_shard(seeded(lambda: Peeking(peek)))
    call = compiled(model, executor, fullgraph=True) if executor else model
    check_parity(plain, model, call, lambda seed: {"x": torch.ones(3, 5) * (1 + seed)}, mesh)


@pytest.mark.parametrize("eager", [True, False])
@on_ranks(2)
def test_unused_parameters_keep_none(mesh, eager):
    """Those that an earlier step used, too."""
    _, model, step = _pair(mesh, Branches)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for left in (True, False, True):
            model.zero_grad()
            (model if eager else step)(torch.randn(3, 5), left=left).backward()
            unused = "right" if left else "left"
            for name, param in model.named_parameters():
                kind = type(None) if name.startswith(unused) else ShardTensor
                assert isinstance(param.grad, kind), (name, left)


@on_ranks(2)
def test_used_on_one_rank_only_counts_as_zero_elsewhere(mesh):
    plain, model, step = _pair(mesh, Branches)
    left = mesh.get_local_rank() == 0
    x = torch.randn(3, 5)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(2):
            step(x, left=left).backward()
    mine = [str(w.message) for w in caught if "used on some ranks" in str(w.message)]
    assert len(mine) == 1 and ("right.weight" if left else "left.weight") in mine[0]
    plain(x, left=left).backward()
    for (name, p), q in zip(plain.named_parameters(), model.parameters(), strict=True):
        expected = torch.zeros_like(p) if p.grad is None else p.grad
        torch.testing.assert_close(full(q.grad), 2 * mean_over_ranks(expected, mesh), msg=name)
    # the other branch on every rank: nothing new to agree on, nothing hangs
    step(x, left=not left).backward()


@pytest.mark.parametrize("eager", [True, False])
@on_ranks(2)
def test_parameter_hooks_fire_once_after_the_reduction(mesh, eager):
    plain, model, step = _pair(mesh, Stack)
    seen, after = {}, []
    for name, param in model.named_parameters():
        param.register_hook(lambda grad, name=name: seen.setdefault(name, []).append(full(grad)))
        param.register_post_accumulate_grad_hook(lambda p: after.append(p.grad is not None))
    x = tokens(mesh.get_local_rank())
    call = model if eager else step
    call(x, x).backward()
    plain(x, x).backward()
    assert len(after) == len(seen) == len(list(model.parameters())) and all(after)
    for name, p in plain.named_parameters():
        assert len(seen[name]) == 1
        torch.testing.assert_close(seen[name][0], mean_over_ranks(p.grad, mesh))
    param = model.get_parameter("head.weight")
    handle = param.register_hook(lambda grad: 0 * grad)
    model.zero_grad()
    call(x, x).backward()  # the hook replaces the gradient
    assert float(full(param.grad).abs().max()) == 0
    handle.remove()
    call(x, x).backward()
    assert float(full(param.grad).abs().max()) > 0


@on_ranks(2)
def test_optimizer_in_backward(mesh):
    plain, model, step = _pair(mesh, Stack)
    optims = {p: torch.optim.SGD([p], lr=0.1) for p in model.parameters()}

    def apply(param):
        optims[param].step()
        param.grad = None

    for p in model.parameters():
        p.register_post_accumulate_grad_hook(apply)
    opt = torch.optim.SGD(plain.parameters(), lr=0.1)
    x = tokens(3)
    for _ in range(2):
        step(x, x).backward()
        plain(x, x).backward()
        opt.step()
        opt.zero_grad()
    for p, q in zip(plain.parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(full(q), p.detach())


@pytest.mark.parametrize("eager", [True, False])
@on_ranks(2)
def test_requires_grad_changes_between_steps(mesh, eager):
    plain, model = seeded(lambda: Stack(1)), shard_all(seeded(lambda: Stack(1)), mesh)
    step = model if eager else compiled(model)
    x = tokens(mesh.get_local_rank())
    for frozen in (("embed.weight",), ("head.weight", "layers.0.up.bias"), ("layers.0.",), ()):
        for side in (plain, model):
            for name, param in side.named_parameters():
                param.requires_grad_(not name.startswith(frozen))
            side.zero_grad()
        step(x, x).backward()
        plain(x, x).backward()
        buckets = [b for unit in units_of(model).values() for b in unit._shardc_unit.buckets]
        assert all(
            b.key.code.trainable == tuple(p.requires_grad for p in b.params) for b in buckets
        )
        for name, q in model.named_parameters():
            assert (q.grad is None) == name.startswith(frozen)
        check_gradients(plain, model, mesh)


@on_ranks(2)
def test_frozen_model_and_unfreeze(mesh):
    plain, model = seeded(Stack).requires_grad_(False), seeded(Stack).requires_grad_(False)
    fully_shard(model, mesh=mesh)
    step = compiled(model)
    x = tokens(1)
    torch.testing.assert_close(step(x, x), plain(x, x))
    for side in (plain, model):
        side.requires_grad_(True)
    check_parity(plain, model, step, lambda s: {"tokens": tokens(s), "targets": tokens(s)}, mesh)


@on_ranks(2)
def test_update_between_forward_and_backward_is_an_error(mesh):
    model = shard_all(seeded(Stack), mesh)
    step = compiled(model)
    x = tokens(0)
    for update in (
        lambda: model.get_parameter("layers.0.down.weight").mul_(2),
        lambda: torch._foreach_mul_(list(model.parameters()), 2.0),
    ):
        loss = step(x, x)
        with torch.no_grad():
            update()
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()


def _means(model, mesh, chosen):
    """The gradients of an unsharded model, averaged over ranks, None where not chosen."""
    named = dict(model.named_parameters())
    return {n: mean_over_ranks(p.grad, mesh) if n in chosen else None for n, p in named.items()}


def _check(wanted, got):
    for (name, want), grad in zip(wanted.items(), got, strict=True):
        if want is None:
            assert grad is None, f"{name} has a gradient that was not asked for"
        else:
            assert isinstance(grad, ShardTensor), name
            torch.testing.assert_close(full(grad), want, msg=name)


@pytest.mark.parametrize("executor", ["eager", None])
@on_ranks(2)
def test_backward_for_chosen_inputs(mesh, executor):
    plain, model = seeded(Stack), shard_all(seeded(Stack), mesh)
    step = compiled(model, executor) if executor else model
    x = tokens(mesh.get_local_rank())
    named = dict(model.named_parameters())
    plain(x, x).backward()
    for chosen in (set(named), {"layers.0.up.weight", "head.weight"}):
        step(x, x).backward(inputs=[p for n, p in named.items() if n in chosen])
        _check(_means(plain, mesh, chosen), [p.grad for p in model.parameters()])
        model.zero_grad()
    step(x, x).backward()  # nothing is left over
    _check(_means(plain, mesh, set(named)), [p.grad for p in model.parameters()])
    frozen = model.layers[0].up.weight.requires_grad_(False)
    with pytest.raises(RuntimeError, match="does not require grad"):
        step(x, x).backward(inputs=[frozen, model.head.weight])


@pytest.mark.parametrize("executor", ["eager", None])
@on_ranks(2)
def test_grad_leaves_gradients_alone(mesh, executor):
    plain, model, step = _pair(mesh, Branches)
    step = step if executor else model
    x = torch.full((2, 5), 1.0 + mesh.get_local_rank())
    plain(x).backward()
    stepped = []
    model.both.bias.register_post_accumulate_grad_hook(stepped.append)
    model.both.weight.grad = before = torch.zeros_like(model.both.weight)
    used = [p for n, p in model.named_parameters() if not n.startswith("right")]
    got = torch.autograd.grad(step(x), used)
    wanted = _means(plain, mesh, {n for n, p in plain.named_parameters() if p.grad is not None})
    _check({n: want for n, want in wanted.items() if want is not None}, got)
    assert not stepped and model.both.weight.grad is before
    assert all(p.grad is None for p in model.parameters() if p is not model.both.weight)
    every = list(model.parameters())
    _check(wanted, torch.autograd.grad(step(x), every, allow_unused=True))
    with pytest.raises(RuntimeError, match="appears to not have been used"):
        torch.autograd.grad(step(x), every)
    with pytest.raises(RuntimeError, match="leave out create_graph=True"):
        torch.autograd.grad(step(x), used, create_graph=True)


@on_ranks(2)
def test_gradients_that_wait_are_for_whole_units(mesh):
    plain, model, step = _pair(mesh, Stack)
    x = tokens(mesh.get_local_rank())
    with model.no_sync():
        step(x, x).backward(inputs=list(model.parameters()))
        for call in (
            lambda: step(x, x).backward(inputs=[model.head.weight]),
            lambda: torch.autograd.grad(step(x, x), list(model.parameters())),
        ):
            with pytest.raises(RuntimeError, match="accumulated without being reduced"):
                call()
    with pytest.raises(RuntimeError, match="accumulated without being reduced"):
        step(x, x).backward(inputs=[model.head.weight])
    step(x, x).backward()
    for _ in range(2):
        plain(x, x).backward()
    _check(
        _means(plain, mesh, dict(plain.named_parameters())), [p.grad for p in model.parameters()]
    )
