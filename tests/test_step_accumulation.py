"""`compile_step(accumulate=...)`: what the micro-batches of a step share.

Each case trains a separate step of the same settings and compares bits. Messages are counted in a
call that runs the Python of the step, and in the graph.
"""

import contextlib
import functools
import warnings

import pytest
import torch
import torch.distributed as dist
from models import Stack, compiled, seeded, tokens
from ranks import on_ranks
from steps import check_equal, heard
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy
from torch.utils.checkpoint import checkpoint

from shardc import compile_step, fully_shard, report
from shardc.runtime.checks import telling

PARTS, CALLS, PLENTY = 3, 6, 2**30
SETTINGS = ("reshard_after_forward", "reshard_after_backward", "sync")

sgd = functools.partial(torch.optim.SGD, lr=0.1, momentum=0.9)
adamw = functools.partial(torch.optim.AdamW, lr=1e-2, fused=True)


class _Run:
    """A model, and a step of `parts` micro-batches; `accumulate` as `compile_step` takes it."""

    def __init__(
        self, mesh, executor="eager", make=adamw, accumulate=None, once=False, frozen=False,
        **sharding,
    ):  # fmt: skip
        self.model = seeded(functools.partial(Stack, 3))
        for layer in self.model.layers:
            layer.requires_grad_(not frozen)
            fully_shard(layer, mesh=mesh, **sharding)
        fully_shard(self.model, mesh=mesh, **sharding)
        self.units = [m._shardc_unit for m in (*self.model.layers, self.model)]
        trained = [param for param in self.model.parameters() if param.requires_grad]
        self.optimizer = make(trained)
        self.call = compiled(self.model, executor) if executor else self.model
        self.once, self.calls, self.losses = once, [], []
        own = accumulate is None
        self.step = self._step if own else compile_step(accumulate=accumulate)(self._step)

    def _step(self, *batch):
        self.calls.append(len(batch))
        loss = self.loop(batch)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss

    def loop(self, batch):
        """The micro-batches; with `once`, all but the last wait."""
        for number, (given, targets) in enumerate(zip(batch[::2], batch[1::2], strict=True)):
            waits = self.once and number < len(batch) // 2 - 1
            with self.model.no_sync() if waits else contextlib.nullcontext():
                loss = self.call(given, targets) / PARTS
                loss.backward()
        return loss

    def train(self, numbers, parts=PARTS, size=(2, 7)):
        for number in numbers:
            seeds = (100 * number + 10 * part + dist.get_rank() for part in range(parts))
            batch = [tokens(seed + more, size) for seed in seeds for more in (0, 5)]
            self.losses.append(self.step(*batch).item())
        return self

    def settings(self):
        return [[getattr(unit.settings, name) for name in SETTINGS] for unit in self.units]

    def held(self):
        return [b.gathered.is_held for unit in self.units for b in unit.buckets]


def _sent(run, number=99):
    """(gathers, reductions) of one call, in buckets."""
    labels = heard(run, number)
    return tuple(
        sum(len(label.buckets) for label in labels if label.kind == kind)
        for kind in ("all_gather", "reduce_scatter")
    )


UNITS = 4
OFTEN = PARTS * (2 * (UNITS - 1) + 1)
"""Gathers of a step that keeps nothing: each block twice a micro-batch, the root once."""


@pytest.mark.parametrize("once", [False, True])
@pytest.mark.parametrize("make", [sgd, adamw], ids=["SGD", "AdamW"])
@pytest.mark.parametrize("executor", ["eager", None])
@on_ranks(2)
def test_has_the_bits_of_the_loop(mesh, executor, make, once):
    loop = _Run(mesh, executor, make).train(range(1))  # the first call is as usual
    loop.once = once
    loop.train(range(1, CALLS))
    asked = {"gathered_bytes": PLENTY, "reduce_once": once}
    whole = _Run(mesh, executor, make, asked).train(range(CALLS))
    assert (len(whole.calls), whole.step.reasons, len(whole.step.graphs)) == (3, [], 1)
    assert len(whole.step.accumulation.kept) == UNITS
    check_equal(loop, whole)
    reduced = UNITS * (1 if once else PARTS)
    assert _sent(loop) == (OFTEN, reduced)
    assert _sent(whole) == (UNITS, reduced)
    assert whole.settings() == loop.settings()
    assert not any(whole.held())


@on_ranks(2)
def test_inductor_keeps_too(mesh):
    loop = _Run(mesh, "inductor").train(range(4))
    whole = _Run(mesh, "inductor", accumulate={"gathered_bytes": PLENTY}).train(range(4))
    assert whole.step.reasons == []
    check_equal(loop, whole)
    assert _sent(whole) == (UNITS, UNITS * PARTS)


@pytest.mark.parametrize("once", [False, True])
@on_ranks(4)
def test_copies_of_a_model(mesh, once):
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("copies", "shards"))
    loop = _Run(mesh).train(range(1))
    loop.once = once
    loop.train(range(1, 4))
    whole = _Run(mesh, accumulate={"gathered_bytes": PLENTY, "reduce_once": once}).train(range(4))
    assert whole.step.reasons == []
    check_equal(loop, whole)
    assert _sent(whole) == (UNITS, UNITS * (1 if once else PARTS))


@on_ranks(2)
def test_blocks_compiled_by_themselves(mesh):
    loop, whole = _Run(mesh, None), _Run(mesh, None, accumulate={"gathered_bytes": PLENTY})
    for run in (loop, whole):
        for layer in run.model.layers:
            layer.compile(backend="shardc", options={"executor": "eager"})
        run.train(range(CALLS))
    assert whole.step.reasons == []
    check_equal(loop, whole)
    assert _sent(whole) == (UNITS, UNITS * PARTS)


@on_ranks(2)
def test_blocks_in_checkpoints_are_gathered_once_more(mesh):
    """The body of a checkpoint gives out nothing: the end of its backward gathers, to hold."""
    loop, whole = _Run(mesh, None), _Run(mesh, None, accumulate={"gathered_bytes": PLENTY})
    for run in (loop, whole):
        for layer in run.model.layers:
            layer.forward = functools.partial(checkpoint, layer.forward, use_reentrant=False)
        run.call = compiled(run.model)
        run.train(range(CALLS))
    assert whole.step.reasons == []
    check_equal(loop, whole)
    assert (_sent(loop)[0], _sent(whole)[0]) == (OFTEN, UNITS + UNITS - 1)


@on_ranks(2)
def test_as_many_buckets_as_fit(mesh):
    loop = _Run(mesh).train(range(CALLS))
    sizes = {unit.name: 4 * sum(b.layout.numel for b in unit.buckets) for unit in loop.units}
    block = sizes["layers.0"]
    whole = _Run(mesh, accumulate={"gathered_bytes": block + 1}).train(range(CALLS))
    plan = whole.step.accumulation
    assert (plan.kept, plan.nbytes) == (("layers.0",), block)
    assert plan.seconds > 0
    check_equal(loop, whole)
    assert _sent(whole) == (OFTEN - (2 * PARTS - 1), UNITS * PARTS)


@on_ranks(2)
def test_a_report_tells_what_is_kept(mesh):
    run = _Run(mesh, accumulate={"gathered_bytes": 13_000}).train(range(1))
    planned = report(run.call).whole_step(micro_batches=PARTS, gathered_bytes=13_000)
    run.train(range(1, CALLS))
    kept = run.step.accumulation.kept
    assert 0 < len(kept) < UNITS and planned.settings["kept gathered"] == ", ".join(kept)
    kinds = [row.kind for row in planned.collectives for _ in row.buckets]
    assert _sent(run) == (kinds.count("all_gather"), kinds.count("reduce_scatter"))


@pytest.mark.parametrize("executor", ["eager", None])
@on_ranks(2)
def test_frozen_buckets_are_kept(mesh, executor):
    loop = _Run(mesh, executor, frozen=True).train(range(CALLS))
    whole = _Run(mesh, executor, accumulate={"gathered_bytes": PLENTY}, frozen=True)
    whole.train(range(CALLS))
    assert whole.step.reasons == []
    check_equal(loop, whole)
    assert _sent(whole) == (UNITS, PARTS)
    assert not any(whole.held())


@on_ranks(2)
def test_settings_are_as_before_after_an_error(mesh):
    asked = {"gathered_bytes": PLENTY, "reduce_once": True}
    run, loop = _Run(mesh, accumulate=asked), _Run(mesh)
    for each in (run, loop):
        each.model.layers[1].set_reshard_after_forward(False)
    before = run.settings()
    run.train(range(1))
    own, run.seen = run.loop, []
    run.loop = lambda batch: (own(batch[:2]), run.seen.extend(run.settings()), 1 / 0)
    with pytest.raises(ZeroDivisionError):
        run.train([1])
    assert run.seen == UNITS * [[False, False, False]]
    assert run.settings() == before
    assert not any(run.held())
    run.optimizer.zero_grad()
    run.loop = own
    run.train(range(1, CALLS))
    loop.train(range(1))
    loop.once = True
    loop.train(range(1, CALLS))
    check_equal(loop, run)


@on_ranks(2)
def test_fewer_micro_batches_are_reduced_before_the_update(mesh):
    """The plan is that of the first call; other arguments may have another number."""
    asked = {"gathered_bytes": PLENTY, "reduce_once": True}
    whole, loop = _Run(mesh, accumulate=asked), _Run(mesh)
    for run in (whole, loop):
        run.train(range(1))
        run.once = run is loop
        run.train(range(1, 4))
        run.train(range(4, 8), parts=2)
        run.train(range(8, 12), parts=4)
        run.train(range(12, 14))
    assert whole.step.reasons == []
    assert whole.losses[:5] == loop.losses[:5]
    torch.testing.assert_close(whole.losses, loop.losses)
    assert len(whole.step.graphs) == 3
    assert whole.settings() == loop.settings()
    assert not any(whole.held())


@on_ranks(2)
def test_all_forwards_run_before_the_first_backward(mesh):
    whole, loop = _Run(mesh, accumulate={"reduce_once": True}), _Run(mesh)
    for run in (whole, loop):

        def loop_of(batch, run=run):
            pairs = list(zip(batch[::2], batch[1::2], strict=True))
            losses = [run.call(*pair) / PARTS for pair in pairs]
            for loss in losses:
                loss.backward()
            return losses[-1]

        run.loop = loop_of
        run.train(range(CALLS))
    assert whole.step.reasons == []
    torch.testing.assert_close(whole.losses, loop.losses)
    for p, q in zip(whole.model.parameters(), loop.model.parameters(), strict=True):
        torch.testing.assert_close(p._local, q._local)
    assert whole.settings() == loop.settings()


@on_ranks(2)
def test_a_backward_that_raises_does_not_end_the_count(mesh):
    asked = {"gathered_bytes": PLENTY, "reduce_once": True}
    whole, loop = _Run(mesh, None, accumulate=asked), _Run(mesh, None)

    def raise_in_backward(module, args, out):
        out.register_hook(lambda grad: 1 / 0)

    for run in (whole, loop):
        own, run.raising = run.loop, False

        def loop_of(batch, run=run, own=own):
            if run.raising:
                hook = run.model.layers[0].register_forward_hook(raise_in_backward)
                with pytest.raises(ZeroDivisionError):
                    run.call(*batch[:2]).backward()
                hook.remove()
                run.optimizer.zero_grad()
            return own(batch)

        run.loop = loop_of
        run.train(range(1))
        run.raising = True
        telling._warned.clear()
        with warnings.catch_warnings():
            warnings.filterwarnings("error", "accumulate: ")  # that gradients wait at the update
            run.train([1])
        run.raising = False
        run.train(range(2, CALLS))
    torch.testing.assert_close(whole.losses, loop.losses)
    assert whole.settings() == loop.settings()


@on_ranks(2)
def test_ranks_may_have_batches_of_other_shapes(mesh):
    """A rank records a graph while the other runs one: both send the same messages."""
    loop, whole = _Run(mesh), _Run(mesh, accumulate={"gathered_bytes": PLENTY})
    for run in (loop, whole):
        for number in range(8):
            late = dist.get_rank() == 1 and number % 3 == 2
            run.train([number], size=(2, 9) if late else (2, 7))
    assert len(whole.step.graphs) == (1 if dist.get_rank() == 0 else 2)
    check_equal(loop, whole)


@on_ranks(2)
def test_ranks_that_ask_for_something_else_are_told(mesh):
    run = _Run(mesh, accumulate={"gathered_bytes": PLENTY, "reduce_once": dist.get_rank() == 1})
    with pytest.raises(RuntimeError, match="ranks disagree on the micro-batches of a step"):
        run.train([0])


def _one_backward(run):
    run.loop = lambda batch: _Run.loop(run, batch[:2])


def _update_between(run):
    def loop(batch):
        _Run.loop(run, batch[:2])
        run.optimizer.step()
        return _Run.loop(run, batch[2:])

    run.loop = loop


def _sets(run):
    run.once = True


def _has_set(run):
    run.model.layers[0].set_reshard_after_backward(False)


@pytest.mark.parametrize(
    "spoil, asked, sharding, why",
    [
        (_one_backward, PLENTY, {}, "it has one backward"),
        (_update_between, PLENTY, {}, "a backward follows an update"),
        (_sets, PLENTY, {}, "it changes settings of units itself"),
        (_has_set, PLENTY, {}, "layers.0 has settings of the user's own"),
        (None, 100, {}, "no unit that is gathered more than once fits into gathered_bytes=100"),
        (None, PLENTY, {"offload_policy": CPUOffloadPolicy()}, "its parameters lie on the host"),
    ],
)
@on_ranks(2)
def test_says_why_micro_batches_run_as_they_are(mesh, spoil, asked, sharding, why):
    def make(params):
        return adamw(params, fused=False)

    loop = _Run(mesh, make=make, **sharding)
    run = _Run(mesh, make=make, accumulate={"gathered_bytes": asked}, **sharding)
    for each in (run, loop):
        if spoil is not None:
            spoil(each)
        each.train(range(CALLS))
    assert run.step.accumulation is None
    reason = run.step.reasons[-1]
    assert reason.startswith("its micro-batches run as they are: ")
    assert why in reason
    check_equal(loop, run)


@on_ranks(1)
def test_a_rank_alone_keeps_nothing(mesh):
    run = _Run(mesh, accumulate={"gathered_bytes": PLENTY}).train(range(4))
    assert "no unit that is gathered more than once" in run.step.reasons[-1]


@pytest.mark.parametrize(
    "asked, error, text",
    [
        ({}, ValueError, "give gathered_bytes, reduce_once or both"),
        ({"gathered": 1}, ValueError, "unknown key of accumulate 'gathered'"),
        ({"gathered_bytes": "much"}, ValueError, "gathered_bytes must be bytes"),
        ({"reduce_once": "yes"}, TypeError, "accumulate 'reduce_once'"),
    ],
)
def test_wrong_wishes_are_refused(asked, error, text):
    with pytest.raises(error, match=text):
        compile_step(accumulate=asked)


@pytest.mark.parametrize("executor", ["eager", None])
@on_ranks(2)
def test_the_two_settings_gather_once(mesh, executor):
    """Without `compile_step`: a compiled forward gives its buckets to the next one."""
    run = _Run(mesh, executor)

    def loop(batch):
        run.model.set_reshard_after_forward(False)
        for part in range(PARTS):
            run.model.set_reshard_after_backward(part == PARTS - 1)
            run.call(*batch[2 * part : 2 * part + 2]).backward()
        return torch.zeros(())

    run.loop = loop
    assert [_sent(run, number) for number in range(2)] == 2 * [(UNITS, UNITS * PARTS)]
    assert not any(run.held())


@on_ranks(2)
def test_kept_buckets_follow_an_update(mesh):
    plain, run = seeded(functools.partial(Stack, 3)), _Run(mesh)
    run.model.set_reshard_after_forward(False)
    run.model.set_reshard_after_backward(False)
    run.call(tokens(1), tokens(2)).backward()
    assert all(run.held())
    with torch.no_grad():
        for param in (*plain.parameters(), *run.model.parameters()):
            param.mul_(0.5)
    torch.testing.assert_close(run.call(tokens(3), tokens(4)), plain(tokens(3), tokens(4)))


@on_ranks(2)
def test_a_forward_without_gradients_keeps_nothing(mesh):
    run = _Run(mesh)
    run.model.set_reshard_after_forward(False)
    run.model.set_reshard_after_backward(False)
    with torch.no_grad():
        run.call(tokens(1), tokens(2))
    assert not any(run.held())
