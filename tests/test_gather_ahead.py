"""`compile_step(gather_ahead=...)`: buckets that stay gathered from call to call.

Each case trains a step without it, from the same seed, and compares losses, parameters and states
bit by bit. Messages are counted.
"""

import functools
from collections import Counter

import pytest
import torch
import torch.distributed as dist
from models import Stack, compiled, seeded, tokens
from ranks import on_ranks
from steps import check_equal, heard
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy

from shardc import compile_step, fully_shard, report

CALLS = 6

sgd = functools.partial(torch.optim.SGD, lr=0.1, momentum=0.9)
adamw = functools.partial(torch.optim.AdamW, lr=1e-2, fused=True)


class _Run:
    """A model and its step; without `ahead` a separate step."""

    def __init__(self, mesh, ahead=False, executor="eager", make=adamw, clip=False, **sharding):
        self.model = seeded(functools.partial(Stack, 3))
        for layer in self.model.layers:
            fully_shard(layer, mesh=mesh, **sharding)
        fully_shard(self.model, mesh=mesh, **sharding)
        self.units = [m._shardc_unit for m in (*self.model.layers, self.model)]
        self.optimizer = make(self.model.parameters())
        self.call = compiled(self.model, executor) if executor else self.model
        self.clip, self.calls, self.losses = clip, [], []
        self.step = compile_step(gather_ahead=True)(self._step) if ahead else self._step

    def _step(self, given, targets):
        self.calls.append(0)
        loss = self.call(given, targets)
        loss.backward()
        if self.clip:
            torch.nn.utils.clip_grad_norm_(self.model.parameters(), 0.1)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss

    def train(self, numbers, size=(2, 7)):
        for number in numbers:
            batch = [tokens(100 * number + dist.get_rank() + more, size) for more in (0, 5)]
            self.losses.append(self.step(*batch).item())
        return self

    def held(self):
        return [b.gathered.is_held for unit in self.units for b in unit.buckets]


@pytest.mark.parametrize("clip", [False, True])
@pytest.mark.parametrize("make", [sgd, adamw], ids=["SGD", "AdamW"])
@pytest.mark.parametrize("executor", ["eager", None])
@on_ranks(2)
def test_has_the_bits_of_the_separate_step(mesh, executor, make, clip):
    separate = _Run(mesh, False, executor, make, clip).train(range(CALLS))
    whole = _Run(mesh, True, executor, make, clip).train(range(CALLS))
    assert (len(whole.calls), whole.step.reasons, len(whole.step.graphs)) == (3, [], 1)
    assert whole.step.ahead.names[-1] == "Stack" and whole.step.ahead.nbytes > 0
    check_equal(separate, whole)
    assert heard(separate)[0].kind == "all_gather"
    own = set(whole.step.ahead.names)
    order = [own.isdisjoint(label.buckets) for label in heard(whole)]
    assert order == sorted(order, reverse=True)  # the last messages of a call, and no others
    assert whole.held() == [unit.buckets[0].label in own for unit in whole.units]


@on_ranks(2)
def test_a_report_tells_what_is_gathered_ahead(mesh):
    run = _Run(mesh, True).train(range(1))
    planned = report(run.call).whole_step(gather_ahead=True)
    run.train(range(1, CALLS))
    assert planned.settings["gathered ahead"] == ", ".join(run.step.ahead.names)
    sent = Counter((label.kind, name) for label in heard(run) for name in label.buckets)
    assert sent == Counter((row.kind, n) for row in planned.collectives for n in row.buckets)
    assert planned.memory[-1].held[4] == run.step.ahead.nbytes


@on_ranks(2)
def test_inductor(mesh):
    separate = _Run(mesh, False, "inductor").train(range(CALLS))
    whole = _Run(mesh, True, "inductor").train(range(CALLS))
    assert whole.step.reasons == []
    check_equal(separate, whole)


@on_ranks(4)
def test_copies_of_a_model(mesh):
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("copies", "shards"))
    separate, whole = (_Run(mesh, ahead).train(range(CALLS)) for ahead in (False, True))
    assert (whole.step.reasons, len(whole.step.graphs)) == ([], 1)
    check_equal(separate, whole)


@on_ranks(2)
def test_ranks_that_record_meet_ranks_with_a_graph(mesh):
    """A batch of another kind on one rank: that rank runs the Python of the step."""
    separate, whole = (_Run(mesh, ahead).train(range(CALLS)) for ahead in (False, True))
    for run in (separate, whole):
        for number in range(CALLS, CALLS + 5):
            run.train([number], size=(2, 7 + (dist.get_rank() == 1 and number % 2)))
    assert len(whole.step.graphs) == 1 + (dist.get_rank() == 1)
    check_equal(separate, whole)


def _write(run):
    with torch.no_grad():
        for param in run.model.parameters():
            param.mul_(0.5)


def _load(run):
    run.model.load_state_dict({k: 0.5 * v for k, v in run.model.state_dict().items()})


def _reshard(run):
    run.model.reshard()
    assert not any(run.held())


def _evaluate(run):
    with torch.no_grad():
        run.losses.append(run.call(*(tokens(seed, (2, 7)) for seed in (1, 2))).item())


def _train_outside(run):
    run._step(*(tokens(seed, (2, 7)) for seed in (1, 2)))


def _fail(run):
    with pytest.raises((RuntimeError, ValueError)):
        run.call(tokens(0, (2, 7)), tokens(0, (2, 5))).backward()
    run.optimizer.zero_grad()


@pytest.mark.parametrize(
    "act", [_write, _load, _reshard, _evaluate, _train_outside, _fail],
    ids=lambda act: act.__name__.strip("_"),
)  # fmt: skip
@pytest.mark.parametrize("executor", ["eager", None])
@on_ranks(2)
def test_between_two_calls(mesh, executor, act):
    runs = [_Run(mesh, ahead, executor).train(range(4)) for ahead in (False, True)]
    for number in range(4, 8):
        for run in runs:
            act(run)
            run.train([number])
    check_equal(*runs)
    assert any(runs[1].held())


@on_ranks(2)
def test_a_read_between_calls_gives_the_sharded_parameter(mesh):
    separate, whole = (_Run(mesh, ahead, None).train(range(4)) for ahead in (False, True))
    assert whole.model.head.weight is dict(whole.model.named_parameters())["head.weight"]
    for run in (separate, whole):
        with torch.no_grad():
            run.model.head.weight.mul_(0.5)
        run.train(range(4, 6))
    check_equal(separate, whole)


@pytest.mark.parametrize("executor", ["eager", None])
@on_ranks(2)
def test_unshard_ends_with_the_next_backward(mesh, executor):
    runs = [_Run(mesh, ahead, executor).train(range(4)) for ahead in (False, True)]
    for run in runs:
        sharded = run.model.head.weight
        run.model.unshard()
        assert run.model.head.weight.shape == sharded.shape and run.model.head.weight is not sharded
        _train_outside(run)
        assert run.model.head.weight is sharded
        run.train(range(4, 6))
    check_equal(*runs)


@on_ranks(2)
def test_a_step_that_stopped_gathers_anew(mesh):
    runs = [_Run(mesh, ahead).train(range(4)) for ahead in (False, True)]
    graph = next(iter(runs[1].step._kinds.values())).graph
    run, graph.run = graph.run, _interrupt
    with pytest.raises(KeyboardInterrupt):
        runs[1].train([4])
    graph.run = run
    assert not any(runs[1].held())
    for each in runs:
        each.train(range(4, 6))
    check_equal(*runs)


def _interrupt(inputs):
    raise KeyboardInterrupt


@on_ranks(2)
def test_micro_batches_too(mesh):
    def step(run, both):
        def loop(*batch):
            for given, targets in zip(batch[::2], batch[1::2], strict=True):
                loss = run.call(given, targets)
                loss.backward()
            run.optimizer.step()
            run.optimizer.zero_grad()
            return loss

        return compile_step(loop, accumulate={"gathered_bytes": 2**30}, gather_ahead=both)

    runs = [_Run(mesh), _Run(mesh)]
    steps = [step(run, both) for run, both in zip(runs, (False, True), strict=True)]
    for number in range(CALLS):
        seeds = [100 * number + 10 * part + dist.get_rank() for part in range(3)]
        batch = [tokens(seed + more, (2, 7)) for seed in seeds for more in (0, 5)]
        for run, each in zip(runs, steps, strict=True):
            run.losses.append(each(*batch).item())
    assert steps[1].ahead is not None and steps[1].accumulation is not None
    assert len(steps[1].graphs) == 1
    check_equal(*runs)


@on_ranks(2)
def test_says_why_nothing_is_gathered_ahead(mesh):
    policy = CPUOffloadPolicy(pin_memory=False)
    with pytest.warns(UserWarning, match="nothing is gathered ahead"):
        run = _Run(mesh, True, offload_policy=policy).train(range(1))
    assert "parameters on the host" in run.step.reasons[0] and run.step.ahead is None


@on_ranks(2)
def test_an_amount_is_no_flag(mesh):
    with pytest.raises(TypeError, match="gather_ahead"):
        compile_step(lambda: None, gather_ahead="2GiB")
