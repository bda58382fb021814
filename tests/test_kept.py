"""What stays gathered after an uncompiled forward: messages, reads and memory, as FSDP2's."""

import contextlib
import functools
import itertools
from unittest import mock

import pytest
import torch
from fsdp2 import check_against_fsdp2, fsdp2, sharded, whole
from models import (
    CompiledMode,
    Stack,
    batch_of,
    check_parity,
    compiled,
    full,
    loss_of_rank,
    mean_over_ranks,
    seeded,
    tokens,
)
from ranks import on_ranks
from test_eager import Events
from torch import nn
from torch.distributed import fsdp
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import checkpoint

import shardc
from shardc import ShardTensor


def _step(model, call, number):
    loss_of_rank(call, 10 * number).backward()


class _Messages(CompiledMode):
    """What is sent while it is entered, ours and FSDP2's; `counts` has (all-gathers,
    reduce-scatters) appended when it ends."""

    def __init__(self, counts=None):
        super().__init__()
        self.log, self._counts = [], counts

    def __torch_dispatch__(self, op, types, args=(), kwargs=None):
        name = str(op)
        if "c10d" in name and "wait" not in name:
            kinds = {"gather": ("all_gather", "allgather"), "reduce": ("reduce_scatter",)}
            self.log += [kind for kind, texts in kinds.items() if any(t in name for t in texts)]
        return op(*args, **(kwargs or {}))

    def __exit__(self, *error):
        super().__exit__(*error)
        if self._counts is not None:
            self._counts.append((self.log.count("gather"), self.log.count("reduce")))


def _both(mesh, build=Stack, **kwargs):
    return fsdp2(seeded(build), mesh, **kwargs), sharded(seeded(build), mesh, **kwargs)


def _units(model):
    return [*model.layers, model]


def _gathered_bytes(model):
    return 4 * sum(b.layout.numel for m in _units(model) for b in m._shardc_unit.buckets)


# -- messages ------------------------------------------------------------------------------------


@on_ranks(2)
def test_micro_batches_gather_once(mesh):
    theirs, ours = _both(mesh, reshard_after_forward=False)
    counts = {theirs: [], ours: []}

    def step(model, call, number):
        for index in range(3):
            model.set_requires_gradient_sync(index == 2)
            model.set_reshard_after_backward(index == 2)
            with _Messages(counts[model]):
                loss = loss_of_rank(call, 100 * number + 10 * index) / 3
            with _Messages(counts[model]):
                loss.backward()

    check_against_fsdp2(theirs, ours, ours, step, steps=2, tolerance=0)
    assert (counts[ours], counts[theirs]) == 2 * (
        2 * [(3, 0), (0, 0), (0, 0), (0, 0), (0, 0), (0, 3)],
    )


@on_ranks(2)
def test_several_forwards_gather_once(mesh):
    theirs, ours = _both(mesh, reshard_after_forward=False)
    counts = {theirs: [], ours: []}

    def step(model, call, number):
        with _Messages(counts[model]):
            first, second = loss_of_rank(call, number), loss_of_rank(call, number + 7)
        with _Messages(counts[model]):
            (first + 2 * second).backward()

    check_against_fsdp2(theirs, ours, ours, step, steps=2)
    assert counts[ours] == 2 * [(3, 0), (0, 3)]
    assert counts[theirs][::2] == 2 * [(3, 0)]  # then it gathers again


class Parts(nn.Module):
    """Two modules of one unit, one of which a call may leave out, and another."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(6, 7), nn.Linear(7, 6)])
        self.head = nn.Linear(6, 5)

    def forward(self, x, leave_out=False):
        x = self.layers[0](x).relu()
        return self.head(x[..., :6] if leave_out else self.layers[1](x)).square().sum()


@on_ranks(2)
def test_a_unit_of_several_modules_is_gathered_once(mesh):
    theirs, ours = seeded(Parts), seeded(Parts)
    for shard, model in ((fsdp.fully_shard, theirs), (shardc.fully_shard, ours)):
        shard(list(model.layers), mesh=mesh)
        shard(model, mesh=mesh)
    x = torch.randn(3, 6) + mesh.get_local_rank()
    counts = {theirs: [], ours: []}

    def step(model, call, number):
        with _Messages(counts[model]):
            loss = call(x)
        with _Messages(counts[model]):
            loss.backward()

    check_against_fsdp2(theirs, ours, ours, step, steps=3, tolerance=0)
    assert (counts[ours], counts[theirs]) == 2 * (3 * [(2, 0), (1, 2)],)
    with Events() as events, torch.no_grad():
        ours(x)
        ours(x, leave_out=True)
        assert events.alive() == 0


@pytest.mark.parametrize("executor", ["eager", None])
@on_ranks(2)
def test_what_is_unsharded_is_not_gathered_again(mesh, executor):
    plain, model = seeded(Stack), sharded(seeded(Stack), mesh)
    call = compiled(model, executor) if executor else model
    for waits, written in itertools.product((True, False), (None, False, True)):
        counts = []  # at first it is compiled
        with torch.no_grad():
            for _ in range(2):
                with _Messages(counts):
                    model.unshard(async_op=not waits)
            for p in [*plain.parameters(), *model.parameters()] if written else []:
                p.mul_(0.5)
            with contextlib.nullcontext() if written is None else _Messages(counts):
                loss = loss_of_rank(call)
            torch.testing.assert_close(loss, loss_of_rank(plain))
        for module in _units(model):
            module.reshard()
        gathers = [1, 0] if written is None else [1, 0, 3 if written else 2]
        assert [gathered for gathered, _ in counts] == gathers


class Alone(Stack):
    """Its embedding is a unit, whose weights its backward does not read."""

    def __init__(self):
        super().__init__()
        self.layers.insert(0, self.embed)

    def forward(self, tokens, targets):
        x = tokens
        for layer in self.layers:
            x = layer(x)
        return self.head(x).logsumexp(-1).mean() + 0 * targets.sum()


@on_ranks(2)
def test_a_backward_gathers_what_it_reads_only(mesh):
    """FSDP2 has to be told so."""
    theirs, ours = _both(mesh, Alone)
    counts = {theirs: [], ours: []}

    def step(model, call, number):
        with _Messages():
            loss = call(tokens(number), tokens(number))
        with _Messages(counts[model]):
            loss.backward()

    check_against_fsdp2(theirs, ours, ours, step, steps=1, tolerance=0)
    for model in (theirs, ours):
        model.layers[0].set_unshard_in_backward(False)
    check_against_fsdp2(theirs, ours, ours, step, steps=1, tolerance=0)
    assert (counts[theirs], counts[ours]) == ([(3, 4), (2, 4)], [(2, 4), (2, 4)])


# -- what is read --------------------------------------------------------------------------------


@on_ranks(2)
def test_full_parameters_are_read_until_the_backward(mesh):
    plain = seeded(Stack)
    for shard, kind in ((fsdp2, DTensor), (sharded, ShardTensor)):
        model = shard(seeded(Stack), mesh, reshard_after_forward=False)
        weight = lambda m=model: m.layers[0].up.weight  # noqa: E731
        assert isinstance(weight(), kind)
        loss = loss_of_rank(model)
        assert not isinstance(weight(), kind) and torch.equal(weight(), plain.layers[0].up.weight)
        loss.backward()
        assert isinstance(weight(), kind) and whole(weight().grad).any()
        loss = loss_of_rank(model)
        for module in _units(model):
            module.reshard()
        assert isinstance(weight(), kind)
        loss.backward()


@on_ranks(2)
def test_the_root_stays_gathered_and_others_do_not(mesh):
    model = sharded(seeded(Stack), mesh)
    loss = loss_of_rank(model)
    assert isinstance(model.layers[0].up.weight, ShardTensor)
    assert not isinstance(model.head.weight, ShardTensor)
    assert all(isinstance(p, ShardTensor) for p in model.parameters())  # whatever stays gathered
    assert all(isinstance(value, ShardTensor) for value in model.state_dict().values())
    loss.backward()
    with torch.no_grad():
        loss_of_rank(model)
    assert isinstance(model.head.weight, ShardTensor)  # no backward follows


@on_ranks(2)
def test_what_stays_is_not_read_once_parameters_were_written(mesh):
    plain, model = seeded(Stack), sharded(seeded(Stack), mesh)
    loss_of_rank(model)
    with torch.no_grad():
        for run in (plain, model):
            dict(run.named_parameters())["head.weight"].mul_(2)
    assert isinstance(model.head.weight, ShardTensor)
    check_parity(plain, model, model, batch_of, mesh)
    loss_of_rank(model)
    model.double()
    assert isinstance(model.head.weight, ShardTensor)


@on_ranks(2)
def test_a_write_to_what_stays_is_an_error(mesh):
    for then in ("backward", "reshard"):
        model = sharded(seeded(Stack), mesh)
        loss = loss_of_rank(model)
        if then == "backward":
            nn.init.zeros_(model.head.weight)
        else:
            model.head.weight.data = torch.zeros(31, 18)
        with pytest.raises(RuntimeError, match=r"parameters of Stack were written .* are lost"):
            loss.backward() if then == "backward" else model.reshard()
        model.zero_grad()
        loss_of_rank(model).backward()


@on_ranks(2)
def test_unreduced_gradients_are_read_from_full_parameters(mesh):
    plain = seeded(Stack)
    theirs, ours = _both(mesh)
    compiles = sharded(seeded(Stack), mesh)
    runs = ((theirs, theirs), (ours, ours), (compiles, compiled(compiles)))
    for number in range(2):
        loss_of_rank(plain, number).backward()
        for model, call in runs:
            model.set_requires_gradient_sync(False)
            model.set_reshard_after_backward(False)
            loss_of_rank(call, number).backward()
            seen = model.layers[1].down.weight
            assert torch.equal(seen.grad, plain.layers[1].down.weight.grad)
            assert torch.equal(model.head.weight.grad, plain.head.weight.grad)
    for model, call in runs[1:]:
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        assert all(p.grad is None for p in model.parameters())
        with pytest.raises(RuntimeError, match="accumulated but not reduced"):
            optimizer.step()
        model.head.weight.grad.mul_(3)  # it is what will be reduced
        model.set_requires_gradient_sync(True)
        model.set_reshard_after_backward(True)
        loss_of_rank(call, 2).backward()
        assert isinstance(model.head.weight, ShardTensor)
    want = mean_over_ranks(3 * plain.head.weight.grad, mesh)
    plain.zero_grad()
    loss_of_rank(plain, 2).backward()
    want += mean_over_ranks(plain.head.weight.grad, mesh)
    for model, _ in runs[1:]:
        torch.testing.assert_close(full(model.head.weight.grad), want)
        model.zero_grad()


@on_ranks(2)
def test_an_unreduced_gradient_is_seen_after_unshard_and_gone_after_zero_grad(mesh):
    plain, model = seeded(Stack), sharded(seeded(Stack), mesh)
    with model.no_sync():
        loss_of_rank(model).backward()
    assert model.head.weight.grad is None  # a part, as is the parameter
    loss_of_rank(plain).backward()
    model.unshard()
    seen = model.head.weight
    assert torch.equal(seen.grad, plain.head.weight.grad)
    model.zero_grad()
    assert seen.grad is None and model.head.weight.grad is None
    model.reshard()
    assert isinstance(model.head.weight, ShardTensor)


# -- memory --------------------------------------------------------------------------------------


@on_ranks(2)
def test_reshard_between_forward_and_backward_frees(mesh):
    theirs, ours = _both(mesh, reshard_after_forward=False)
    counts = {theirs: [], ours: []}
    with Events() as events:

        def step(model, call, number):
            loss = loss_of_rank(call, number)
            if model is ours:
                assert events.alive(_gathered_bytes(model)) == _gathered_bytes(model)
            for module in _units(model):
                module.reshard()
            assert model is theirs or events.alive() == 0
            with _Messages(counts[model]):
                loss.backward()

        check_against_fsdp2(theirs, ours, ours, step, steps=2, tolerance=0)
    assert (counts[ours], counts[theirs]) == 2 * (2 * [(3, 3)],)


@on_ranks(2)
def test_what_the_backward_does_not_reach_is_freed_with_it(mesh):
    model = seeded(Stack)
    for frozen in (model.embed, model.layers[0]):
        frozen.requires_grad_(False)
    sharded(model, mesh, reshard_after_forward=False)
    with Events() as events:
        for number in range(2):
            loss = loss_of_rank(model, number)
            assert events.alive(_gathered_bytes(model)) == _gathered_bytes(model)
            assert len(events.of("start")) == 4 * (number + 1)
            loss.backward()
            assert events.alive() == 0
    assert isinstance(model.embed.weight, ShardTensor)


# -- recomputed code -------------------------------------------------------------------------------


class Reads(nn.Module):
    """A block that reads its own list of parameters and a parameter of the module around it."""

    def __init__(self, outer):
        super().__init__()
        self.up = nn.Linear(6, 6)
        self.weights = nn.ParameterList([nn.Parameter(torch.eye(6) + 1)])
        self.outer = [outer]

    def forward(self, x):
        return self.up(x) @ self.weights[0] * self.outer[0].scale


class Recomputes(nn.Module):
    def __init__(self, reentrant):
        super().__init__()
        self.scale = nn.Parameter(torch.linspace(1, 2, 6))
        self.layers = nn.ModuleList(Reads(self) for _ in range(2))
        self.checkpoint = functools.partial(checkpoint, use_reentrant=reentrant)

    def forward(self, x):
        x = self.checkpoint(self.layers[0], x * self.scale)
        return self.checkpoint(lambda y: self.layers[1](y) * self.scale, x).square().mean()


@pytest.mark.parametrize(
    ("reentrant", "units", "reshard"),
    [(True, True, True), (True, False, None), (False, True, None), (False, False, True)],
)
@on_ranks(2)
def test_recomputed_code_reads_parameters_of_others(mesh, reentrant, units, reshard):
    build = functools.partial(Recomputes, reentrant)
    plain, model = seeded(build), seeded(build)
    if units:
        sharded(model, mesh, reshard_after_forward=reshard)
    else:
        shardc.fully_shard(model, mesh=mesh, reshard_after_forward=reshard)

    def batch(seed):
        return {"x": torch.randn(3, 6, generator=torch.Generator().manual_seed(seed))}

    with Events() as events:
        check_parity(plain, model, model, batch, mesh)
        assert events.alive() == 0
        events.log.clear()
        model(torch.ones(3, 6)).backward()
        starts = events.of("start")
    if reshard is None and not reentrant:
        assert starts == ["Recomputes", "layers.0", "layers.1", "layers.1", "layers.0"]
    assert isinstance(model.scale, ShardTensor)


@on_ranks(2)
def test_hooks_of_gradients_read_shards(mesh):
    model = sharded(seeded(Stack), mesh)
    seen = []
    for module in (model.head, model.layers[0].up):
        for when in ("register_hook", "register_post_accumulate_grad_hook"):
            hook = lambda _, m=module: seen.append(type(m.weight))  # noqa: E731
            getattr(module.weight, when)(hook)
    loss_of_rank(model).backward()
    assert seen == 4 * [ShardTensor]


# -- events, shared communicators ----------------------------------------------------------------


@pytest.mark.parametrize("executor", ["eager", None])
@on_ranks(2)
def test_gathers_wait_for_the_event_of_the_optimizer(mesh, executor):
    model = sharded(seeded(Stack), mesh)
    call = compiled(model, executor) if executor else model
    loss_of_rank(call).backward()
    event, sent = mock.Mock(spec=torch.Event), _Messages()
    event.wait.side_effect = lambda *_: sent.log.append("event")
    model.set_post_optim_event(event)
    assert not sent.log
    with sent:
        loss_of_rank(call).backward()
        assert sent.log[:4] == ["event", *3 * ["gather"]]
        loss_of_rank(call).backward()
        model.set_post_optim_event(event)
        model.set_post_optim_event(None)
        loss_of_rank(call).backward()
        assert sent.log.count("event") == 1


@on_ranks(2)
def test_communicators_and_limits_are_shared(mesh):
    first, second = (sharded(seeded(Stack), mesh) for _ in range(2))
    first.set_separate_reduce_scatter_group()
    first.set_reduce_scatter_max_input_buffers(2)
    own = first._shardc_unit.buckets[0].key.code.reduction.group
    assert own is not None
    shardc.share_comm_ctx([])
    shardc.share_comm_ctx([first, second])
    for module in _units(second):
        assert [b.key.code.reduction.group for b in module._shardc_unit.buckets] == [own]
        assert module._shardc_unit.settings.reduce_buffers == 2
    loss_of_rank(second).backward()
    with pytest.raises(ValueError, match="was not"):
        shardc.share_comm_ctx([first, nn.Linear(2, 2)])
    assert all(b.key.code.reduction.group == own for b in second._shardc_unit.buckets)
