"""Plans of a step within a memory budget: what stays gathered fits beside the compiled graphs.

Bytes of a call are measured by the profiler; what is held before it is counted by hand.
"""

import functools
import re
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from models import Stack, measured_peak, seeded, tokens
from ranks import on_ranks
from steps import check_equal

from shardc import compile_step, fully_shard
from shardc.backend.graph_plan import graph_plans
from shardc.passes.context import Budget
from shardc.passes.estimate.memory import Gathering, Liveness
from shardc.step.room import Room

PARTS, CALLS, PLENTY = 3, 4, 2**30
WIDTH, ROOT = 64, "Stack"
LITTLE = 256
"""Bytes of the plan for values that a small model has not: the loss, its gradient."""


class _Run:
    """A model within a budget, and its step of `parts` micro-batches."""

    def __init__(self, mesh, memory_budget, parts=1, **asked):
        torch._dynamo.reset()
        graph_plans.clear()
        self.model = seeded(functools.partial(Stack, 4, WIDTH))
        for layer in self.model.layers:
            fully_shard(layer, mesh=mesh)
        fully_shard(self.model, mesh=mesh)
        self.buckets = [b for m in (*self.model.layers, self.model) for b in m._shardc_unit.buckets]
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-2, fused=True)
        options = {"executor": "eager", "memory_budget": memory_budget}
        self.call = torch.compile(self.model, backend="shardc", options=options)
        self.parts, self.losses = parts, []
        self.step = compile_step(**asked)(self._step) if asked else self._step

    def _step(self, *batch):
        for given, targets in zip(batch[::2], batch[1::2], strict=True):
            loss = self.call(given, targets)
            loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss

    def train(self, numbers):
        for number in numbers:
            self.losses.append(self.step(*self._batch(number)).item())
        return self

    def _batch(self, number):
        seeds = (100 * number + 10 * part + dist.get_rank() for part in range(self.parts))
        size = (2, 8 + 4 * dist.get_rank())
        return [tokens(seed + more, size) for seed in seeds for more in (0, 5)]

    def peak(self, folder):
        """The most bytes of a call, segments, state and all that is held before it included."""
        folder = folder / str(dist.get_rank())
        folder.mkdir(exist_ok=True)
        batch = self._batch(99)
        held = [b.gathered.held for b in self.buckets if b.gathered.is_held]
        state = [getattr(v, "_local", v) for s in self.optimizer.state.values() for v in s.values()]
        state = [each for each in state if each.ndim]
        tensors = [*(b.segment for b in self.buckets), *state, *held]
        storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}
        return sum(storages.values()) + measured_peak(lambda: self.step(*batch), folder)


def _planned():
    return max(plan.peak for plan in graph_plans)


def _planned_by(run):
    run.train([0])
    return _planned()


def _gradients(run):
    return sum(bucket.segment.nbytes for bucket in run.buckets)


def test_what_is_gathered_ahead_fits_a_budget(four_ranks, tmp_path):
    least = _planned_by(_Run(None, "1GB"))
    saved = graph_plans[-1].liveness.inputs
    within = _Run(None, least, gather_ahead=True).train(range(CALLS))
    assert within.step.ahead is None and within.peak(tmp_path) <= least
    (reason,) = within.step.reasons
    assert reason.startswith("nothing is gathered ahead: within memory_budget, compiled graphs")
    root = 4 * within.buckets[-1].layout.numel
    more = least + root
    assert f"leave 0 B at their planned peak, so these do not stay gathered: {ROOT}" in reason
    assert f"{ROOT} alone would fit into memory_budget={more:,} bytes (of {least:,}" in reason

    run = _Run(None, more, gather_ahead=True).train(range(CALLS))
    assert (run.step.ahead.names, run.step.reasons) == ((ROOT,), [])
    peak = run.peak(tmp_path)
    assert least < peak <= _planned() <= more  # the bucket counts once: it is held all along
    assert _planned() - peak < LITTLE
    assert graph_plans[-1].liveness.inputs == saved - root  # what the backward frees itself


@pytest.mark.parametrize("ahead", [False, True])
def test_what_stays_between_micro_batches_fits_a_budget(four_ranks, tmp_path, ahead):
    run = _Run(None, "1GB", PARTS)
    least, root = _planned_by(run), 4 * run.buckets[-1].layout.numel
    least += _gradients(run)  # they wait for the last micro-batch
    asked = {"accumulate": {"gathered_bytes": PLENTY}, "gather_ahead": ahead}
    kept = {}
    for more in (-1, 0, root):
        run = _Run(None, least + more, PARTS, **asked).train(range(CALLS))
        assert run.peak(tmp_path) <= max(least, least + more)
        plan, reasons = run.step.accumulation, run.step.reasons
        kept[more] = () if plan is None else plan.kept
        assert (run.step.ahead is not None) == (ahead and more > 0)
        assert len(reasons) == 1 + (ahead and more <= 0)
    assert kept == {
        -1: (),
        0: ("layers.0", "layers.1"),  # they are there at the peak, anyway
        root: (ROOT, "layers.0", "layers.1"),
    }
    told = re.search(r"all of them would fit into memory_budget=([\d,]+) bytes", reasons[0])
    enough = int(told[1].replace(",", ""))
    run = _Run(None, enough, PARTS, **asked).train(range(CALLS))
    assert run.peak(tmp_path) <= enough and run.step.reasons == []
    assert len(run.step.accumulation.kept) == len(run.buckets)


@on_ranks(2)
def test_the_rank_with_the_smallest_room_counts(mesh):
    """Rank 1 has the longer batch."""
    budget = _planned_by(_Run(mesh, "1GB"))  # of this rank
    largest = torch.tensor(budget)
    dist.all_reduce(largest, dist.ReduceOp.MAX)
    separate = _Run(mesh, int(largest)).train(range(CALLS))
    root = 4 * separate.buckets[-1].layout.numel
    for more, names in ((0, None), (root, (ROOT,))):
        run = _Run(mesh, int(largest) + more, gather_ahead=True).train(range(CALLS))
        assert getattr(run.step.ahead, "names", None) == names
        assert len(run.step.reasons) == (names is None)
        check_equal(separate, run)
    assert (budget < largest) == (dist.get_rank() == 0)


def test_an_update_has_room_for_gathers_beside_the_old_values():
    """A bucket that is gathered ahead is there twice, beside gradients, while all is updated."""
    code = SimpleNamespace(compute_dtype=torch.float32)
    root = SimpleNamespace(
        label="root", layout=SimpleNamespace(numel=10), key=SimpleNamespace(code=code)
    )
    gathered = (Gathering("root", 40, 0, 1),)
    live = Liveness(("a", "b"), (60, 50), (40, 40), (0, 30), 0, 30, {}, {}, gatherings=gathered)
    room = Room(((SimpleNamespace(liveness=live), Budget(200, 100)),), gradients=30)
    assert (room.left(), room.left([root]), room.left([root], [root])) == (40, 40, -10)
    assert Room(room.graphs, gradients=30, waiting=30).left([root]) == 10
    other = SimpleNamespace(**{**vars(root), "label": "layers.0"})
    assert room.left([root, other]) == 0
