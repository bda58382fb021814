"""Values that a memory budget has the forward save on the host: bits, streams, memory, choice.

The device is simulated (`accelerator`): a copy runs when something waits for it, and memory that is
freed holds NaN, so a wait that is left out gives wrong numbers.
"""

import contextlib
import functools
from collections import Counter
from dataclasses import replace
from unittest import mock

import accelerator
import pytest
import torch
from models import Gated, full, seeded
from ranks import on_ranks
from test_state_on_host import PROFILE

import shardc
from shardc import fully_shard
from shardc.backend.graph_plan import graph_plans
from shardc.passes.budget import choose as budget
from shardc.passes.budget.tradeoff import Choice
from shardc.runtime import compat

SHARE = 0.7
"""A budget has room for so much of what graphs hold without one."""


def _batch():
    return torch.randn(4, 64, 32, generator=torch.Generator().manual_seed(0)).to("sim")


def _compiled(mesh, memory_budget=None, **given):
    """A model of three blocks with dropout, compiled within a budget."""
    torch._dynamo.reset()
    graph_plans.clear()
    model = seeded(lambda: Gated(3, dropout=0.1)).to("sim")
    fully_shard(model, mesh=mesh, units="auto")
    options = {"executor": "eager", "profile": PROFILE, "memory_budget": memory_budget, **given}
    return torch.compile(model, backend="shardc", options=options)


def _gradients(call):
    torch.manual_seed(1)
    call(_batch()).backward()
    accelerator.note("gradients")
    gradients = [full(p.grad).cpu() for p in call.parameters()]
    call.zero_grad()
    return gradients


@functools.cache
def _without_budget(mesh):
    """The gradients, what graphs hold and what is held beside; the same for all tests."""
    want = _gradients(_compiled(mesh))
    return want, max(plan.liveness.peak for plan in graph_plans), graph_plans[0].static


def _unbounded(mesh, share=SHARE):
    """The gradients without a budget, and one that has room for a share of what graphs hold."""
    want, peak, static = _without_budget(mesh)
    return want, static + int(share * peak)


def _copies(log):
    """The copies of a step."""
    notes = [number for number, entry in enumerate(log) if entry.kind == "note"]
    return [entry for entry in log[: min(notes, default=None)] if entry.kind == "copy"]


@contextlib.contextmanager
def _not_waiting(direction):
    """Have nobody wait for copies to, or from, the host."""

    wait_for = compat.call_when_waited_for

    def call(value, wait):
        if (value.device.type == "cpu") != (direction == "to host"):
            wait_for(value, wait)

    with mock.patch.object(compat, "call_when_waited_for", call):
        yield


@on_ranks(2, device="sim")
def test_the_bits_are_those_of_a_step_without_a_budget(mesh):
    """A wait that is left out shows, and the peak is the planned one."""
    want, memory_budget = _unbounded(mesh)
    call = _compiled(mesh, memory_budget)

    def is_right():
        return all(torch.equal(a, b) for a, b in zip(want, _gradients(call), strict=True))

    for _ in range(2):
        with accelerator.recording() as log:
            assert is_right()
        copies = Counter(entry.name for entry in _copies(log))
        assert copies["to host"] == copies["to device"] > 2, copies
    for direction in ("to host", "from host"):
        with _not_waiting(direction):
            got = _gradients(call)
        assert any(part.isnan().any() for part in got), direction
        assert is_right(), direction
    x = _batch()
    before = accelerator.live_bytes()  # segments, the batch
    accelerator.reset_peak()
    call(x).backward()
    measured = accelerator.peak_bytes() - before
    planned = max(plan.liveness.peak for plan in graph_plans)
    assert planned + graph_plans[0].static <= memory_budget
    assert 0.95 < planned / measured < 1.05, (planned, measured)


@on_ranks(2, device="sim")
def test_copies_run_behind_compute(mesh):
    _, memory_budget = _unbounded(mesh, 0.85)
    call = _compiled(mesh, memory_budget)
    x, seconds = _batch(), {}
    call(x).backward()
    for name, copy in (("alone", 0.0), ("behind", 0.5)):
        accelerator.configure(copy=copy, compute=1.0)
        start = accelerator.now()
        with accelerator.recording() as log:
            call(x).backward()
        seconds[name] = accelerator.now() - start
    copied = 0.5 * len(_copies(log))
    assert copied > 2 and seconds["behind"] - seconds["alone"] < 0.25 * copied, (seconds, copied)


@pytest.mark.parametrize(
    "given",
    [
        {"offload_activations": False},
        {"profile": replace(PROFILE, host_bandwidth=1e6)},
    ],
    ids=["told so", "slow link"],
)
@on_ranks(2, device="sim")
def test_nothing_goes_to_the_host(mesh, given):
    _, memory_budget = _unbounded(mesh)
    call = _compiled(mesh, memory_budget, **given)
    with accelerator.recording() as log:
        _gradients(call)
    assert not _copies(log)


def test_copies_take_what_they_are_thought_to(monkeypatch):
    compared = []

    def compare(gm, ctx, tradeoff, room):
        for share in (0.5, 1):
            choice = Choice(offloaded=int(share * len(tradeoff.copies)))
            trial = budget.run_trial(gm, ctx, budget._kept(tradeoff, choice))
            without = tradeoff.seconds(Choice()) / trial.seconds
            compared.append((tradeoff.seconds(choice) / trial.seconds, without))
        return tradeoff.trial

    monkeypatch.setattr(budget, "_fitting", compare)
    shardc.explain(
        Gated(8, 128), torch.empty(4, 256, 128, device="meta"), world_size=8,
        profile=replace(PROFILE, host_bandwidth=3e7), options={"memory_budget": "1GB"},
    )  # fmt: skip
    assert len(compared) == 2, compared
    assert all(0.95 < thought < 1.05 and without < 0.5 for thought, without in compared), compared


def test_a_curve_has_what_is_on_the_host():
    report = shardc.explain(
        Gated(4, 64), torch.empty(8, 64, 64, device="meta"), world_size=4, profile=PROFILE,
        memory_budget="curve",
    )  # fmt: skip
    points = [row for row in report.curve if not row.setting]
    assert max(row.on_host for row in points) > min(row.on_host for row in points)
    alone = shardc.explain(
        Gated(4, 64), torch.empty(8, 64, 64, device="meta"), world_size=4, profile=PROFILE,
        memory_budget="curve", options={"offload_activations": False},
    )  # fmt: skip
    assert all(row.on_host == 0 for row in alone.curve)
    assert min(row.nbytes for row in points) <= min(row.nbytes for row in alone.curve)
    rows = [row for row in alone.curve if not row.setting]
    tight = rows[len(rows) // 3]
    best = min(row.seconds for row in points if row.nbytes <= tight.nbytes)
    assert best < 0.95 * tight.seconds
    assert "values on host" in str(report)
    (most,) = {row.copied for row in points if row.on_host == max(p.on_host for p in points)}
    assert "kinds, to layers.* " in most and most in report.text(width=200)


def test_a_cpu_saves_nothing_on_the_host():
    report = shardc.explain(
        Gated(2), torch.empty(4, 64, 32, device="meta"), world_size=4, profile="cpu",
        memory_budget="curve",
    )  # fmt: skip
    assert all(row.on_host == 0 for row in report.curve)
