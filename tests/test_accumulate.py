"""Gradient accumulation without sync: sums, what `.grad` shows meanwhile, refusals."""

import contextlib
import functools
import gc
import itertools

import pytest
import torch
import torch.nn.functional as F
from fsdp2 import check_against_fsdp2, fsdp2, sharded
from models import Stack as TwoBlocks
from models import Wire, check_gradients, compiled, full, loss_of_rank, seeded, tokens
from ranks import mesh_of, on_ranks
from torch import nn
from torch.utils.checkpoint import checkpoint

from shardc import fully_shard

Stack = functools.partial(TwoBlocks, 1)


def _check_and_drop_gradients(plain, model, mesh):
    check_gradients(plain, model, mesh, rtol=1e-4, atol=1e-6)
    plain.zero_grad()
    model.zero_grad()


LATER = pytest.mark.parametrize(
    ("later", "shape"),
    [("set_requires_gradient_sync", (2,)), ("set_requires_all_reduce", (2, 1))],
)
"""What makes gradients wait, and a mesh on which it does."""


def _mesh(shape):
    return mesh_of("cpu", shape, mesh_dim_names=("replicate", "shard")[-len(shape) :])


def _grads(model):
    return {n: None if p.grad is None else full(p.grad) for n, p in model.named_parameters()}


@pytest.mark.parametrize("executor", ["eager", "inductor", None])
@on_ranks(2)
def test_equal_to_the_concatenated_batch(mesh, executor):
    plain, model = seeded(Stack), sharded(seeded(Stack), mesh)
    call = compiled(model, executor, fullgraph=True) if executor else model
    for _ in range(2):
        with model.no_sync():
            for seed in (100, 200):
                (loss_of_rank(call, seed) / 3).backward()
                assert all(p.grad is None for p in model.parameters())
        (loss_of_rank(call, 300) / 3).backward()
        rank = mesh.get_local_rank()
        seeds = [seed + rank for seed in (100, 200, 300)]
        inputs = torch.cat([tokens(s) for s in seeds]), torch.cat([tokens(s + 50) for s in seeds])
        plain(*inputs).backward()
        _check_and_drop_gradients(plain, model, mesh)


class Recomputing(nn.Module):
    """Reads one bucket in three places: two checkpointed blocks, and outside of them."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(61, 18)
        self.blocks = nn.ModuleList(nn.Linear(18, 18) for _ in range(2))
        self.shift = nn.Parameter(torch.ones(18))

    def forward(self, tokens, targets):
        x = self.embed(tokens)
        for block in self.blocks:
            x = checkpoint(lambda x, block=block: torch.tanh(block(x + self.shift)), x,
                           use_reentrant=False)  # fmt: skip
        return (x * self.shift - self.embed(targets)).square().mean()


@pytest.mark.parametrize(
    ("executor", "later"),
    [
        ("eager", "set_requires_gradient_sync"),
        ("eager", "set_requires_all_reduce"),
        ("inductor", "set_requires_all_reduce"),
        (None, "set_requires_gradient_sync"),
        (None, "set_requires_all_reduce"),
    ],
)
@on_ranks(4)
def test_what_waits_is_added_once_however_often_a_bucket_is_read(mesh, executor, later):
    grid = _mesh((2, 2))
    plain, model = seeded(Recomputing), fully_shard(seeded(Recomputing), mesh=grid)
    call = compiled(model, executor, fullgraph=True) if executor else model
    for _ in range(2):
        for seed, last in ((100, False), (200, True)):
            getattr(model, later)(last)
            loss_of_rank(plain, seed).backward()
            loss = loss_of_rank(call, seed)
            with Wire() as wire:
                loss.backward()
        sent = [message.kind for message in wire.sent if message.kind != "all_gather"]
        assert sent == ["reduce_scatter", "all_reduce"], sent
        _check_and_drop_gradients(plain, model, mesh)


class Checkpointed(nn.Module):
    """A block that is recomputed in the backward, from outside."""

    def __init__(self):
        super().__init__()
        self.block = nn.Sequential(nn.Linear(18, 18), nn.Tanh())

    def forward(self, tokens, targets):
        x = F.one_hot(tokens % 18, 18).float()
        return checkpoint(self.block, x, use_reentrant=False).square().mean()


@LATER
@on_ranks(2)
def test_a_checkpoint_around_a_block_compiled_alone(mesh, later, shape):
    plain, model = seeded(Checkpointed), fully_shard(seeded(Checkpointed), mesh=_mesh(shape))
    model.block.compile(backend="shardc", options={"executor": "eager"})
    for _ in range(2):
        for seed, last in ((100, False), (200, False), (300, True), (400, True)):
            getattr(model, later)(last)
            loss_of_rank(plain, seed).backward()
            loss_of_rank(model, seed).backward()
        _check_and_drop_gradients(plain, model, mesh)


class Reentrant(nn.Module):
    """The backward of the second block runs inside of the whole one."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(18, 18), nn.Linear(18, 18)

    def forward(self, tokens, targets):
        x = self.first(F.one_hot(tokens % 18, 18).float())
        return checkpoint(self.second, x, use_reentrant=True).square().mean()


@LATER
@pytest.mark.parametrize("executor", ["eager", None])
@on_ranks(2)
def test_a_reentrant_checkpoint_leaves_what_waits_to_the_backward_around_it(
    mesh, executor, later, shape
):
    plain, model = seeded(Reentrant), seeded(Reentrant)
    fully_shard(model.second, mesh=_mesh(shape))
    fully_shard(model, mesh=_mesh(shape))
    for block in (model.first, model.second) if executor else ():
        block.compile(backend="shardc", options={"executor": executor})
    given = []
    model.first.weight.register_post_accumulate_grad_hook(given.append)
    for _ in range(2):
        given.clear()
        for seed, last in ((100, False), (200, True)):
            getattr(model, later)(last)
            loss_of_rank(plain, seed).backward()
            loss_of_rank(model, seed).backward()
        assert len(given) == 1
        _check_and_drop_gradients(plain, model, mesh)


class Regions(nn.Module):
    """Calls a region twice that reads the same layer."""

    def __init__(self):
        super().__init__()
        self.first, self.lin = nn.Linear(18, 18), nn.Linear(18, 18)

    def forward(self, tokens, targets):
        x = self.first(F.one_hot(tokens % 18, 18).float()).tanh()
        region = torch.compiler.nested_compile_region(lambda x: self.lin(x).tanh())
        return region(region(x)).square().mean()


@on_ranks(2)
def test_what_waits_is_refused_where_a_region_would_add_it_again(mesh):
    model = fully_shard(seeded(Regions), mesh=mesh)
    call = compiled(model)
    with model.no_sync():
        loss_of_rank(call, 100).backward()
    with pytest.raises(Exception, match=r"gradients of Regions wait .* as 1 other place"):
        loss_of_rank(call, 200)


@on_ranks(2)
def test_a_bucket_that_the_last_micro_batch_does_not_use(mesh):
    class Two(nn.Module):
        def __init__(self):
            super().__init__()
            self.left, self.right = nn.Linear(4, 4), nn.Linear(4, 4)

        def forward(self, x, left):
            return (self.left if left else self.right)(x).square().sum()

    for call_compiled in (True, False):
        plain, model = seeded(Two), seeded(Two)
        for part in (model.left, model.right):
            fully_shard(part, mesh=mesh)
        fully_shard(model, mesh=mesh)
        call = compiled(model) if call_compiled else model
        x = torch.ones(2, 4) * (1 + mesh.get_local_rank())
        with model.no_sync():
            call(x, True).backward()
        call(x, False).backward()
        plain(x, True).backward()
        plain(x, False).backward()
        _check_and_drop_gradients(plain, model, mesh)


@pytest.mark.parametrize("executor", ["eager", None])
@on_ranks(2)
def test_what_waits_in_another_model_is_left_alone(mesh, executor):
    plain, models = seeded(Stack), [fully_shard(seeded(Stack), mesh=mesh) for _ in range(3)]
    calls = [compiled(m, executor=executor) if executor else m for m in models]
    for call in calls[1:]:
        with models[1].no_sync(), models[2].no_sync():
            loss_of_rank(call, 1).backward()
    if mesh.get_local_rank() == 1:
        del models[2], calls[2], call
        gc.collect()  # on this rank only
    loss_of_rank(calls[0], 2).backward()
    assert all(p.grad is None for p in models[1].parameters())
    loss_of_rank(calls[1], 2).backward()
    loss_of_rank(plain, 2).backward()
    _check_and_drop_gradients(plain, models[0], mesh)
    for seed in (1, 2):
        loss_of_rank(plain, seed).backward()
    _check_and_drop_gradients(plain, models[1], mesh)


@on_ranks(2)
def test_a_closure_may_reduce_what_waited(mesh):
    """A step that is given the last micro-batch as its closure, as Lightning's Trainer does."""
    model, want = sharded(seeded(Stack), mesh), sharded(seeded(Stack), mesh)
    steps = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (model, want)]
    with model.no_sync():
        loss_of_rank(model, 1).backward()
    with want.no_sync():
        loss_of_rank(want, 1).backward()

    def closure():
        loss = loss_of_rank(model, 2)
        loss.backward()
        return loss

    loss_of_rank(want, 2).backward()
    steps[1].step()
    before = full(model.embed.weight)
    steps[0].step(closure)
    assert not torch.equal(full(model.embed.weight), before)
    for name, param in model.named_parameters():
        assert torch.equal(full(param), full(want.get_parameter(name))), name
    with model.no_sync():
        loss_of_rank(model, 1).backward()
        with pytest.raises(RuntimeError, match=r"accumulated but not reduced"):
            steps[0].step(closure=closure)


@on_ranks(2)
def test_grad_stays_what_it_was_and_zero_grad_discards(mesh):
    model = sharded(seeded(Stack), mesh)
    call = compiled(model)
    loss_of_rank(call, 1).backward()
    before = _grads(model)
    with model.no_sync():
        loss_of_rank(call, 2).backward()
    for name, grad in _grads(model).items():
        assert torch.equal(grad, before[name]), name
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(RuntimeError, match=r"accumulated but not reduced.*zero_grad"):
        optimizer.step()
    for zero_grad in (optimizer.zero_grad, model.zero_grad):
        zero_grad()
        optimizer.step()  # nothing is pending
        loss_of_rank(call, 1).backward()
        for name, grad in _grads(model).items():
            torch.testing.assert_close(grad, before[name], msg=name)
        with model.no_sync():
            loss_of_rank(call, 2).backward()


@pytest.mark.parametrize("setter", ["set_requires_gradient_sync", "set_requires_all_reduce"])
@pytest.mark.parametrize("executor", ["eager", None])
@on_ranks(4)
def test_zero_grad_of_one_optimizer_leaves_what_others_wait_for(mesh, executor, setter):
    shape = (2, 2) if setter == "set_requires_all_reduce" else (4,)
    plain = seeded(Stack)
    model = sharded(seeded(Stack), mesh_of("cpu", shape, ("copies", "shards")[: len(shape)]))
    call = compiled(model) if executor else model
    some = ("layers.0.up.weight", "layers.0.norm.bias", "head.weight")
    optimizer = torch.optim.SGD([model.get_parameter(name) for name in some], lr=0.1)
    others = [param for name, param in model.named_parameters() if name not in some]
    x, y = tokens(mesh.get_local_rank()), tokens(10 + mesh.get_local_rank())
    for _ in range(2):
        getattr(model, setter)(False)
        call(x, x).backward()
        optimizer.zero_grad()
        optimizer.step()  # nothing waits for its parameters
        with pytest.raises(RuntimeError, match="accumulated but not reduced"):
            torch.optim.SGD(others, lr=0.1).step()
        getattr(model, setter)(True)
        call(y, y).backward()
        plain(x, x).backward()
        for name in some:
            plain.get_parameter(name).grad = None
        plain(y, y).backward()
        check_gradients(plain, model, mesh)
        plain.zero_grad()
        model.zero_grad()


@on_ranks(2)
def test_contexts_nest_and_restore(mesh):
    model = sharded(seeded(Stack), mesh)
    inner = model.layers[0]
    with pytest.raises(RuntimeError, match="outermost"), inner.no_sync():
        pass
    inner.set_requires_gradient_sync(False)
    flags = lambda: [m._shardc_unit.settings.sync for m in (model, inner)]  # noqa: E731
    with model.no_sync():
        with pytest.raises(ZeroDivisionError), model.no_sync():
            raise ZeroDivisionError
        assert flags() == [False, False]
    assert flags() == [True, False]
    call = compiled(model)
    loss_of_rank(call, 1).backward()  # only the inner unit waits
    grads = _grads(model)
    assert {n for n, g in grads.items() if g is None} == {
        n for n in grads if n.startswith("layers.0")
    }


@on_ranks(2)
def test_two_forwards_before_the_backwards_add_what_waits_once(mesh):
    plain, model = seeded(Stack), sharded(seeded(Stack), mesh)
    call = compiled(model)
    with model.no_sync():
        loss_of_rank(call, 100).backward()
    bucket = model._shardc_unit.buckets[0]
    assert bucket.key.code.reduction.pending
    loss_of_rank(call, 700)  # abandoned
    # No other forward is given the sums: a reduction under way may read them when the abandoned
    # forward's backward sets them to zero.
    assert not bucket.key.code.reduction.pending
    losses = [loss_of_rank(call, seed) for seed in (200, 300)]
    for loss in losses:
        loss.backward()
    for seed in (100, 200, 300):
        loss_of_rank(plain, seed).backward()
    _check_and_drop_gradients(plain, model, mesh)
    with model.no_sync():
        loss_of_rank(call, 100).backward()
    late = loss_of_rank(call, 200)
    model.zero_grad()
    late.backward()
    loss_of_rank(plain, 200).backward()
    _check_and_drop_gradients(plain, model, mesh)
    for _ in range(2):  # of a pipeline's stage, 1F1B: a backward between a forward and its own
        with model.no_sync():
            loss_of_rank(call, 100).backward()
            second = loss_of_rank(call, 200)
        last = loss_of_rank(call, 300)
        second.backward()
        last.backward()
        for seed in (100, 200, 300):
            loss_of_rank(plain, seed).backward()
        _check_and_drop_gradients(plain, model, mesh)


@LATER
@on_ranks(2)
def test_a_gradient_that_waits_after_a_forward_took_those_before_it(mesh, later, shape):
    plain, model = seeded(Stack), sharded(seeded(Stack), _mesh(shape))
    call = compiled(model)
    for between, late in itertools.product((compiled(model), model), (False, True)):
        getattr(model, later)(False)
        loss_of_rank(call, 100).backward()
        waiting = loss_of_rank(between, 200)
        getattr(model, later)(True)
        took = loss_of_rank(call, 300)
        getattr(model, later)(False)
        waiting.backward()
        if not late:
            getattr(model, later)(True)
        took.backward()
        getattr(model, later)(True)
        loss_of_rank(call, 400).backward()
        for seed in (100, 200, 300, 400):
            loss_of_rank(plain, seed).backward()
        _check_and_drop_gradients(plain, model, mesh)


def _reduced(model, call, took, mesh):
    loss = loss_of_rank(model, 300)  # uncompiled: it is not given the sums
    loss.backward()
    took.backward()
    return [100, 200, 300]


def _twice(model, call, took, mesh):
    took.backward(retain_graph=True)
    took.backward()
    return [100, 200, 200]


def _later_first(model, call, took, mesh):
    later = loss_of_rank(call, 300)
    later.backward()
    took.backward()
    return [100, 200, 300]


def _discarded(model, call, took, mesh):
    model.zero_grad()
    loss_of_rank(call, 300).backward()
    took.backward()
    return [200, 300]


def _copied(model, call, took, mesh):
    model.zero_grad()
    with model.no_sync():
        loss_of_rank(call, 100).backward()
        waiting = loss_of_rank(call, 200)
    with torch.autograd.graph.saved_tensors_hooks(lambda t: t.clone(), lambda t: t):
        took = loss_of_rank(call, 300)
    waiting.backward()
    took.backward()
    return [100, 200, 300]


def _abandoned(model, call, took, mesh):
    del took
    loss_of_rank(call, 300).backward()
    return [100, 300]


@LATER
@on_ranks(2)
def test_sums_that_a_forward_was_given_and_that_do_not_wait_any_more(mesh, later, shape):
    plain, model = seeded(Stack), sharded(seeded(Stack), _mesh(shape))
    call = compiled(model)
    for then in (_reduced, _twice, _later_first, _discarded, _copied, _abandoned):
        getattr(model, later)(False)
        loss_of_rank(call, 100).backward()
        getattr(model, later)(True)
        for seed in then(model, call, loss_of_rank(call, 200), mesh):
            loss_of_rank(plain, seed).backward()
        _check_and_drop_gradients(plain, model, mesh)


SETTERS_OF_REDUCTIONS = {
    "set_requires_all_reduce": (True, False),
    "set_gradient_divide_factor": (2.0, 1.0),
}


@pytest.mark.parametrize("setter", SETTERS_OF_REDUCTIONS)
@on_ranks(2)
def test_a_graph_finishes_its_reduction_as_its_forward_was_set(mesh, setter):
    plain, model = seeded(Stack), sharded(seeded(Stack), _mesh((2, 1)))
    call, change = compiled(model), functools.partial(getattr(model, setter), recurse=True)
    before, after = SETTERS_OF_REDUCTIONS[setter]
    change(before)
    loss = loss_of_rank(call, 100)
    change(after)
    loss.backward()
    loss_of_rank(plain, 100).backward()
    _check_and_drop_gradients(plain, model, mesh)
    first = loss_of_rank(call, 100)
    change(before)
    with pytest.raises(RuntimeError, match="one backward differentiates two forwards"):
        (first + loss_of_rank(call, 200)).backward()


@pytest.mark.parametrize("executor", ["eager", None])
@on_ranks(4)
def test_reductions_over_copies_can_wait(mesh, executor):
    grid = _mesh((2, 2))
    theirs, ours = fsdp2(seeded(Stack), grid), sharded(seeded(Stack), grid)
    buckets = [b for m in (ours, *ours.layers) for b in m._shardc_unit.buckets]

    def step(model, call, number):
        for index in range(3):
            model.set_requires_all_reduce(index == 2)
            model.set_is_last_backward(index == 2)
            with Wire() if number else contextlib.nullcontext() as wire:
                (loss_of_rank(call, 100 * number + 10 * index) / 3).backward()
            if model is ours:
                assert all((p.grad is None) == (index < 2) for p in model.parameters())
                partial = [b.gradients.waiting.partial for b in buckets]
                shapes = [b.segment.shape if index < 2 else None for b in buckets]
                assert [getattr(each, "shape", None) for each in partial] == shapes
            if model is ours and number:
                kinds = [message.kind for message in wire.sent]
                assert kinds.count("reduce_scatter") == 2
                assert kinds.count("all_reduce") == (2 if index == 2 else 0)

    check_against_fsdp2(theirs, ours, compiled(ours, executor) if executor else ours, step, steps=2)


@pytest.mark.parametrize("executor", ["eager", None])
@on_ranks(2)
def test_two_forwards_wait_to_be_reduced_over_copies(mesh, executor):
    plain, model = seeded(Stack), sharded(seeded(Stack), _mesh((2, 1)))
    call = compiled(model, executor) if executor else model
    for run in (plain, call):
        model.set_requires_all_reduce(False)
        (loss_of_rank(run, 100) + loss_of_rank(run, 200)).backward()
        model.set_requires_all_reduce(True)
        loss_of_rank(run, 300).backward()
    _check_and_drop_gradients(plain, model, mesh)


@pytest.mark.parametrize("sync", [True, False])
@on_ranks(2)
def test_buckets_kept_from_step_to_step(mesh, sync):
    theirs, ours = fsdp2(seeded(Stack), mesh), sharded(seeded(Stack), mesh)
    buckets = [b for m in (ours, *ours.layers) for b in m._shardc_unit.buckets]

    def step(model, call, number):
        for index in range(3):
            last = index == 2
            model.set_reshard_after_backward(last)
            model.set_requires_gradient_sync(last or sync)
            (loss_of_rank(call, 100 * number + 10 * index) / 3).backward()
            assert model is theirs or all(b.gathered.is_held == (not last) for b in buckets)

    check_against_fsdp2(theirs, ours, compiled(ours), step)


@on_ranks(2)
def test_what_is_kept_follows_an_update(mesh):
    plain, model = seeded(Stack), sharded(seeded(Stack), mesh)
    model.set_reshard_after_backward(False)
    for call in (compiled(model), model):
        loss_of_rank(call, 1).backward()
        with torch.no_grad():
            for p, q in zip(plain.parameters(), model.parameters(), strict=True):
                p.mul_(0.5)
                q.mul_(0.5)
        torch.testing.assert_close(loss_of_rank(call, 2), loss_of_rank(plain, 2))
