"""Deleted models leave nothing behind: no bucket, no segment, no entry in a table of the process.

A model is deleted, garbage is collected once, and weak references tell what is left.
"""

import collections
import copy
import gc
import sys
import threading
import weakref
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from models import Block, Stack, compiled, full, seeded, shard_all, tokens
from ranks import mesh_of, on_ranks, stop_all
from torch import nn
from torch.distributed.fsdp import CPUOffloadPolicy
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import shardc
from shardc import MixedPrecisionPolicy, fully_shard, units_of
from shardc.runtime import compat
from shardc.runtime.checks import call_sites
from shardc.runtime.comm import host_copies
from shardc.runtime.layout import spec


@pytest.fixture(scope="module", autouse=True)
def _fresh_ranks():
    """Ranks in which no test of another file has left tensors, caches and imports."""
    stop_all()


def _made(mesh, **options):
    gc.set_threshold(700, 10, 10)  # Python's own, as in a program of a user
    return shard_all(seeded(Stack), mesh, **options)


def _traces(model):
    """Weak references to what a model consists of, by name."""
    units = [module._shardc_unit for module in units_of(model).values()]
    buckets = [bucket for unit in units for bucket in unit.buckets]
    found = {f"module {name}": module for name, module in model.named_modules()}
    found |= {f"parameter {name}": param for name, param in model.named_parameters()}
    found |= {f"unit {unit.name}": unit for unit in units}
    for bucket in buckets:
        found |= {f"{bucket}": bucket, f"segment of {bucket}": bucket.segment.untyped_storage()}
    return {name: weakref.ref(thing) for name, thing in found.items()}


def _left(traces):
    gc.collect()
    return [name for name, reference in traces.items() if reference() is not None]


def _loss(call, seed=0):
    return call(tokens(seed), tokens(seed + 1))


def _step(model, call, optimizer=torch.optim.AdamW):
    opt = optimizer(model.parameters(), lr=0.1)
    _loss(call).backward()
    opt.step()
    opt.zero_grad()


# -- what was done with a model before it was deleted ----------------------------------------------


def _nothing(model, call): ...


def _forward(model, call):
    _loss(call)


def _evaluate(model, call):
    with torch.no_grad():
        _loss(call)


def _accumulate(model, call):
    with model.no_sync():
        _loss(call).backward()
    _step(model, call)


def _leave_accumulated(model, call):
    with model.no_sync():
        _loss(call).backward()


def _hold(model, call):
    model.set_reshard_after_backward(False)
    _step(model, call)
    _loss(call).backward()


def _unshard(model, call):
    model.unshard()
    model.kept = model.embed.weight.square().sum()  # a graph of full parameters
    _step(model, call)
    model.unshard()
    model.kept += model.embed.weight.sum()


def _keep_graphs(model, call):
    """As modules do that keep an auxiliary loss, or what they returned."""
    model.kept = _loss(call)
    _step(model, call)
    model.also_kept = _loss(call)


def _fail(model, call):
    def fail(*_):
        raise RuntimeError("as asked")

    handle = model.head.register_forward_hook(fail)
    with pytest.raises(RuntimeError, match="as asked"):
        _loss(call)
    handle.remove()
    loss = _loss(call)
    loss.register_hook(fail)
    with pytest.raises(RuntimeError, match="as asked"):
        loss.backward()
    model.reset_iter_state()


def _change(model, call):
    model.double()
    model.head.weight = nn.Parameter(torch.zeros_like(full(model.head.weight)))
    with shardc.summon_full_params(model):
        pass
    _step(copy.deepcopy(model), model)
    _step(model, call, torch.optim.SGD)


USES = (
    _nothing, _forward, _evaluate, _step, _accumulate, _leave_accumulated, _hold, _unshard,
    _keep_graphs, _fail, _change,
)  # fmt: skip


@on_ranks(2)
def test_uncompiled(mesh):
    for use in USES:
        model = _made(mesh)
        traces = _traces(model)
        use(model, model)
        del model
        assert not _left(traces), use.__name__


@pytest.mark.parametrize(
    "options",
    [
        {"mp_policy": MixedPrecisionPolicy(torch.bfloat16, torch.float32)},
        {"offload_policy": CPUOffloadPolicy(pin_memory=False)},
        {"reshard_after_forward": False},
        {"reshard_after_forward": 1},
    ],
)
@on_ranks(2)
def test_with_options(mesh, options):
    for use in (_step, _accumulate):
        model = _made(mesh, **options)
        traces = _traces(model)
        use(model, model)
        del model
        assert not _left(traces), use.__name__


@pytest.mark.parametrize("executor", ["eager", "inductor"])
@on_ranks(2)
def test_compiled(mesh, executor):
    """No more than of a model that torch compiles: its code stays, without the model."""
    for use in (_step, _forward) if executor == "eager" else (_step,):
        for in_place in (False, True):
            model = _made(mesh)
            traces = _traces(model)
            if in_place:
                model.compile(backend="shardc", options={"executor": executor})
            use(model, model if in_place else compiled(model, executor))
            del model
            assert not _left(traces), (use.__name__, in_place)


class Tiny(nn.Module):
    """A block whose linear layers can be parallel."""

    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x):
        return self.down(self.up(x).relu())


@on_ranks(4)
def test_tensor_parallel(mesh):
    grid = mesh_of("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    plan = {"up": ColwiseParallel(), "down": RowwiseParallel()}
    for in_place in (False, True):
        model = parallelize_module(seeded(Tiny), grid["tp"], plan)
        fully_shard(model, mesh=grid["dp"])
        traces = _traces(model)
        if in_place:
            model.compile(backend="shardc", options={"executor": "eager"})
        opt = torch.optim.AdamW(model.parameters())
        model(torch.ones(2, 8)).sum().backward()
        opt.step()
        del model, opt
        assert not _left(traces), in_place


def _tables():
    """The sizes of all containers and caches at the level of shardc's modules."""
    sizes = {}
    for module in [m for name, m in sys.modules.items() if name.split(".")[0] == "shardc"]:
        for name, value in vars(module).items():
            if isinstance(value, collections.abc.Sized) and not isinstance(value, (str, bytes)):
                sizes[module.__name__, name] = len(value)
            if hasattr(value, "cache_info"):
                sizes[module.__name__, f"{name}()"] = value.cache_info().currsize
    return sizes


def _bytes_of_tensors():
    storages = {
        thing.untyped_storage()._cdata: thing.untyped_storage().nbytes()
        for thing in gc.get_objects()
        if type(thing) in (torch.Tensor, nn.Parameter)
    }
    return sum(storages.values())


@on_ranks(2)
def test_fifty_models(mesh):
    traces, sizes = {}, []
    for number in range(50):
        model = _made(mesh)
        traces |= {f"{number}: {name}": ref for name, ref in _traces(model).items()}
        _step(model, model)
        del model
        if number in (9, 49):
            assert not _left(traces)
            sizes.append((_tables(), _bytes_of_tensors()))
    # What tests before this one have left may come and go; an entry a model would be 40.
    (tables, held), (tables_later, held_later) = sizes
    assert all(size - tables.get(name, 0) < 40 for name, size in tables_later.items())
    assert held_later - held < 40 * sum(p.to_local().nbytes for p in _made(mesh).parameters())


class _Halving:
    """A hook of `set_all_reduce_hook`, with a count of its calls."""

    calls = 0

    def __call__(self, part):
        _Halving.calls += 1
        part.mul_(0.5)


@pytest.mark.parametrize("executor", [None, "eager"])
@on_ranks(2)
def test_objects_of_the_user_go_with_the_model(mesh, executor):
    before, hooks = len(spec._objects), []
    for _ in range(3):
        model = _made(mesh)
        hook = _Halving()
        hooks.append(weakref.ref(hook))
        model.set_all_reduce_hook(hook)
        del hook
        _step(model, compiled(model, executor) if executor else model)
    for _ in range(20):  # of one model the last few are kept: a backward may still call them
        hook = _Halving()
        hooks.append(weakref.ref(hook))
        model.set_all_reduce_hook(hook)
        del hook
    gc.collect()
    assert sum(hook() is not None for hook in hooks) <= 4
    del model
    gc.collect()
    assert not any(hook() for hook in hooks) and len(spec._objects) <= before


@on_ranks(2)
def test_a_hook_that_was_taken_away_is_there_for_the_backward(mesh):
    model = _made(mesh)
    model.set_all_reduce_hook(_Halving())
    calls, loss = _Halving.calls, _loss(compiled(model))
    model.set_all_reduce_hook(None)
    gc.collect()
    loss.backward()
    assert _Halving.calls > calls


def test_gradients_on_their_way_to_the_host_go_with_their_segment():
    before = len(host_copies._arriving)
    segments = [torch.zeros(4) for _ in range(3)]
    for segment in segments:
        for _ in range(2):  # of a backward that failed before it took them
            torch.ops.shardc.to_host(torch.ones(4), segment)
    assert len(host_copies._arriving) == before + 3
    first = segments.pop(0)
    assert len(host_copies.arriving(first, torch.ones(4))) == 2
    assert not host_copies.arriving(first, torch.ones(4))
    assert len(host_copies._arriving) == before + 2
    del segment, segments
    gc.collect()
    assert len(host_copies._arriving) == before


# -- what must not be gone -------------------------------------------------------------------------


@pytest.mark.parametrize("executor", [None, "eager"])
@on_ranks(2)
def test_parameters_get_gradients_when_the_model_is_gone(mesh, executor):
    """An optimizer holds the parameters, a loss the graph; nobody holds the model."""
    grads = []
    for deleted in (False, True):
        model = _made(mesh)
        opt = torch.optim.SGD(model.parameters(), lr=0.1)
        loss = _loss(model if executor is None else compiled(model, executor))
        if deleted:
            head = weakref.ref(model.head)
            del model
            gc.collect()
            assert head() is None
        loss.backward()
        grads.append([full(param.grad) for param in opt.param_groups[0]["params"]])
    assert all(map(torch.equal, *grads)) and grads[0][0].any()


@on_ranks(2)
def test_a_backward_is_compiled_when_its_first_model_is_gone(mesh):
    """An equal model runs the code of a deleted one, whose backward was never needed."""
    torch._dynamo.reset()
    expected = _made(mesh)
    _loss(expected).backward()
    first = _made(mesh)
    traces = _traces(first)
    _forward(first, compiled(first))
    del first
    assert not _left(traces)
    second = _made(mesh)
    _loss(compiled(second)).backward()
    for p, q in zip(expected.parameters(), second.parameters(), strict=True):
        torch.testing.assert_close(full(p.grad), full(q.grad))
    del expected, second
    gc.collect()


@on_ranks(2)
def test_a_model_does_not_keep_the_one_that_ran_inside_its_forward(mesh):
    class Teacher(nn.Module):
        def __init__(self):
            super().__init__()
            self.own, self.other = nn.Linear(18, 18), []

        def forward(self, x):
            y = self.own(x)
            return sum((model(y) for model in self.other), y)

    teacher, student = fully_shard(Teacher(), mesh=mesh), fully_shard(Block(), mesh=mesh)
    teacher.other = [student]
    traces = _traces(student)
    for _ in range(2):
        teacher(torch.ones(2, 18)).sum().backward()
    teacher.other = []
    del student
    assert not _left(traces)
    teacher(torch.ones(2, 18)).sum().backward()  # goes another way than the one remembered


@on_ranks(2)
def test_cuda_graphs_are_freed_before_the_groups_that_they_hold(mesh):
    """NCCL waits for them. Here there are none: it is counted how often they would be freed."""
    held, other = (dist.new_group([0, 1]) for _ in range(2))
    with (
        mock.patch("torch._inductor.cudagraph_trees.reset_cudagraph_trees") as freed,
        mock.patch("torch.cuda.synchronize"),
    ):
        compat.free_cuda_graphs_before([compat.group_name(held)])
        dist.destroy_process_group(other)
        assert not freed.called
        dist.destroy_process_group(held)
        assert freed.called


@pytest.mark.parametrize("ask", [call_sites.place_of_thread, call_sites.own_collective_of])
def test_asking_for_the_place_of_a_call_keeps_nothing_that_its_callers_hold(ask):
    def call():
        held = nn.Linear(1, 1)
        ask(threading.get_ident())
        return weakref.ref(held)

    gc.disable()
    try:
        assert call()() is None
    finally:
        gc.enable()
