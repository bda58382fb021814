"""The optimizer's state, which a memory budget has wait on the host: bits, memory, streams, choice.

The device is simulated (`accelerator`): a copy runs when something waits for it, and memory that is
freed holds NaN, so a wait that is left out gives wrong numbers.
"""

import contextlib
import functools
import gc
import logging
from dataclasses import replace
from unittest import mock

import accelerator
import pytest
import torch
from models import Gated, full, seeded
from ranks import on_ranks

import shardc
from shardc import fully_shard
from shardc.backend import graph_plan
from shardc.backend.graph_plan import graph_plans
from shardc.passes.estimate.hardware import PROFILES
from shardc.runtime import compat
from shardc.runtime.tensor import state_on_host

PROFILE = replace(
    PROFILES["cpu"], name="apart", host_bandwidth=1e10, memory_bandwidth=1e9, overhead=1e-7
)
"""A device whose link to the host is fast for how slowly it computes."""


def _batch(seed=0):
    return torch.randn(4, 64, 32, generator=torch.Generator().manual_seed(seed)).to("sim")


class Run:
    """A model of two blocks and its optimizer, compiled within a budget."""

    def __init__(self, mesh, memory_budget=None, **given):
        graph_plans.clear()
        self.model = seeded(lambda: Gated(2)).to("sim")
        fully_shard(self.model, mesh=mesh, units="auto")
        options = {"executor": "eager", "profile": PROFILE, "memory_budget": memory_budget, **given}
        self.call = torch.compile(self.model, backend="shardc", options=options)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-2)

    def forward(self, seed=0):
        return self.call(_batch(seed))

    def update(self):
        self.optimizer.step()
        self.optimizer.zero_grad()

    def step(self, seed=0):
        self.forward(seed).backward()
        self.update()

    def states(self):
        """What the optimizer keeps of the parameters, and may go."""
        states = self.optimizer.state.values()
        return [value for state in states for value in state.values() if value.ndim]

    def gone(self):
        """How many of these have no memory on the device."""
        parts = [value._local for value in self.states() if value._local.numel()]
        return sum(not part.untyped_storage().nbytes() for part in parts)

    def values(self):
        return [full(value) for value in (*self.model.parameters(), *self.states())]


def _equal(want, got):
    assert len(want) == len(got)
    return all(torch.equal(a, b) for a, b in zip(want, got, strict=True))


def _free(mesh):
    """A run without a budget, after a step."""
    free = Run(mesh)
    free.step()
    return free


@functools.cache
def _budget(mesh):
    """Room for nine tenths of what that holds; the same for all tests."""
    torch._dynamo.reset()  # what is compiled already has no plan here
    _free(mesh)
    return int(0.9 * max(plan.peak for plan in graph_plans))


def _bounded(mesh, **given):
    """A run within that budget, after a step."""
    run = Run(mesh, _budget(mesh), offload_activations=False, **given)
    run.step()
    return run


def _two_forwards(run, bounded):
    """The last of their backwards brings the state back."""
    first, second = run.forward(1), run.forward(2)
    first.backward()
    left = run.gone()
    second.backward()
    assert bool(left) == bounded and not run.gone()
    run.update()


def _a_forward_alone(run, bounded):
    """What is away comes back for the optimizer's state dict, and for its step."""
    run.forward(1)
    assert bool(run.gone()) == bounded
    state = run.optimizer.state_dict()["state"]
    assert not run.gone() and not any(
        full(value).isnan().any()
        for kept in state.values()
        for value in kept.values()
        if value.ndim
    )
    run.forward(2).backward()
    run.forward(3)
    run.update()


def _an_interrupted_backward(run, bounded):
    """What was on its way back when it ended is waited for by the next step."""
    with mock.patch.object(compat, "when_outermost_backward_ends", lambda call: None):
        run.forward(2).backward()
    run.update()
    run.step(3)


def _a_loaded_state(run, bounded):
    """`load_state_dict` makes new tensors, which go too."""
    run.optimizer.load_state_dict(run.optimizer.state_dict())
    loss = run.forward(1)
    assert bool(run.gone()) == bounded
    loss.backward()
    run.update()


@on_ranks(2, device="sim")
def test_the_bits_are_those_of_a_step_without_a_budget(mesh):
    free, run = _free(mesh), _bounded(mesh)
    free.step(1)
    with accelerator.recording() as log:
        loss = run.forward(1)
        assert run.gone() > 2
        loss.backward()
        assert not run.gone()
        run.update()
    copies = [entry.name for entry in log if entry.kind == "copy"]
    assert copies.count("to host") > 2 and copies.count("to device") > 2
    assert _equal(free.values(), run.values())
    for way in (_two_forwards, _a_forward_alone, _an_interrupted_backward, _a_loaded_state):
        for each in (free, run):
            way(each, each is run)
        assert _equal(free.values(), run.values()), way


@contextlib.contextmanager
def _not_waiting(left_out):
    """Have the device not wait until state is on the host, or back."""
    if left_out == "to return":
        with mock.patch.object(state_on_host._Away, "wait", lambda _: None):
            yield
        return
    free = state_on_host._Away.free

    def free_at_once(away):
        away.sent = torch.accelerator.current_stream(away.device).record_event()
        free(away)

    with mock.patch.object(state_on_host._Away, "free", free_at_once):
        yield


@on_ranks(2, device="sim")
def test_a_wait_left_out_shows(mesh):
    """And nothing is held of a model that is gone."""
    run = _bounded(mesh)
    run.step()
    parts = [value._local for value in (*run.model.parameters(), *run.states())]
    before = [part.detach().clone() for part in parts]
    for left_out in ("to leave", "to return"):
        with _not_waiting(left_out):
            run.step()
        assert any(value.isnan().any() for value in run.values()), left_out
        with torch.no_grad():
            for part, value in zip(parts, before, strict=True):
                part.copy_(value)
        assert not any(value.isnan().any() for value in run.values())
    run.forward()
    assert run.gone() and state_on_host._away
    torch._dynamo.reset()
    graph_plans.clear()
    del run, parts, part
    gc.collect()
    assert not len(state_on_host._away) and not len(state_on_host._users)


@on_ranks(2, device="sim")
def test_the_peak_is_the_planned_one(mesh):
    """Copies run behind compute; an optimizer whose state has to stay is told."""
    run = _bounded(mesh)
    run.step()
    batch = _batch()
    before = accelerator.live_bytes()  # segments, the optimizer's state
    accelerator.reset_peak()
    loss = run.call(batch)
    held = [accelerator.peak_bytes() - before]
    loss.backward()
    held.append(accelerator.peak_bytes() - before)
    forward, backward = (plan.liveness for plan in graph_plans)
    assert max(forward.away) > 10_000 and max(backward.away) > 10_000
    planned = forward.peak, max(forward.peak, backward.peak)
    assert all(0.95 < a / b < 1.05 for a, b in zip(planned, held, strict=True)), (planned, held)
    seconds = {}
    for name, copy in (("alone", 0.0), ("behind", 0.1)):
        accelerator.configure(copy=copy, compute=1.0)
        run.optimizer.zero_grad()
        start = accelerator.now()
        with accelerator.recording() as log:
            run.forward().backward()
        seconds[name] = accelerator.now() - start
    copied = 0.1 * sum(entry.kind == "copy" for entry in log)
    assert copied > 1 and seconds["behind"] - seconds["alone"] < 0.25 * copied, (seconds, copied)
    run.optimizer = shardc.WholeTensorOptimizer(torch.optim.Adam, run.model.parameters())
    said = []
    handler = logging.Handler()
    handler.emit = said.append
    state_on_host.log.addHandler(handler)
    for _ in range(3):
        run.step()
    state_on_host.log.removeHandler(handler)
    warned = [each.getMessage() for each in said if "cannot leave the device" in each.getMessage()]
    assert len(warned) == 1 and "WholeTensorOptimizer" in warned[0], warned


@pytest.mark.parametrize(
    "given",
    [
        {"offload_optimizer_state": False},
        {"profile": replace(PROFILE, host_bandwidth=1e5)},
    ],
    ids=["told so", "slow link"],
)
@on_ranks(2, device="sim")
def test_no_state_goes_to_the_host(mesh, given):
    run = _bounded(mesh, **given)
    loss = run.forward()
    assert not run.gone() and not any(max(plan.liveness.away) for plan in graph_plans)
    loss.backward()


@on_ranks(2)
def test_inductor_keeps_the_copies(mesh):
    """On a CPU, where nothing is copied: all are called, none is dead code."""
    called, names = [], ("send_state", "wait_until_state_sent", "fetch_state")

    def counting(name):
        real = getattr(state_on_host, f"_{name}")
        return lambda given: (called.append(name), real(given))[1]

    def gradients(**options):
        torch._dynamo.reset()
        graph_plans.clear()
        model = seeded(lambda: Gated(3))
        fully_shard(model, mesh=mesh, units="auto")
        options |= {"profile": PROFILE, "offload_activations": False}
        call = torch.compile(model, backend="shardc", options=options)
        call(torch.randn(4, 64, 32, generator=torch.Generator().manual_seed(0))).backward()
        return [full(p.grad) for p in model.parameters()]

    with (
        torch.library._scoped_library("shardc", "IMPL") as library,
        mock.patch.object(graph_plan.CompilePlan, "_has_host", True),
    ):
        for name in names:
            library.impl(name, counting(name), "CPU")
        want = gradients(executor="eager")
        got = gradients(memory_budget=int(0.9 * max(plan.peak for plan in graph_plans)))
    assert all(torch.allclose(a, b, atol=1e-6) for a, b in zip(want, got, strict=True))
    counts = {called.count(name) for name in names}
    assert len(counts) == 1 and counts != {0}, called


def test_a_curve_has_the_state_that_is_on_the_host():
    def explained(**options):
        report = shardc.explain(
            Gated(4, 64), torch.empty(8, 64, 64, device="meta"), world_size=4, profile=PROFILE,
            memory_budget="curve", options={"offload_activations": False, **options},
        )  # fmt: skip
        assert all(row.on_host == 0 for row in report.curve)
        return report, [row for row in report.curve if not row.setting]

    report, points = explained()
    alone, without = explained(offload_optimizer_state=False)
    assert points[0].states_on_host == max(row.states_on_host for row in points) > 0
    assert not any(row.states_on_host for row in alone.curve)
    assert points[0].nbytes < without[0].nbytes
    assert points[-1].seconds == pytest.approx(without[-1].seconds)
    assert "state on host" in str(report)


def test_the_host_has_room_for_so_much():
    def on_host(**options):
        report = shardc.explain(
            Gated(4, 64), torch.empty(8, 64, 64, device="meta"), world_size=4, profile=PROFILE,
            memory_budget="curve", options=options,
        )  # fmt: skip
        rows = [row for row in report.curve if not row.setting]
        return [(row.on_host, row.states_on_host) for row in rows]

    most = [max(each) for each in zip(*on_host(), strict=True)]
    assert min(most) > 0
    for room in (sum(most) - 1, most[0] // 2):
        within = on_host(host_memory=room)
        assert 0 < max(map(sum, within)) <= room, (within, room)
    with pytest.raises(RuntimeError, match=r"too small: .* has room for 1 byte .option 'host_mem"):
        shardc.explain(
            Gated(4, 64), torch.empty(8, 64, 64, device="meta"), world_size=4, profile=PROFILE,
            memory_budget=1, options={"host_memory": 1},
        )  # fmt: skip


@on_ranks(2, device="sim")
def test_ranks_agree(mesh):
    """Where one rank alone lacks room, all do as it does."""
    memory_budget = torch.tensor(_budget(mesh))
    torch.distributed.broadcast(memory_budget, 0)
    run = Run(mesh, int(memory_budget), offload_activations=False)
    batch = _batch(1)[: 4 if mesh.get_rank() == 0 else 1]
    for _ in range(2):
        run.call(batch).backward()
        run.update()
    alone = max(plan.liveness.peak for plan in graph_plans)
    away = max(max(plan.liveness.away) for plan in graph_plans)
    found = [None, None]
    torch.distributed.all_gather_object(found, (alone, away))
    (first, there), (second, here) = found
    assert second < first <= int(memory_budget) and there == here > 0, found
