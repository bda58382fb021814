"""What is under way at the same time: on which stream and group, in which order, how much of it.

Told from the log of simulated accelerators (`accelerator`): the host's order, and the simulated
seconds in which collectives and compute ran. Units differ in size, which tells them apart.
"""

import itertools
from dataclasses import replace
from types import SimpleNamespace
from unittest import mock

import accelerator
import pytest
import torch
import torch.distributed as dist
from models import seeded
from ranks import mesh_of, on_ranks
from torch import nn

from shardc import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard
from shardc.runtime import compat
from shardc.runtime.groups.backends import BACKENDS, high_priority_options

EXECUTORS = pytest.mark.parametrize("executor", ["eager", None])
DIMS = [8, 12, 16, 20, 24, 28]
UNITS = len(DIMS) - 1
KINDS = {
    "_allgather_base": "gather",
    "allgather_into_tensor_coalesced": "gather",
    "_reduce_scatter_base": "reduce",
    "reduce_scatter_tensor_coalesced": "reduce",
}


def _chain(mesh, **kwargs):
    """Units in a row; the outermost one has no parameters."""
    layers = (
        nn.Sequential(nn.Linear(a, b, bias=False), nn.Tanh()) for a, b in itertools.pairwise(DIMS)
    )
    model = seeded(lambda: nn.Sequential(*layers))
    for layer in model:
        fully_shard(layer, mesh=mesh, **{"reshard_after_forward": True, **kwargs})
    return fully_shard(model, mesh=mesh, **kwargs)


def _call(model, executor, **options):
    if executor is None:
        return model
    options = {"executor": executor, "coalesce": False, **options}
    return torch.compile(model, backend="shardc", options=options, fullgraph=True)


def _step(model, executor, costs=None, **options):
    """The log of a forward and a backward, after one that is not recorded."""
    call, x = _call(model, executor, **options), torch.randn(4, DIMS[0], device="sim")
    accelerator.configure(**(costs or {"compute": 1.0, "comm": 1.0}))
    call(x).sum().backward()
    with accelerator.recording() as log:
        call(x).sum().backward()
    return log


def _units(model):
    """The number of a unit by the bytes of its gathered bucket."""
    return {4 * layer._shardc_unit.buckets[0].layout.numel: i for i, layer in enumerate(model)}


def _collectives(log, kind=None):
    found = [entry for entry in log if entry.kind == "collective"]
    return found if kind is None else [entry for entry in found if KINDS.get(entry.name) == kind]


def _story(model, log):
    """The host's order, in words: starts and waits of collectives, and each unit's products."""
    units = _units(model)
    products = [*(f"forward {unit}" for unit in range(UNITS))]
    for unit in reversed(range(UNITS)):
        products += [f"backward {unit}"] * (1 if unit == 0 else 2)
    ends, told = {}, []
    for entry in log:
        if entry.kind == "collective":
            ends[entry.point] = text = f"{KINDS[entry.name]} {units[entry.bytes]}"
            told.append(text)
        elif entry.kind == "wait" and entry.point in ends:
            told.append(f"wait {ends[entry.point]}")
        elif entry.kind == "compute" and entry.name == "aten::mm":
            text = products.pop(0)
            told += [text] if told[-1] != text else []
    assert not products, products
    return told


def _halves(story):
    """What is told of the forward, and of the backward."""
    end = story.index(f"forward {UNITS - 1}") + 1
    return story[:end], story[end:]


def _only(story, *kinds):
    """Without what does not begin with one of `kinds`; what is told twice in a row is told once."""
    found = [text for text in story if text.startswith(kinds)]
    return [text for text, _ in itertools.groupby(found)]


def _most_gathered(log):
    """How many gathered buckets were in memory at the same time, at most."""
    blocks, now, most = {e.block for e in _collectives(log, "gather")}, 0, 0
    for entry in log:
        if entry.block in blocks and entry.kind in ("collective", "free"):
            now += 1 if entry.kind == "collective" else -1
            most = max(most, now)
    assert now == 0, "a gathered bucket stays"
    return most


# -- order and limits ------------------------------------------------------------------------------


@on_ranks(2, device="sim")
def test_uncompiled_the_next_unit_is_gathered_while_one_computes(mesh):
    model = _chain(mesh)
    log = _step(model, None)
    forward, backward = _halves(_story(model, log))
    assert forward == [
        "gather 0", "wait gather 0", "gather 1", "forward 0",
        "wait gather 1", "gather 2", "forward 1",
        "wait gather 2", "gather 3", "forward 2",
        "wait gather 3", "gather 4", "forward 3",
        "wait gather 4", "forward 4",
    ]  # fmt: skip
    assert backward == [
        "gather 4", "wait gather 4", "gather 3", "backward 4", "reduce 4",
        "wait gather 3", "gather 2", "backward 3", "wait reduce 4", "reduce 3",
        "wait gather 2", "gather 1", "backward 2", "wait reduce 3", "reduce 2",
        "wait gather 1", "backward 1", "wait reduce 2", "reduce 1",
        "backward 0", "wait reduce 1", "reduce 0", "wait reduce 0",
    ]  # fmt: skip
    assert _most_gathered(log) == 2  # the one that computes, and the next
    with torch.no_grad(), accelerator.recording() as log:
        model(torch.randn(4, DIMS[0], device="sim"))
    assert _most_gathered(log) == 2  # and nothing stays after the last one


@EXECUTORS
@on_ranks(2, device="sim")
def test_parts_in_low_precision_live_until_they_are_gathered(mesh, executor):
    model = _chain(mesh, mp_policy=MixedPrecisionPolicy(torch.bfloat16))
    call, x = _call(model, executor, prefetch=1), torch.randn(11, DIMS[0], device="sim")
    with torch.no_grad():
        call(x)
        call(x)  # uncompiled, gathers go ahead from now on
        with accelerator.recording() as log:
            call(x)
    sizes = {2 * layer._shardc_unit.buckets[0].layout.segment for layer in model}
    filled, live, made = {entry.block for entry in _collectives(log)}, set(), 0
    for entry in log:
        if entry.kind == "allocate" and entry.bytes in sizes and entry.block not in filled:
            live.add(entry.block)
            made += 1
        elif entry.kind == "free":
            live.discard(entry.block)
        elif entry.kind == "compute" and entry.name == "aten::mm":
            assert len(live) <= 1, "more is held than the part that is gathered ahead"
    assert made == UNITS and not live


@on_ranks(2, device="sim")
def test_uncompiled_hints_change_what_is_gathered_ahead(mesh):
    model = _chain(mesh)
    model[0].set_modules_to_forward_prefetch([model[1], model[2]])
    model[4].set_modules_to_backward_prefetch([model[3], model[2]])
    forward, backward = _halves(_story(model, _step(model, None)))
    assert _only(forward, "gather", "forward") == [
        "gather 0", "gather 1", "gather 2", "forward 0", "forward 1",
        "gather 3", "forward 2", "gather 4", "forward 3", "forward 4",
    ]  # fmt: skip
    assert _only(backward, "gather", "backward") == [
        "gather 4", "gather 3", "gather 2", "backward 4", "backward 3",
        "gather 1", "backward 2", "backward 1", "backward 0",
    ]  # fmt: skip


@EXECUTORS
@on_ranks(2, device="sim")
def test_hints_for_what_is_over_or_never_comes_do_no_harm(mesh, executor):
    model, stranger = _chain(mesh), _chain(mesh)
    call, x = _call(model, executor), torch.randn(4, DIMS[0], device="sim")
    call(x).sum().backward()
    wanted = [p.grad.full_tensor().cpu() for p in model.parameters()]
    for unit, forward, backward in ((1, model[0], model[4]), (2, stranger[3], stranger[1])):
        model[unit].set_modules_to_forward_prefetch([forward])
        model[unit].set_modules_to_backward_prefetch([backward])
    for _ in range(2):
        model.zero_grad()
        with accelerator.recording() as log:
            call(x).sum().backward()
        for p, want in zip(model.parameters(), wanted, strict=True):
            torch.testing.assert_close(p.grad.full_tensor().cpu(), want)
    _most_gathered(log)  # nothing stays


def _line(text):
    """ "g0 w0": the start of the gather of unit 0, and the wait for it."""
    words = {"g": "gather", "w": "wait gather"}
    return [f"{words[word[0]]} {word[1]}" for word in text.split()]


@pytest.mark.parametrize(
    ("options", "forward", "backward", "most"),
    [
        ({"prefetch": 0}, "g0 w0 g1 w1 g2 w2 g3 w3 g4 w4", "g4 w4 g3 w3 g2 w2 g1 w1", 1),
        ({"prefetch": 2}, "g0 g1 g2 w0 g3 w1 g4 w2 w3 w4", "g4 g3 g2 w4 g1 w3 w2 w1", 3),
        ({"backward_prefetch": "pre"}, None, "g4 g3 w4 g2 w3 g1 w2 w1", None),
        ({"backward_prefetch": "post"}, None, "g4 w4 g3 w3 g2 w2 g1 w1", None),
        ({"backward_prefetch": None}, None, "g4 w4 g3 w3 g2 w2 g1 w1", None),
    ],
)
@on_ranks(2, device="sim")
def test_compiled_options_say_what_is_gathered_ahead(mesh, options, forward, backward, most):
    model = _chain(mesh)
    log = _step(model, "eager", **options)
    told = [_only(half, "gather", "wait gather") for half in _halves(_story(model, log))]
    assert forward is None or told[0] == _line(forward)
    assert told[1] == _line(backward)
    assert most is None or _most_gathered(log) == most


@on_ranks(2, device="sim")
def test_compiled_hints_change_what_is_gathered_ahead(mesh):
    model = _chain(mesh)
    model[0].set_modules_to_forward_prefetch([model[1], model[2]])
    model[4].set_modules_to_backward_prefetch([model[3], model[2]])
    story = _story(model, _step(model, "eager", prefetch=0))
    forward, backward = (_only(half, "gather", "wait gather") for half in _halves(story))
    assert forward == _line("g0 g1 g2 w0 w1 w2 g3 w3 g4 w4")
    assert backward == _line("g4 g3 g2 w4 w3 w2 g1 w1")


@pytest.mark.parametrize("limit", [1, 3])
@EXECUTORS
@on_ranks(2, device="sim")
def test_so_many_reductions_are_under_way(mesh, executor, limit):
    model = _chain(mesh)
    model.set_reduce_scatter_max_input_buffers(limit)
    now = most = 0
    for text in _story(model, _step(model, executor)):
        now += text.startswith("reduce") - text.startswith("wait reduce")
        most = max(most, now)
    assert most == limit and now == 0


# -- streams and groups ----------------------------------------------------------------------------


def _overlap(some, others):
    """Whether one of `some` and one of `others` run at the same time."""
    return any(a.start < b.end and b.start < a.end for a in some for b in others)


@EXECUTORS
@on_ranks(4, device="sim")
def test_reductions_over_copies_have_a_stream_of_their_own(mesh, executor):
    mesh = mesh_of("sim", (2, 2), mesh_dim_names=("replicate", "shard"))
    log = _step(_chain(mesh), executor, {"compute": 1.0, "comm": 4.0})
    copies = [entry for entry in _collectives(log) if entry.name not in KINDS]
    others = [entry for entry in _collectives(log) if entry.name in KINDS]
    assert [entry.name for entry in copies] == UNITS * ["allreduce"]
    for of in ("group", "stream"):
        (own,) = {getattr(entry, of) for entry in copies}
        assert own not in {getattr(entry, of) for entry in others}
    assert _overlap(copies, _collectives(log, "reduce")) if executor is None else True
    assert _overlap(copies, [entry for entry in log if entry.kind == "compute"])


@EXECUTORS
@on_ranks(2, device="sim")
def test_gathers_and_reductions_on_groups_of_their_own(mesh, executor):
    costs = {"compute": 1.0, "comm": 4.0}
    model = _chain(mesh)
    log = _step(model, executor, costs)
    gathers, reductions = _collectives(log, "gather"), _collectives(log, "reduce")
    compute = [entry for entry in log if entry.kind == "compute"]
    assert not {entry.stream for entry in compute} & {e.stream for e in gathers + reductions}
    assert _overlap(gathers, compute) and _overlap(reductions, compute)
    assert len({(entry.group, entry.stream) for entry in gathers + reductions}) == 1
    assert not _overlap(gathers, reductions), "one communicator does one thing at a time"
    assert high_priority_options(mesh.get_group()) is None, "only NCCL has priorities"
    as_nccl = replace(BACKENDS["nccl"], name="simccl")
    options = SimpleNamespace(Options=SimpleNamespace)  # this torch may have none
    with (
        mock.patch.dict(BACKENDS, simccl=as_nccl),
        mock.patch.object(dist, "ProcessGroupNCCL", options, create=True),
    ):
        model.set_separate_reduce_scatter_group(high_priority=True)
    model.set_separate_all_gather_group()
    log = _step(model, executor, costs)
    gathers, reductions = _collectives(log, "gather"), _collectives(log, "reduce")
    bucket = model[0]._shardc_unit.buckets[0]
    code = bucket.key.code
    names = (code.group, code.reduction.group, bucket.ranks.shard)
    gather, reduce, shared = (compat.group_name(compat.resolve_group(name)) for name in names)
    assert {entry.group for entry in gathers} == {gather}
    assert {entry.group for entry in reductions} == {reduce}
    assert len({gather, reduce, shared}) == 3
    assert {entry.priority for entry in gathers} == {0}
    assert {entry.priority for entry in reductions} == {-1}
    assert _overlap(gathers, reductions)


@EXECUTORS
@on_ranks(2, device="sim")
def test_copies_of_offload_have_streams_of_their_own(mesh, executor):
    model = _chain(mesh, offload_policy=CPUOffloadPolicy())
    log = _step(model, executor, {"compute": 1.0, "comm": 1.0, "copy": 1.0})
    streams = {
        name: {entry.stream for entry in log if entry.kind == "copy" and entry.name == name}
        for name in ("to device", "to host")
    }
    assert all(len(found) == 1 for found in streams.values()), streams
    used = {entry.stream for entry in log if entry.kind in ("collective", "compute")}
    assert len(set.union(*streams.values()) | used) == 2 + len(used) == 4


@EXECUTORS
@on_ranks(2, device="sim")
def test_gathers_wait_for_an_optimizer_on_another_stream(mesh, executor):
    model, side = _chain(mesh), torch.Stream(device="sim")
    call, x = _call(model, executor), torch.randn(4, DIMS[0], device="sim")
    call(x)
    with side:
        for param in model.parameters():
            value = torch.full(param.to_local().shape, 0.5).pin_memory()
            param.detach().to_local().copy_(value, non_blocking=True)
        done = side.record_event()
    assert accelerator.pending_tasks() > 0, "nothing is under way: the test shows nothing"
    model.set_post_optim_event(done)
    want = x.cpu()
    for inner, outer in itertools.pairwise(DIMS):
        want = torch.tanh(want @ torch.full((inner, outer), 0.5))
    torch.testing.assert_close(call(x).cpu(), want)
