"""What a memory budget has the backward compute again: which values, at what price, exactly."""

import copy
import functools
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from models import Gated, GatedBlock, seeded
from ranks import on_ranks
from torch import nn
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

import shardc
from shardc import fully_shard
from shardc.backend.graph_plan import graph_plans, listeners
from shardc.passes.budget import choose as budget
from shardc.passes.budget import saved
from shardc.passes.budget.tradeoff import Choice, Tradeoff
from shardc.runtime import compat

X = torch.empty(4, 64, 32, device="meta")


def _trials(monkeypatch):
    """What is tried for a budget, in order."""
    tried, run = [], budget.run_trial
    monkeypatch.setattr(budget, "run_trial", lambda *a: tried.append(run(*a)) or tried[-1])
    return tried


def _planned(model, x, memory_budget, executor="inductor"):
    """The plans of a step within a budget, on four CPUs."""
    graph_plans.clear()
    options = {"executor": executor, "memory_budget": memory_budget}
    shardc.explain(model, x, world_size=4, options=options, profile="cpu")
    return list(graph_plans)


def _share(plans, share):
    """A budget with room for so much of what graphs hold beside segments and optimizer."""
    return plans[0].static + int(share * max(plan.liveness.peak for plan in plans))


def _peak(plans):
    return max(plan.peak for plan in plans)


def test_what_costs_least_per_byte_is_computed_again_first(monkeypatch):
    tried = _trials(monkeypatch)
    _planned(Gated(), X, "1GB")
    values = Tradeoff.of(tried[0]).values
    kinds = list(dict.fromkeys(value.saved.kind for value in values))
    assert kinds.index("layers.* norm: add") < kinds.index("layers.* gate: matmul"), kinds
    for kind in kinds:  # what is held for longest first
        units = [value.saved.unit for value in values if value.saved.kind == kind]
        assert units == sorted(set(units))
    assert not any("down" in kind for kind in kinds)  # a block's result is read by the next one


def test_a_choice_holds_and_takes_what_it_is_thought_to(monkeypatch):
    tried, run = _trials(monkeypatch), budget.run_trial
    gm_and_ctx = []
    monkeypatch.setattr(
        budget, "run_trial", lambda gm, ctx, k: gm_and_ctx.append((gm, ctx)) or run(gm, ctx, k)
    )
    compared = []

    def compare(gm, ctx, tradeoff, room):
        for choice in (Choice(8, 0), Choice(20, 4), Choice(len(tradeoff.values), 0)):
            trial = run(gm, ctx, budget._kept(tradeoff, choice))
            assert 0.75 < tradeoff.peak(choice) / trial.peak < 1.15
            compared.append(tradeoff.seconds(choice) / trial.seconds)
            at_once = Tradeoff.of(tradeoff.trial).seconds(choice, wanted=0.0)
            assert 0.5 < at_once / tradeoff.seconds(choice) < 1 + 1e-9
        return tradeoff.trial

    monkeypatch.setattr(budget, "_fitting", compare)
    _planned(Gated(8, 128), torch.empty(4, 256, 128, device="meta"), "1GB")
    assert len(tried) == 4
    assert len(compared) >= 3 and all(0.95 < ratio < 1.05 for ratio in compared), compared


def test_what_the_user_checkpoints_stays_as_it_is(monkeypatch):
    tried, model = _trials(monkeypatch), Gated()
    model.checkpointed = (0,)
    saving = functools.partial(create_selective_checkpoint_contexts, [torch.ops.aten.addmm.default])
    again = functools.partial(checkpoint, use_reentrant=False, context_fn=saving)
    model.layers[2].forward = functools.partial(again, model.layers[2].forward)
    _planned(model, X, "1GB")
    values = [value.saved for value in Tradeoff.of(tried[0]).values]
    assert {saved.unit for saved in values} == {"layers.1", "layers.3"}
    assert "layers.* add" not in {saved.kind for saved in values}  # what a block returns


def test_what_is_drawn_is_not_drawn_again(monkeypatch):
    tried = _trials(monkeypatch)
    _planned(Gated(dropout=0.1), X, "1GB", "eager")
    kinds = {value.saved.kind for value in Tradeoff.of(tried[0]).values}
    assert "layers.* mul" in kinds and not any("dropout" in kind for kind in kinds), kinds


class Attending(nn.Module):
    """Attention that is checkpointed."""

    def __init__(self, dropout):
        super().__init__()
        self.qkv, self.dropout = nn.Linear(16, 48), dropout

    def forward(self, x):
        return checkpoint(self._attend, x, use_reentrant=False)

    def _attend(self, x):
        qkv = self.qkv(x).unflatten(-1, (3, 2, 8)).permute(2, 0, 3, 1, 4)
        return F.scaled_dot_product_attention(*qkv.unbind(), dropout_p=self.dropout)


@pytest.mark.parametrize("dropout, executor", [(0.0, "eager"), (0.0, "inductor"), (0.5, "eager")])
@on_ranks(1)
def test_attention_that_drops_nothing_runs_again_without_a_random_state(mesh, dropout, executor):
    plain = seeded(lambda: Attending(dropout))
    model = fully_shard(copy.deepcopy(plain), mesh=mesh)
    options = {"executor": executor, "inductor": {"force_disable_caches": True}}
    step = torch.compile(model, backend="shardc", options=options)
    places = []

    def look(gm, *_):
        places.extend(compat.place_of_random_op(node.target) for node in gm.graph.nodes)

    x = torch.randn(2, 8, 16)
    listeners.append(look)
    try:
        loss = step(x).square().sum()
    finally:
        listeners.remove(look)
    again = [place for place in places if place is not None]
    assert len(again) == (2 if dropout else 0)  # once in the forward, once in the backward
    loss.backward()
    if not dropout:
        plain(x).square().sum().backward()
        torch.testing.assert_close(model.qkv.weight.grad.full_tensor(), plain.qkv.weight.grad)


def _equal_within_a_budget(mesh, build, executor="eager", steps=1, around=lambda model: model):
    """Whether losses and gradients are bitwise the same within a budget, which is kept."""
    x, got, memory_budget = torch.randn(2, 64, 32), [], None
    for _ in range(2):
        model = fully_shard(seeded(build), mesh=mesh, units="auto")
        options = {"executor": executor, "memory_budget": memory_budget}
        step = torch.compile(around(model), backend="shardc", options=options)
        graph_plans.clear()
        torch.manual_seed(1)
        losses = []
        for _ in range(steps):
            losses.append(step(x).square().mean())
            losses[-1].backward()
        gradients = [parameter.grad.full_tensor() for parameter in model.parameters()]
        got.append((_peak(graph_plans), [*losses, *gradients]))
        memory_budget = memory_budget or _share(graph_plans, 0.75)
    (peak, want), (less, have) = got
    assert less <= memory_budget < peak
    return all(map(torch.equal, have, want))


@pytest.mark.parametrize("executor", ["eager", "inductor"])
@on_ranks(2)
def test_the_bits_are_those_of_a_step_without_a_budget(mesh, executor):
    assert _equal_within_a_budget(mesh, lambda: Gated(2, dropout=0.1), executor)


@on_ranks(2)
def test_the_sharded_model_may_be_part_of_what_is_compiled(mesh):
    assert _equal_within_a_budget(mesh, lambda: Gated(6), around=nn.Sequential)


class _Router(nn.Module):
    """Chooses one of two values a row."""

    def __init__(self):
        super().__init__()
        self.gate, self.up = nn.Linear(32, 2), nn.Linear(32, 64)

    def forward(self, x):
        weight, index = self.gate(x.sin()).topk(1, -1)
        chosen = (
            self.up(x)
            .unflatten(-1, (2, 32))
            .gather(-2, index[..., None].expand(*x.shape[:-1], 1, 32))
        )
        return x + chosen.squeeze(-2).tanh() * weight


def test_a_choice_of_experts_is_not_made_twice(monkeypatch):
    tried = _trials(monkeypatch)
    model = nn.Sequential(*(_Router() for _ in range(4)))
    shardc.explain(model, X[0], memory_budget="1GB", profile="cpu")
    nodes = {node.name: node for node in tried[0].forward.gm.graph.nodes}
    values = Tradeoff.of(tried[0]).values
    again = {str(nodes[name].target) for value in values for name in value.names}
    assert values and not any("topk" in target for target in again)


class _Counting(GatedBlock):
    """Reads a buffer that it then writes to."""

    def __init__(self):
        super().__init__()
        self.register_buffer("count", torch.ones(32))

    def forward(self, x):
        scaled = self.gate((x + self.count).sin())
        self.count += 1
        return super().forward(x + self.down(scaled.cos()))


@on_ranks(2)
def test_what_was_overwritten_is_computed_again_from_what_it_was(mesh):
    def build():
        return nn.Sequential(*(_Counting() for _ in range(5)))

    assert _equal_within_a_budget(mesh, build, steps=2)


@pytest.mark.parametrize(
    ("path", "unit"),
    [("1.0", "1"), ("1.attention.0", "1.attention"), ("net.model.2.1", "2"), ("net.head", None)],
)
def test_a_node_is_of_the_unit_whose_name_comes_first_in_its_path(path, unit, monkeypatch):
    """In whatever order a process goes through names: of "1.0" unit "0" was taken, too."""
    monkeypatch.setattr(saved, "module_of", lambda node: path)
    units = ["0", "1", "1.attention", "2"]
    for names in (units, units[::-1]):
        monkeypatch.setattr(saved, "_unit_names", lambda gm, names=names: names)
        assert saved.SavedValues(mock.MagicMock()).unit_of(None) == unit
