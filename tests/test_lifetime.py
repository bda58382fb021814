"""Forwards and backwards in any order and number, recomputation, frozen parameters."""

import functools
from typing import ClassVar

import pytest
import torch
import torch.nn.functional as F
from fsdp2 import sharded
from models import (
    Block,
    Checkpointed,
    Stack,
    check_gradients,
    check_parity,
    compiled,
    loss_of_rank,
    seeded,
)
from ranks import on_ranks
from real_models import language, llama
from test_backend import Graphs
from torch import nn
from torch._dynamo import compiled_autograd
from torch._dynamo.utils import counters
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

from shardc import fully_shard

CALLS = pytest.mark.parametrize("executor", ["eager", None])


def _both(mesh, build=Stack, executor="eager"):
    plain, model = seeded(build), sharded(seeded(build), mesh)
    return plain, model, compiled(model, executor) if executor else model


def _check(plain, model, mesh):
    check_gradients(plain, model, mesh, rtol=1e-4, atol=1e-6)


class TwoLosses(Stack):
    """Gives a loss of half the model and one of all."""

    def forward(self, tokens, targets):
        x = self.layers[0](self.embed(tokens))
        return x.square().mean(), super().forward(tokens, targets)


@CALLS
@on_ranks(2)
def test_several_losses(mesh, executor):
    plain, model, call = _both(mesh, TwoLosses, executor)
    for run in (plain, call):
        first, second = loss_of_rank(run, 1)
        first.backward(retain_graph=True)
        second.backward()
        sum(loss_of_rank(run, 2)).backward()
    _check(plain, model, mesh)


@pytest.mark.parametrize("executor", ["eager", "inductor", None])
@on_ranks(2)
def test_forwards_and_backwards_in_another_order_and_number(mesh, executor):
    plain, model, call = _both(mesh, executor=executor)
    for run in (plain, call):
        first, second = loss_of_rank(run, 1), loss_of_rank(run, 2)
        loss_of_rank(run, 3)  # no backward
        second.backward()
        first.backward()
    _check(plain, model, mesh)
    for run in (plain, call):
        loss_of_rank(run, 2).backward()  # its compilation does not decide for the next
        loss = loss_of_rank(run, 1)
        loss.backward(retain_graph=True)
        loss.backward()
        with pytest.raises(RuntimeError, match=r"second time|retain_graph"):
            loss.backward()
    _check(plain, model, mesh)


def _penalty(call, create_graph=True):
    x = torch.linspace(0, 1, 36).view(2, 18).requires_grad_()
    (grad,) = torch.autograd.grad(call(x).square().sum(), x, create_graph=create_graph)
    return grad.square().sum()


@on_ranks(2)
def test_double_backward(mesh):
    plain, model = seeded(Block), fully_shard(seeded(Block), mesh=mesh)
    for run in (plain, model):  # a penalty on input gradients works uncompiled
        _penalty(run).backward()
    _check(plain, model, mesh)
    with pytest.raises(RuntimeError, match="double backward"):
        _penalty(compiled(model)).backward()


@on_ranks(2)
def test_compiled_autograd(mesh):
    """The backward as a graph of its own, around what the backend made of it."""
    plain, model, call = _both(mesh, functools.partial(Stack, 1))
    loss_of_rank(plain, 1).backward()
    counters.clear()
    with compiled_autograd._enable(torch.compile(backend="eager")):
        loss_of_rank(call, 1).backward()
    assert counters["compiled_autograd"]["captures"] == 1, "the backward is no graph"
    _check(plain, model, mesh)


# -- recomputation ---------------------------------------------------------------------------------


def _save_matmuls(ctx, op, *args, **kwargs):
    save = op in (torch.ops.aten.mm.default, torch.ops.aten.addmm.default)
    return CheckpointPolicy.MUST_SAVE if save else CheckpointPolicy.PREFER_RECOMPUTE


class Selective(Checkpointed):
    """Saves what matmuls give, recomputes the rest."""

    contexts: ClassVar = {
        "context_fn": functools.partial(create_selective_checkpoint_contexts, _save_matmuls)
    }


class SquashedBlock(Block):
    """Computes with a function of a weight."""

    def forward(self, x):
        return x + F.gelu(self.up(self.norm(x))) @ self.down.weight.T.tanh()


class Squashed(Checkpointed):
    """Blocks under activation checkpointing that compute something of their weights alone."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([SquashedBlock(), SquashedBlock()])


class Reentrant(Checkpointed):
    """The old way to recompute."""

    reentrant = True


def _no_weight_is_saved(graphs, model):
    sizes = {b.layout.numel for m in (*model.layers, model) for b in m._shardc_unit.buckets}
    sizes |= {p.numel() for p in model.parameters() if p.ndim > 1}
    saved = [n.meta["val"] for n in graphs.saved() if n.op != "placeholder"]
    assert saved and not [v for v in saved if v.numel() in sizes], saved


@pytest.mark.parametrize("build", [Checkpointed, Selective, Squashed])
@on_ranks(2)
def test_recomputed_blocks_keep_no_gathered_weight(mesh, build):
    plain, model = seeded(build), sharded(seeded(build), mesh, reshard_after_forward=True)
    with Graphs() as graphs:
        call = compiled(model, fullgraph=True)
        for run in (plain, call):
            loss_of_rank(run, 1).backward()
    _no_weight_is_saved(graphs, model)
    _check(plain, model, mesh)


@on_ranks(2)
def test_the_partitioners_memory_budget_keeps_no_gathered_weight(mesh):
    import torch._functorch.config as config

    plain, model = seeded(Stack), sharded(seeded(Stack), mesh, reshard_after_forward=True)
    with Graphs() as graphs, config.patch(activation_memory_budget=0.3):
        for run in (plain, compiled(model, "inductor", fullgraph=True)):
            loss_of_rank(run, 1).backward()
    _no_weight_is_saved(graphs, model)
    _check(plain, model, mesh)


@CALLS
@on_ranks(2)
def test_reentrant_checkpointing(mesh, executor):
    plain, model, call = _both(mesh, Reentrant, executor)
    for run in (plain, call):
        loss_of_rank(run, 1).backward()
    _check(plain, model, mesh)


# -- frozen parameters -----------------------------------------------------------------------------


@on_ranks(2)
def test_lora_by_peft_trains_as_unsharded(mesh):
    from peft import LoraConfig, get_peft_model

    def build():
        config = LoraConfig(r=4, target_modules=["q_proj", "v_proj"], init_lora_weights=False)
        return get_peft_model(llama(), config)

    plain, model = seeded(build), seeded(build)
    for layer in model.base_model.model.model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    trained = [n for n, p in model.named_parameters() if p.requires_grad]
    assert trained and all("lora" in name for name in trained)
    check_parity(plain, model, compiled(model, fullgraph=True), language, mesh)


@CALLS
@on_ranks(2)
def test_a_unit_used_several_times_and_conditionally(mesh, executor):
    class Loop(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = nn.ModuleList([Block(), Block()])

        def forward(self, x, twice):
            for _ in range(3 if twice else 1):
                x = self.layers[0](x)
            return (x if twice else self.layers[1](x)).square().mean()

    plain, model, call = _both(mesh, Loop, executor)
    for twice in (True, False, True):
        for run in (plain, call):
            run(torch.ones(2, 18) * (1 + mesh.get_local_rank()), twice).backward()
    _check(plain, model, mesh)
