"""WholeTensorOptimizer in stages: messages of one travel while another is updated."""

import copy
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from models import full
from ranks import on_ranks
from test_optimizers import collectives_issued
from test_tensor_parallel import Odd, Tiny, grid_of, make
from test_whole_optimizer import (
    TABLE,
    Some,
    assert_same,
    made,
    pair,
    seed,
    set_gradients,
    train,
)
from torch import optim
from torch.distributed.checkpoint.state_dict import StateDictOptions

from shardc import (
    WholeTensorOptimizer,
    fully_shard,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from shardc.optim import exchange, owners

SIX = {str(i): (16, 20) for i in range(6)}


def in_stages(count):
    """Inside, optimizers are made with `count` stages, however few bytes there are."""
    return mock.patch.multiple(owners, LEAST_BYTES=1, MOST_STAGES=count)


def noted_in(events):
    """Inside, `events` gets what is started and waited for, in order."""
    numbers = {"gradients": [0], "values": [0]}

    def start(*args):
        started = exchange_start(*args)
        kind = args[-1].split()[1]
        name = f"{'to' if kind == 'gradients' else 'back'} {numbers[kind][0]}"
        numbers[kind][0] += 1
        events.append(f"start {name}")
        return Noted(started, name, events)

    exchange_start = exchange.start_exchange
    return mock.patch.object(exchange, "start_exchange", start)


class Noted:
    def __init__(self, started, name, events):
        self.started, self.name, self.events = started, name, events

    def wait(self):
        self.events.append(f"wait {self.name}")
        return self.started.wait()


@on_ranks(2, 3)
def test_messages_travel_while_others_are_updated(mesh):
    events, held = [], []

    class Muon(optim.Muon):
        def step(self, closure=None):
            events.append("update")
            here = [p for p in optimizer.owned.whole.values() if p.untyped_storage().nbytes()]
            own = [p for group in self.param_groups for p in group["params"]]
            held.append(set(here) == set(own) and all(p.grad is not None for p in own))
            return super().step(closure)

    _, model = pair(mesh, SIX)
    with in_stages(2 if mesh.size() == 3 else 3):
        optimizer = WholeTensorOptimizer(Muon, model.parameters(), together=False)
    assert len(optimizer.owned.stages) == len(optimizer.inners) == 6 // mesh.size()
    set_gradients(model, 0)
    events.clear()  # of the step that shows what is kept
    with noted_in(events):
        optimizer.step()
    assert held == [True] * len(optimizer.inners), "whole tensors of one stage at a time"
    if mesh.size() == 3:
        assert events == [
            "start to 0", "start to 1",
            "wait to 0", "update", "start back 0",
            "wait to 1", "update", "start back 1",
            "wait back 0", "wait back 1",
        ]  # fmt: skip
    else:
        assert events == [
            "start to 0", "start to 1",
            "wait to 0", "update", "start back 0", "start to 2",
            "wait to 1", "update", "start back 1", "wait back 0",
            "wait to 2", "update", "start back 2", "wait back 1", "wait back 2",
        ]  # fmt: skip
    assert all(not p.untyped_storage().nbytes() for p in optimizer.owned.whole.values())


def test_stages_hold_as_many_bytes_of_every_owner():
    world, mib = 4, 2**20
    nbytes = [4 * mib] * 32 + [12 * mib] * 16 + [1024] * 17
    dealt = owners.owners_of([(size // 4,) for size in nbytes], world)
    stages = owners.stages_of(nbytes, dealt, world)
    assert sorted(i for stage in stages for i in stage) == list(range(len(nbytes)))
    assert len(stages) == owners.MOST_STAGES
    share = sum(nbytes) / world / len(stages)
    for stage in stages:
        for owner in range(world):
            assert abs(sum(nbytes[i] for i in stage if dealt[i] == owner) - share) <= 4 * mib
    assert len(owners.stages_of([2**20] * 40, [i % 4 for i in range(40)], world)) == 2
    assert owners.stages_of([100] * 9, [i % 4 for i in range(9)], world) == [list(range(9))]
    assert owners.stages_of([64 * mib], [2], world) == [[0]]


@pytest.mark.parametrize("name", TABLE)
@on_ranks(2)
def test_every_optimizer(mesh, name):
    """As the unsharded one, saved from some stages and loaded into others."""
    shapes, together = TABLE[name][2:]
    plain, sharded = pair(mesh, shapes)
    start = [full(p) for p in sharded.parameters()]
    with in_stages(3):
        reference, optimizer = made(name, plain, sharded)
    assert optimizer.together is together == (len(optimizer.owned.stages) == 1)
    train(plain, reference, range(3))
    train(sharded, optimizer, range(3))
    assert_same(plain, sharded, name)
    assert not any(map(torch.equal, start, map(full, sharded.parameters())))
    counts = [0] * mesh.size()
    dist.all_gather_object(counts, sum(len(inner.state) for inner in optimizer.inners))
    assert sum(counts) == len(reference.state)
    assert (max(counts) == len(reference.state)) == together
    saved = get_optimizer_state_dict(
        sharded, optimizer, options=StateDictOptions(full_state_dict=True)
    )
    with in_stages(2):
        _, again = made(name, Some(shapes), sharded)
    set_optimizer_state_dict(sharded, again, saved)
    train(plain, reference, range(3, 5))
    train(sharded, again, range(3, 5))
    assert_same(plain, sharded, f"{name}, loaded into other stages")


class Counts(optim.SGD):
    """Keeps in its settings how often it stepped, in a tensor that it writes to."""

    def __init__(self, params, lr):
        super().__init__(params, lr=lr)
        for group in self.param_groups:
            group["steps"] = torch.zeros(())

    def step(self, closure=None):
        for group in self.param_groups:
            if any(p.grad is not None for p in group["params"]):
                group["steps"] += 1
                group["lr"] = 0.1 / float(group["steps"])
        return super().step(closure)


@on_ranks(2)
def test_settings_count_once_a_step(mesh):
    plain, sharded = pair(mesh, SIX)
    reference = Counts(plain.parameters(), lr=0.1)
    with in_stages(3):
        optimizer = WholeTensorOptimizer(Counts, sharded.parameters(), lr=0.1)
    assert len(optimizer.inners) == 3
    set_gradients(sharded, 0)
    with collectives_issued(all_reduce=1, all_to_all_single=6):
        optimizer.step()
    set_gradients(plain, 0)
    reference.step()
    for step in range(1, 4):
        for model, one in ((plain, reference), (sharded, optimizer)):
            set_gradients(model, step)
            if step == 2:  # stages of this rank without a gradient
                for p in list(model.parameters())[1:]:
                    p.grad = None
            one.step()
    first = optimizer.param_groups[0]
    has_first = sharded.get_parameter("0") in optimizer.owned.whole
    assert float(first["steps"]) == (4 if has_first else 3)
    assert has_first or mesh.get_local_rank() == 1
    for model, one in ((plain, reference), (sharded, optimizer)):
        one.param_groups[0]["steps"] = torch.tensor(4.0)
        set_gradients(model, 4)
        one.step()
    steps = [float(inner.param_groups[0]["steps"]) for inner in optimizer.inners]
    assert steps == [5.0] * 3


@on_ranks(2, device="sim")
def test_on_a_device(mesh):
    """Copies and messages take a while there, and memory that is freed is overwritten."""
    plain = Some(SIX)
    model = fully_shard(Some(SIX), mesh=mesh)
    assert next(model.parameters()).device.type == "sim"
    with in_stages(3):
        optimizer = WholeTensorOptimizer(optim.AdamW, model.parameters(), lr=0.1, foreach=False)
    reference = optim.AdamW(plain.parameters(), lr=0.1, foreach=False)
    for step in range(3):
        set_gradients(plain, step)
        for p, q in zip(plain.parameters(), model.parameters(), strict=True):
            q.grad = torch.empty_like(q.detach()).copy_(p.grad.to("sim"))
        reference.step()
        optimizer.step()
    for p, q in zip(plain.parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(full(q).cpu(), p.detach())


# -- tensor parallelism ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "build"), [("Muon", Odd), ("SOAP", Odd), ("Adafactor", Tiny), ("Prodigy", Tiny)]
)
@on_ranks(4)
def test_with_tensor_parallelism(mesh, name, build):
    grid = grid_of()
    torch.manual_seed(0)
    plain = build()
    model = make(grid, build)
    with torch.no_grad():
        for p, q in zip(plain.parameters(), model.parameters(), strict=True):
            p.copy_(full(q))
    placed = [(p, p._shard_spec.tp) for p in model.parameters()]
    cut = [p for p, tp in placed if tp is not None and tp.groups]
    assert cut and all(p.to_local().numel() < p.numel() / 2 + 40 for p in cut)
    build_optimizer, settings = TABLE[name][:2]

    def of(one):
        return [p for p in one.parameters() if p.dim() == 2 or name != "Muon"]

    with in_stages(3):
        optimizer = WholeTensorOptimizer(build_optimizer, of(model), **settings)
    reference = build_optimizer(of(plain), **settings)
    for number in range(4):
        if number == 3:
            options = StateDictOptions(full_state_dict=True)
            saved = get_optimizer_state_dict(model, optimizer, options=options)
            with in_stages(1):
                optimizer = WholeTensorOptimizer(build_optimizer, of(model), **settings)
            set_optimizer_state_dict(model, optimizer, copy.deepcopy(saved))
        for one, each in ((plain, reference), (model, optimizer)):
            set_gradients(one, number)
            seed(number)
            each.step()
        for (label, p), q in zip(plain.named_parameters(), model.parameters(), strict=True):
            torch.testing.assert_close(full(q), p.detach(), rtol=1e-5, atol=1e-5, msg=label)
