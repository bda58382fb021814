"""`keep_read_first`: the bucket that a backward reads first stays gathered.

Only where its gather would lie open, and where the step peaks no higher.
"""

from dataclasses import replace
from unittest import mock

import pytest
import torch
from models import QUICK, Checkpointed, Stack, check_parity, on_meta, seeded, tokens
from ranks import on_ranks

import shardc
from shardc import fully_shard
from shardc.backend import lowering
from shardc.backend.options import Options
from shardc.passes.budget import read_first
from shardc.passes.budget.read_first import choose_read_first
from shardc.passes.estimate.hardware import Link, set_profile

COMPUTE = (("float32", 1e12),)
LINK = Link(0.0, 2e5)
SLOW = replace(QUICK, name="slow", flops=COMPUTE, inside=LINK, across=LINK, message=1e-3)
FAST = replace(QUICK, name="fast", inside=Link(0.0, 1e15), across=Link(0.0, 1e15), message=0.0)
SHAPE = (64, 16)  # activations hold more than parameters


class Wasteful(Stack):
    """A Stack whose forward peaks behind its last block."""

    def forward(self, tokens, targets=None):
        loss = super().forward(tokens, targets)
        large = loss.detach().repeat(1024, 1024)
        return loss + 1e-9 * (large @ large).sum()


def _batch(seed, shape=SHAPE):
    return {"tokens": tokens(seed, shape), "targets": tokens(seed + 1, shape)}


def _explained(build=Stack, profile=SLOW, targets=True, keep=True, **kwargs):
    given = {"tokens": tokens(0, SHAPE)} | ({"targets": tokens(1, SHAPE)} if targets else {})
    options = {"keep_read_first": keep}
    return shardc.explain(
        on_meta(build), kwargs=given, world_size=2, profile=profile, options=options, **kwargs
    )


def _kept(report):
    return [row.name for row in report.buckets if not row.reshard and "layers" in row.name]


def test_the_bucket_is_gathered_once():
    report, before = _explained(), _explained(keep=False)
    (name,) = _kept(report)
    assert name == "layers.1[1]" and _kept(before) == []
    gathered = [row.buckets for row in report.collectives if row.kind.startswith("all_gather")]
    assert sum(buckets.count(name) for buckets in gathered) == 1
    assert report.exposed_seconds < before.exposed_seconds
    assert report.step_seconds < before.step_seconds
    assert report.peak.total <= before.peak.total


@pytest.mark.parametrize(
    "changes",
    [
        {"profile": FAST},
        {"targets": False},
        {"build": Wasteful},
        {"reshard_after_forward": True},
    ],
    ids=["hidden", "no loss", "memory", "asked for"],
)
def test_what_is_gathered_again(changes):
    with mock.patch.object(lowering, "choose_read_first", wraps=choose_read_first) as asked:
        kept, before = (_explained(keep=keep, **changes).buckets for keep in (True, False))
    assert asked.called
    assert [row.reshard for row in kept] == [row.reshard for row in before]


@pytest.mark.parametrize("given", [{"memory_budget": "1GB"}, {"schedule": False}])
def test_refused_beside(given):
    with pytest.raises(ValueError, match="keep_read_first=True needs schedule=True and no memory"):
        Options.parse({"keep_read_first": True, **given})


def test_a_checkpointed_block_is_read_from_its_first_bucket_on():
    assert _kept(_explained(Checkpointed)) == ["layers.1[0]"]


def _trained(mesh, build, executor, keep=True):
    torch._dynamo.reset()
    set_profile(SLOW)
    model = fully_shard(seeded(build), mesh=mesh, units="auto")
    set_profile(None)
    options = {"executor": executor, "profile": SLOW, "keep_read_first": keep}
    step = torch.compile(model, backend="shardc", options=options, fullgraph=True)
    step(**_batch(0)).backward()
    return step, [param.grad.to_local() for param in model.parameters()]


@pytest.mark.parametrize("executor", ["eager", "inductor"])
@pytest.mark.parametrize("build", [Stack, Checkpointed])
@on_ranks(2)
def test_gradients_keep_their_bits(mesh, build, executor):
    before, want = _trained(mesh, build, executor, keep=False)
    assert _kept(shardc.report(before)) == []
    step, got = _trained(mesh, build, executor)
    assert len(_kept(shardc.report(step))) == 1
    assert any(grad.any() for grad in got)
    assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))


@on_ranks(2)
def test_steps_that_change_parameters(mesh):
    set_profile(SLOW)
    plain, model = seeded(Stack), fully_shard(seeded(Stack), mesh=mesh, units="auto")
    set_profile(None)
    options = {"executor": "eager", "profile": SLOW, "keep_read_first": True}
    step = torch.compile(model, backend="shardc", options=options, fullgraph=True)
    check_parity(plain, model, step, _batch, mesh)
    assert len(_kept(shardc.report(step))) == 1


@on_ranks(2)
def test_ranks_keep_what_all_of_them_would(mesh):
    """One rank alone would gather again."""
    fits = mesh.get_local_rank() == 0
    with mock.patch.object(read_first, "_fits", return_value=fits) as asked:
        step, _ = _trained(mesh, Stack, "eager")
    assert asked.called and _kept(shardc.report(step)) == []
