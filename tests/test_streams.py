"""Streams, pinned memory and the memory of collectives, on simulated accelerators.

Copies and collectives there run when something waits for them; memory that is new or freed holds
NaN (`accelerator`). What is read too early, or freed too early, gives wrong numbers: that a wait
left out does is the first test. Time there is simulated.
"""

import contextlib
import gc
from unittest import mock

import accelerator
import pytest
import torch
from fsdp2 import check_against_fsdp2, fsdp2, sharded
from models import Stack, compiled, seeded, tokens
from ranks import mesh_of, on_ranks
from torch import nn

from shardc import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard, summon_full_params
from shardc.backend.graph_plan import graph_plans
from shardc.runtime.comm import comm_buffers, host_copies
from shardc.runtime.groups.backends import backend_of

EXECUTORS = pytest.mark.parametrize("executor", ["eager", None])


def _call(model, executor):
    return compiled(model, executor) if executor else model


def _on_host(seed):
    seed += 10 * torch.distributed.get_rank()
    return tokens(seed), tokens(seed + 50)


def _batch(seed):
    return [ids.to("sim") for ids in _on_host(seed)]


def _one_batch(model, call, number):
    call(*_batch(number)).backward()


def _accumulating(model, call, number):
    for last in (False, True):
        model.set_requires_gradient_sync(last)
        call(*_batch(2 * number + last)).backward()


def _not_over_copies_first(model, call, number):
    for last in (False, True):
        model.set_requires_all_reduce(last)
        call(*_batch(2 * number + last)).backward()


def _two_forwards_first(model, call, number):
    losses = [call(*_batch(2 * number + index)) for index in range(2)]
    sum(losses).backward()


def _two_backwards(model, call, number):
    for index in range(2):
        call(*_batch(2 * number + index)).backward()


# -- what would be wrong ---------------------------------------------------------------------------


@contextlib.contextmanager
def _gather_without_waiting_for_the_copy():
    def copy_in(segment, part):
        host_copies.copy_in(segment, part)
        return contextlib.nullcontext()

    with mock.patch.object(comm_buffers, "copy_in", copy_in):
        yield


@contextlib.contextmanager
def _gradient_without_waiting_for_the_copy():
    with mock.patch.object(host_copies.Arrival, "wait", lambda arrival: arrival.part):
        yield


@EXECUTORS
@on_ranks(2, device="sim")
def test_a_wait_left_out_shows(mesh, executor):
    model = sharded(seeded(Stack), mesh, offload_policy=CPUOffloadPolicy())
    call = _call(model, executor)
    for broken in (_gather_without_waiting_for_the_copy, _gradient_without_waiting_for_the_copy):
        model.zero_grad()
        with broken():
            call(*_batch(0)).backward()
            parts = [p.grad.to_local() for p in model.parameters()]
            assert any(part.isnan().any() for part in parts), broken


# -- CPU offload -----------------------------------------------------------------------------------


@pytest.mark.parametrize("low", [False, True])
@EXECUTORS
@on_ranks(2, device="sim")
def test_offload_equals_fsdp2(mesh, executor, low):
    policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32) if low else MixedPrecisionPolicy()
    kwargs = {"offload_policy": CPUOffloadPolicy(), "mp_policy": policy}
    theirs, ours = fsdp2(seeded(Stack), mesh, **kwargs), sharded(seeded(Stack), mesh, **kwargs)
    call, tolerance = _call(ours, executor), 2e-2 if low else 1e-5
    every = (_one_batch, _accumulating, _two_forwards_first, _two_backwards)
    for step in (_accumulating,) if low else every:  # roundings add up
        check_against_fsdp2(theirs, ours, call, step, 2, tolerance)
    with accelerator.recording() as log:
        _two_backwards(ours, call, 9)
    parts = [part.to_local() for p in ours.parameters() for part in (p, p.grad)]
    assert all(part.is_cpu and part.is_pinned() for part in parts if part.numel())
    numels = {b.layout.numel for u in (ours, *ours.layers) for b in u._shardc_unit.buckets}
    for kind, width in (("gather", 2 if low else 4), ("reduce", 4)):
        sent = {entry.bytes for entry in log if entry.kind == "collective" and kind in entry.name}
        assert sent == {width * numel for numel in numels}, (kind, sent)


@EXECUTORS
@on_ranks(2, device="sim")
def test_offloaded_gradients_that_wait_stay_on_the_device(mesh, executor):
    model = sharded(seeded(Stack), mesh, offload_policy=CPUOffloadPolicy())
    call = _call(model, executor)
    buckets = [b for unit in (model, *model.layers) for b in unit._shardc_unit.buckets]
    for waits in (True, True, False):
        model.set_requires_gradient_sync(not waits)
        with accelerator.recording() as log:
            call(*_batch(waits)).backward()
        to_host = sum(entry.kind == "copy" and entry.name == "to host" for entry in log)
        assert to_host == (0 if waits else len(buckets))
        pending = {getattr(b.gradients.waiting.pending, "device", None) for b in buckets}
        assert pending == {torch.device("sim", 0) if waits else None}
        assert all((p.grad is None) == waits for p in model.parameters())


@EXECUTORS
@on_ranks(4, device="sim")
def test_offload_of_copies_of_the_model(mesh, executor):
    mesh = mesh_of("sim", (2, 2), mesh_dim_names=("replicate", "shard"))
    # FSDP2's own offload gives NaN here: it frees reduced gradients that are still being copied.
    theirs = fsdp2(seeded(Stack), mesh)
    ours = sharded(seeded(Stack), mesh, offload_policy=CPUOffloadPolicy())
    check_against_fsdp2(theirs, ours, _call(ours, executor), _not_over_copies_first, 2)


def _layers(mesh, count, dim=512, **kwargs):
    model = seeded(
        lambda: nn.Sequential(
            *(nn.Sequential(nn.Linear(dim, dim, bias=False), nn.Tanh()) for _ in range(count))
        )
    )
    for block in model:
        fully_shard(block, mesh=mesh, **kwargs)
    return fully_shard(model, mesh=mesh, **kwargs)


def _copy_in_at_once(segment, part):
    stream = host_copies.copy_in(segment, part)
    stream.synchronize()
    return stream


@EXECUTORS
@on_ranks(2, device="sim")
def test_copies_overlap_compute(mesh, executor):
    x = torch.randn(4, 16, device="sim")
    call = _call(_layers(mesh, 6, dim=16, offload_policy=CPUOffloadPolicy()), executor)
    at_once = mock.patch.object(comm_buffers, "copy_in", _copy_in_at_once)
    seconds = {}
    for name, copy in (("warm", 1.0), ("alone", 0.0), ("behind", 1.0), ("at once", 1.0)):
        accelerator.configure(copy=copy, compute=1.0)
        with at_once if name == "at once" else contextlib.nullcontext():
            start = accelerator.now()
            with accelerator.recording() as log:
                call(x).sum().backward()
            seconds[name] = accelerator.now() - start
    copied_in = [entry.name for entry in log if entry.kind == "copy"].count("to device")
    assert copied_in == 11, "6 layers, of which the backward needs 5 again"
    # The gradient that is made last goes to the host when there is nothing left to compute.
    assert seconds["at once"] - seconds["alone"] == copied_in + 1, seconds
    # So do the first layer's weights come; uncompiled, those that a backward needs first as well.
    assert seconds["behind"] - seconds["alone"] == (2 if executor else 3), seconds


DIM = 128


def _peak(mesh, executor, **kwargs):
    """Bytes on the device in the forward and backward of the third step."""
    gc.collect()
    before = accelerator.live_bytes()
    model = _layers(mesh, 24, DIM, **kwargs)
    call, x = _call(model, executor), torch.randn(16, DIM, device="sim")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for _ in range(3):
        accelerator.reset_peak()
        call(x).sum().backward()
        accelerator.synchronize()
        peak = accelerator.peak_bytes()  # the optimizer's temporaries are another matter
        optimizer.step()
        optimizer.zero_grad()
    return peak - before


@EXECUTORS
@on_ranks(2, device="sim")
def test_memory_of_the_strategies(mesh, executor):
    accelerator.configure(late=False)  # copies and collectives take no time
    peaks, planned = [], []
    for kwargs in (
        {"reshard_after_forward": False},
        {"reshard_after_forward": True},
        {"offload_policy": CPUOffloadPolicy()},
    ):
        if "offload_policy" in kwargs:  # copies that take long hold their layers, as planned
            accelerator.configure(copy=8.0, comm=8.0, compute=1.0, late=False)
        peaks.append(_peak(mesh, executor, **kwargs))
        planned.append(max(plan.peak for plan in list(graph_plans)[-2:]) if executor else 0)
    zero2, zero3, offload = peaks
    # Segments, AdamW's states, and ZeRO-2's gathered weights: 0.8, 1.6 and 1.6 MB.
    assert zero3 < 0.9 * zero2 and offload < 0.25 * zero3, peaks
    if executor:
        for peak, plan in zip(peaks[:2], planned, strict=False):
            assert abs(plan - peak) < 0.05 * peak, (peaks, planned)
        assert abs(planned[2] - offload) < 0.1 * offload, (peaks, planned)


@EXECUTORS
@on_ranks(2, device="sim")
def test_buffers_of_the_group(mesh, executor):
    theirs, ours = fsdp2(seeded(Stack), mesh), sharded(seeded(Stack), mesh)
    call = _call(ours, executor)
    for enabled in (False, True):
        ours.set_allocate_memory_from_process_group_for_comm(enabled, recurse=True)
        check_against_fsdp2(theirs, ours, call, _accumulating, 2)
        accelerator.reset_counters()
        call(*_batch(0)).backward()
        ours.zero_grad()
        moved = accelerator.collectives()
        assert len(moved) == 8, moved  # 3 units, of which 2 are gathered again for the backward
        assert {(given, made) for _, given, made in moved} == {(enabled, enabled)}


# -- streams of the user ---------------------------------------------------------------------------


@on_ranks(2, device="sim")
def test_full_parameters_have_what_was_queued_before(mesh):
    model = sharded(seeded(Stack), mesh)
    parts = [param.detach().to_local() for param in model.parameters()]
    values = [torch.randn(part.shape).pin_memory() for part in parts]
    for part, value in zip(parts, values, strict=True):
        part.copy_(value, non_blocking=True)
    assert accelerator.pending_tasks() > 0, "nothing is under way: the test shows nothing"
    with summon_full_params(model, writeback=False), torch.no_grad():
        gathered = [param.to("cpu", copy=True) for param in model.parameters()]
    again = [param.full_tensor().cpu() for param in model.parameters()]
    for one, two in zip(gathered, again, strict=True):
        assert torch.equal(one, two) and not one.isnan().any()


@pytest.mark.parametrize("host", [True, False])
@on_ranks(2, device="sim")
def test_where_full_parameters_are(mesh, host):
    plain, model = seeded(Stack), sharded(seeded(Stack), mesh)
    first = torch.distributed.get_rank() == 0
    with summon_full_params(model, writeback=False, rank0_only=True, offload_to_cpu=host):
        inside = [p if first else p.to_local() for p in model.parameters()]
        assert {p.device.type for p in inside} == {"cpu" if host and first else "sim"}
        assert not first or all(
            torch.equal(p.cpu(), q) for p, q in zip(inside, plain.parameters(), strict=True)
        )
    assert all(p.to_local().device.type == "sim" for p in model.parameters())
    torch.testing.assert_close(model(*_batch(0)).cpu(), plain(*_on_host(0)))


@EXECUTORS
@on_ranks(2, device="sim")
def test_a_forward_on_another_stream(mesh, executor):
    theirs, ours = fsdp2(seeded(Stack), mesh), sharded(seeded(Stack), mesh)
    side = torch.Stream(device="sim")

    def step(model, call, number):
        with side:
            batch = [ids.pin_memory().to("sim", non_blocking=True) for ids in _on_host(number)]
            loss = call(*batch)
        torch.accelerator.current_stream().wait_stream(side)
        loss.backward()

    check_against_fsdp2(theirs, ours, _call(ours, executor), step, 3)


@on_ranks(2, device="sim")
def test_a_group_with_several_backends(mesh):
    group = mesh.get_group()
    assert torch.distributed.get_backend(group) == "cpu:gloo,sim:simccl"
    found = [backend_of(group, device).name for device in ("sim", "cpu", "cuda")]
    assert found == ["simccl", "gloo", ""]
    model = fully_shard(seeded(Stack))  # on a mesh by default
    assert model._shardc_unit.mesh.device_type == "sim"


@on_ranks(2, device="sim")
def test_inputs_are_moved_by_the_unit_that_is_called_first(mesh):
    plain, model = seeded(Stack), sharded(seeded(Stack), mesh)
    ids, x = _on_host(0)[0], torch.randn(2, 18)
    torch.testing.assert_close(model(ids).cpu(), plain(ids))
    torch.testing.assert_close(model.layers[0](x).cpu(), plain.layers[0](x))
    seen = []
    model.layers[0].up.register_forward_pre_hook(lambda _, args: seen.append(args[0].device.type))
    model.layers[1].register_forward_pre_hook(lambda _, args: (args[0].cpu(),))
    with pytest.raises((RuntimeError, NotImplementedError)):  # inner units are given what they get
        model(ids)
    assert seen == ["sim"]


@EXECUTORS
@on_ranks(2, device="sim")
def test_values_from_another_device_are_written_back(mesh, executor):
    model = sharded(seeded(Stack), mesh)
    call = _call(model, executor)
    call(*_batch(0)).backward()
    value = torch.randn(31, 18, generator=torch.Generator().manual_seed(1))
    param = model.head.weight
    param.data = value.clone()  # on the CPU
    logits = call(_batch(0)[0])
    assert param.to_local().device.type == "sim" and torch.equal(param.full_tensor().cpu(), value)
    plain = seeded(Stack)
    plain.head.weight.data = value
    torch.testing.assert_close(logits.cpu(), plain(_on_host(0)[0]))
