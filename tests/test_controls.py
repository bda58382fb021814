"""FSDP2's setters and what users plug in, against FSDP2 or the unsharded model."""

import functools
import gc
import inspect
import warnings
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from fsdp2 import check_against_fsdp2, fsdp2, sharded
from models import Stack as TwoBlocks
from models import Wire, check_gradients, compiled, full, loss_of_rank, mean_over_ranks, seeded
from ranks import mesh_of, on_ranks
from torch._dynamo.utils import counters
from torch.distributed.fsdp import FSDPModule

import shardc
from shardc.runtime import compat
from shardc.runtime.groups import communicators
from shardc.runtime.groups.backends import backend_of
from shardc.runtime.modules.controls import Controls

Stack = functools.partial(TwoBlocks, 1)


def _step(model, call, number):
    loss_of_rank(call, 100 * number).backward()


def _both(mesh, **kwargs):
    return fsdp2(seeded(Stack), mesh, **kwargs), sharded(seeded(Stack), mesh, **kwargs)


def _units(model):
    return [*model.layers, model]


@on_ranks(2)
def test_equal_bits_with_fsdp2(mesh):
    """And a flag costs one compile a combination."""
    theirs, ours = _both(mesh)
    call = compiled(ours, fullgraph=True)
    counters.clear()
    check_against_fsdp2(theirs, ours, call, _step, tolerance=0)
    assert counters["stats"]["unique_graphs"] == 1
    for _ in range(3):
        for sync in (False, True):
            ours.set_requires_gradient_sync(sync)
            loss_of_rank(call, 1).backward()
        ours.zero_grad()
    assert counters["stats"]["unique_graphs"] == 3  # without sync; with what waited


@pytest.mark.parametrize("executor", ["eager", None])
@on_ranks(3)
def test_divide_factor_and_hook(mesh, executor):
    theirs, ours = _both(mesh)
    for model in (theirs, ours):
        for module in _units(model):
            module.set_force_sum_reduction_for_comms(True)
            module.set_gradient_divide_factor(7.0)
            module.set_all_reduce_hook(lambda grad: grad.mul_(2))
    call = compiled(ours, executor) if executor else ours
    check_against_fsdp2(theirs, ours, call, _step, 2)
    ours.set_gradient_divide_factor(3.0, recurse=True)
    for module in _units(ours):
        module.set_all_reduce_hook(None)
    loss_of_rank(call, 9).backward()
    before = [full(p.grad) for p in ours.parameters()]
    ours.set_reduce_scatter_divide_factor(6.0, recurse=True)  # its older name
    ours.zero_grad()
    loss_of_rank(call, 9).backward()
    for p, grad in zip(ours.parameters(), before, strict=True):
        torch.testing.assert_close(2 * full(p.grad), grad)
    with pytest.raises(ValueError, match="positive"):
        ours.set_gradient_divide_factor(0)


@pytest.mark.parametrize("forced", [False, True])
@on_ranks(4)
def test_hook_runs_after_the_reduction_over_copies(mesh, forced):
    """With forced sums it is given the sum."""
    grid = mesh_of("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    theirs, ours = _both(grid)
    for model in (theirs, ours):
        for module in _units(model):
            module.set_force_sum_reduction_for_comms(forced)
            module.set_all_reduce_hook(lambda grad: grad.clamp_(max=1e-3))
    check_against_fsdp2(theirs, ours, compiled(ours), _step, 2)


@pytest.mark.parametrize(
    "function, executor", [(shardc.compress_bf16, "inductor"), (shardc.compress_fp16, "eager")]
)
@on_ranks(2)
def test_compressed_reductions(mesh, function, executor):
    plain, ours = seeded(Stack), sharded(seeded(Stack), mesh)
    ours.set_custom_reduce(function)
    loss_of_rank(compiled(ours, executor), 1).backward()
    loss_of_rank(plain, 1).backward()
    differs = False
    for p, q in zip(plain.parameters(), ours.parameters(), strict=True):
        want = mean_over_ranks(p.grad, mesh)
        assert q.grad.dtype == torch.float32
        torch.testing.assert_close(full(q.grad), want, rtol=2e-2, atol=1e-3)
        differs |= not torch.equal(full(q.grad), want)
    assert differs, "nothing was compressed"


class Gather:
    """An all-gather of one's own, in FSDP2's interface."""

    calls = 0

    def allocate(self, size, *, dtype, device):
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(self, output_tensor, input_tensor, group, async_op=False):
        type(self).calls += 1
        return dist.all_gather_into_tensor(output_tensor, input_tensor, group, async_op=async_op)


class Scatter(Gather):
    """The same for a reduce-scatter."""

    calls = 0

    def __call__(self, output_tensor, input_tensor, group, op, async_op=False):
        type(self).calls += 1
        return dist.reduce_scatter_tensor(output_tensor, input_tensor, op, group, async_op)


@pytest.mark.parametrize("executor", ["inductor", None])
@on_ranks(2)
def test_communication_of_ones_own(mesh, executor):
    plain, ours = seeded(Stack), sharded(seeded(Stack), mesh)
    ours.set_custom_all_gather(Gather(), recurse=True)
    ours.set_custom_reduce_scatter(Scatter(), recurse=True)
    Gather.calls = Scatter.calls = 0
    loss_of_rank(compiled(ours, executor) if executor else ours, 1).backward()
    loss_of_rank(plain, 1).backward()
    check_gradients(plain, ours, mesh)
    assert Gather.calls >= 2 and Scatter.calls == 2


class Short(Gather):
    """One whose buffers are too small."""

    def allocate(self, size, *, dtype, device):
        return torch.empty(size[0] - 1, dtype=dtype, device=device)


WRONG = {
    "shape": ("set_custom_reduce", lambda flat, *_: flat[:1], "its result of .* shape .1,."),
    "dtype": (
        "set_custom_reduce",
        lambda flat, op, ranks, group: flat[: flat.numel() // ranks].int(),
        "is a tensor .* torch.int32, .* must be .* torch.float32",
    ),
    "type": ("set_custom_reduce", lambda *_: None, "is NoneType; it must be a tensor"),
    "gather": ("set_custom_all_gather", Short(), r"allocate\(\) of Short is a tensor of shape"),
    "scatter": ("set_custom_reduce_scatter", Short(), r"allocate\(\) of Short is a tensor"),
    "hook": ("set_all_reduce_hook", lambda grad: 2 * grad, "must change the gradient .* in place"),
    "resized": ("set_all_reduce_hook", lambda grad: grad.resize_(1), "the gradient it changed of"),
}


@pytest.mark.parametrize(
    ("executor", "cases"),
    [("eager", ("shape", "gather", "scatter", "hook")), (None, tuple(WRONG))],
    ids=["eager", "None"],
)
@on_ranks(2)
def test_what_objects_of_the_user_give_is_checked(mesh, executor, cases):
    for setter, thing, message in map(WRONG.get, cases):
        model = sharded(seeded(Stack), mesh)
        call = compiled(model, executor) if executor else model
        getattr(model, setter)(thing, recurse=True)
        with pytest.raises(Exception, match=message):
            loss_of_rank(call, 1).backward()
        assert all(p.grad is None for p in model.parameters())


@pytest.mark.parametrize("executor", ["eager", None])
@on_ranks(2)
def test_unused_parameters_get_zeros_where_asked(mesh, executor):
    class Part(TwoBlocks):
        def forward(self, tokens, targets):
            return self.embed(tokens).sum() + 0 * targets.sum()

    model = sharded(seeded(Part), mesh)
    call = compiled(model, executor) if executor else model
    loss_of_rank(call, 1).backward()
    assert model.head.weight.grad is None
    model.set_reduce_scatter_unused_params(True)
    model.zero_grad()
    loss_of_rank(call, 1).backward()
    assert full(model.head.weight.grad).count_nonzero() == 0
    assert full(model.embed.weight.grad).count_nonzero() > 0


@pytest.mark.parametrize("executor", ["eager", None])
@on_ranks(2)
def test_ablation_is_loud_and_leaves_out_the_wire(mesh, executor):
    plain, model = seeded(Stack), sharded(seeded(Stack), mesh)
    call = compiled(model, executor) if executor else model
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        model.set_ablation(all_gather=True, reduce=True)
        loss_of_rank(call, 1).backward()
        with Wire() as wire:
            loss_of_rank(call, 2).backward()
    assert not wire.sent
    (said,) = [str(w.message) for w in caught if "set_ablation" in str(w.message)]
    assert "gathers and reductions are left out" in said and "NOT train" in said
    model.set_ablation()
    torch.testing.assert_close(loss_of_rank(call, 1), loss_of_rank(plain, 1))
    with Wire() as wire:
        loss_of_rank(call, 2).backward()
    assert {message.kind for message in wire.sent} == {"all_gather", "reduce_scatter"}


@pytest.mark.parametrize("executor", ["eager", None])
@on_ranks(2)
def test_a_mesh_of_one_rank_sends_nothing(mesh, executor):
    """Nor does FSDP2; gradients of copies of the model are reduced all the same."""
    grid = mesh_of("cpu", (2, 1), mesh_dim_names=("replicate", "shard"))
    for where, messages in ((grid["shard"], []), (grid, ["c10d::allreduce_"] * 2)):
        plain, ours = seeded(Stack), sharded(seeded(Stack), where)
        call = compiled(ours, executor) if executor else ours
        with torch.profiler.profile() as profile:
            loss_of_rank(call, 1).backward()
        assert [e.name for e in profile.events() if e.name.startswith("c10d::")] == messages
        loss_of_rank(plain, 1).backward()
        for p, q in zip(plain.parameters(), ours.parameters(), strict=True):
            want = mean_over_ranks(p.grad, mesh) if messages else p.grad
            torch.testing.assert_close(full(q.grad), want)
        assert torch.equal(full(ours.head.weight), plain.head.weight)


SETTERS = {
    "set_requires_gradient_sync": (False, "sync"),
    "set_requires_all_reduce": (False, "all_reduce"),
    "set_gradient_divide_factor": (3.0, "divide_factor"),
    "set_reduce_scatter_divide_factor": (3.0, "divide_factor"),
    "set_force_sum_reduction_for_comms": (True, "force_sum"),
    "set_reduce_scatter_unused_params": (True, "reduce_unused"),
    "set_reshard_after_backward": (False, "reshard_after_backward"),
    "set_all_reduce_hook": (torch.zero_, "hook"),
    "set_custom_reduce": (shardc.compress_bf16, "reduce_function"),
    "set_custom_all_gather": (Gather(), "all_gather"),
    "set_custom_reduce_scatter": (Scatter(), "reduce_scatter"),
    "set_allocate_memory_from_process_group_for_comm": (True, "memory"),
    "set_reduce_scatter_max_input_buffers": (1, "reduce_buffers"),
    "set_separate_reduce_scatter_group": (True, "reduces_on"),
    "set_separate_all_gather_group": (True, "gathers_on"),
}
"""Each method that sets a setting: a value, and the setting."""
OTHERS = {
    "set_ablation",  # two flags in place of a value
    "set_reshard_after_forward",  # the outermost unit decides by itself; a test is below
    "set_is_last_backward", "set_unshard_in_backward",  # accepted, nothing is set
    "set_keep_unsharded_storage", "set_symm_mem_for_comm",  # refused here
}  # fmt: skip


def test_every_method_with_recurse_is_known():
    methods = {name: f for name, f in inspect.getmembers(Controls) if name.startswith("set_")}
    found = {name for name, f in methods.items() if "recurse" in inspect.signature(f).parameters}
    assert found == SETTERS.keys() | OTHERS


@on_ranks(2)
def test_recurse_says_which_units(mesh):
    for name, (value, attribute) in SETTERS.items():
        model = sharded(seeded(Stack), mesh)
        before = getattr(model._shardc_unit.settings, attribute)
        for recurse in (False, True):
            getattr(model, name)(value, recurse=recurse)
            outer, inner = (
                getattr(module._shardc_unit.settings, attribute) != before
                for module in (model, model.layers[0])
            )
            assert (outer, inner) == (True, recurse), (name, recurse)


@on_ranks(2)
def test_reshard_after_forward_can_change(mesh):
    model = sharded(seeded(Stack), mesh)
    first = model.layers[0]
    for value in (False, True):
        model.set_reshard_after_forward(value)
        assert first._shardc_unit.settings.reshard_after_forward is value
        loss_of_rank(model, 1).backward()
    first.set_reshard_after_forward(False, recurse=False)
    assert model._shardc_unit.settings.reshard_after_forward is True
    with pytest.raises(ValueError, match="divisor of the world size 2"):
        model.set_reshard_after_forward(3)


@on_ranks(2)
def test_unshard_before_the_forward(mesh):
    plain, model = seeded(Stack), sharded(seeded(Stack), mesh)
    for call in (compiled(model), model):
        handle = model.unshard(async_op=True)
        later = model.layers[0].unshard(async_op=True)
        pending = [b for m in _units(model) for b in m._shardc_unit.buckets]
        assert all(b.gathered.is_held and b.gathered._started is not None for b in pending)
        handle.wait()
        torch.testing.assert_close(model.head.weight, plain.head.weight)
        torch.testing.assert_close(loss_of_rank(call, 1), loss_of_rank(plain, 1))
        assert all(b.gathered._started is None for b in pending)
        later.wait()
        assert all(b.gathered.is_held for m in _units(model) for b in m._shardc_unit.buckets)
        for module in _units(model):
            module.reshard()
        torch.testing.assert_close(loss_of_rank(call, 1), loss_of_rank(plain, 1))
        assert not any(b.gathered.is_held for m in _units(model) for b in m._shardc_unit.buckets)
        model.layers[0].unshard()
        loss_of_rank(call, 1).backward()  # which frees it
        assert not any(b.gathered.is_held for b in model.layers[0]._shardc_unit.buckets)


@on_ranks(2)
def test_groups_that_are_made_have_the_timeout_of_the_mesh(mesh):
    wanted = timedelta(seconds=777)
    ranks = dist.get_process_group_ranks(mesh.get_group())
    given = compat.new_group(ranks, "with_a_timeout", timeout=wanted)
    own = communicators.own_group(compat.group_name(given), "reduce")
    whole = communicators.group_over([dist.get_rank()], given)
    timeouts = [compat.group_timeout(compat.resolve_group(name)) for name in (own, whole)]
    assert compat.group_timeout(mesh.get_group()) != wanted and timeouts == [wanted] * 2


@on_ranks(2)
def test_ranks_in_different_numbers_of_groups_make_one(mesh):
    mine = dist.get_rank() == 0 and dist.new_group([0], use_local_synchronization=True)
    group = communicators.own_group(compat.group_name(mesh.get_group()), "other_numbers")
    total = torch.ones(1)
    dist.all_reduce(total, group=compat.resolve_group(group))
    assert total.item() == 2
    if mine:
        dist.destroy_process_group(mine)


@on_ranks(1)
def test_another_name_of_a_group(mesh):
    first, second = (dist.new_group([0]) for _ in range(2))
    names = [compat.also_named(group, "rows") for group in (first, first, second)]
    assert names == ["rows", "rows", "rows_2"]  # what another group goes by is not taken from it
    assert [compat.resolve_group(name) for name in names] == [first, first, second]
    dist.destroy_process_group(first)
    del first
    gc.collect()
    assert compat.also_named(second, "rows") == "rows"
    dist.destroy_process_group(second)


@on_ranks(2)
def test_memory_that_a_backend_has_not(mesh):
    model = sharded(seeded(Stack), mesh)
    bucket = model._shardc_unit.buckets[0]
    before = bucket.key.code
    model.set_allocate_memory_from_process_group_for_comm(True, recurse=True)
    assert bucket.settings.memory == "group" and bucket.key.code == before  # gloo has no allocator
    with pytest.raises(ValueError, match="allocates its buffers by itself"):
        model.set_custom_all_gather(Gather())
    model.set_allocate_memory_from_process_group_for_comm(False, recurse=True)
    model.set_custom_reduce_scatter(Scatter())
    with pytest.raises(ValueError, match="allocates its buffers by itself"):
        model.set_allocate_memory_from_process_group_for_comm(True)
    model.set_custom_reduce_scatter(None)
    with pytest.raises(NotImplementedError, match=r"for 'cuda' devices only.*sharded over 'cpu'"):
        model.set_symm_mem_for_comm()
    with pytest.raises(ValueError, match="got 'gloo'"):
        model.set_symm_mem_for_comm("gloo")
    assert bucket.settings.memory is None and bucket.key.code == before


@on_ranks(2)
def test_refused_by_name(mesh):
    model = sharded(seeded(Stack), mesh)
    with pytest.raises(NotImplementedError, match="storage of gathered parameters"):
        model.set_keep_unsharded_storage(True)
    model.set_keep_unsharded_storage(False)
    with pytest.raises(ValueError, match="stream must be None"):
        model.set_all_reduce_hook(lambda grad: None, stream=object())
    assert not backend_of(mesh.get_group(), "cpu").averages


@on_ranks(2)
def test_every_method_of_fsdp2_is_there(mesh):
    model = sharded(seeded(Stack), mesh)
    for name, method in vars(FSDPModule).items():
        if name.startswith("_") or not callable(method):
            continue
        ours = inspect.signature(getattr(model, name)).parameters
        theirs = list(inspect.signature(method).parameters.values())[1:]
        for parameter in theirs:
            assert parameter.name in ours, (name, parameter)
            assert parameter.default == ours[parameter.name].default, (name, parameter)
    for name in ("set_gradient_divide_factor", "set_all_reduce_hook", "set_custom_all_gather"):
        assert inspect.signature(getattr(model, name)).parameters["recurse"].default is False
    model.set_unshard_in_backward(False)
    model.set_is_last_backward(False)
    model.set_post_optim_event(torch.Event("cpu"))
    plain = seeded(Stack)
    torch.testing.assert_close(loss_of_rank(model, 1), loss_of_rank(plain, 1))


@on_ranks(2)
def test_backwards_without_sync_are_finalized_by_hand(mesh):
    plain, model = seeded(Stack), sharded(seeded(Stack), mesh)
    model.set_manual_backward_finalization(True)
    for call in (compiled(model), model):
        model.zero_grad()
        plain.zero_grad()
        model.set_requires_gradient_sync(False)
        for seed in (1, 2):
            loss_of_rank(call, seed).backward()
            loss_of_rank(plain, seed).backward()
        model.finalize_backward()  # no unit syncs
        assert model.head.weight.grad is None
        model.set_requires_gradient_sync(True)
        handle = model.finalize_backward(async_op=True)
        handle.wait()
        check_gradients(plain, model, mesh)
    with pytest.raises(RuntimeError, match="finalize_backward\\(\\) is for the outermost"):
        model.layers[0].finalize_backward()


@on_ranks(2)
def test_a_step_that_was_interrupted(mesh):
    plain, model = seeded(Stack), sharded(seeded(Stack), mesh)

    def stop(grad):
        raise KeyboardInterrupt

    with pytest.raises(RuntimeError, match="outermost"):
        model.layers[0].reset_iter_state()
    for call in (compiled(model), model):
        handle = model.layers[0].up.weight.register_hook(stop)
        with pytest.raises(KeyboardInterrupt):
            loss_of_rank(call, 1).backward()
        handle.remove()
        model.set_requires_gradient_sync(False)
        loss_of_rank(call, 1).backward()
        model.set_requires_gradient_sync(True)
        model.layers[0].unshard()
        buckets = [b for m in _units(model) for b in m._shardc_unit.buckets]
        assert any(b.gathered.is_held for b in buckets)
        assert not all(b.gradients.waiting.is_empty for b in buckets)
        model.reset_iter_state()
        assert not any(b.gathered.is_held for b in buckets)
        assert all(b.gradients.waiting.is_empty for b in buckets)
        model.zero_grad()
        plain.zero_grad()
        for run in (plain, call):
            loss_of_rank(run, 2).backward()
        check_gradients(plain, model, mesh)
