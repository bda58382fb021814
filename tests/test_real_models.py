"""Models that nobody here wrote train equal to their unsharded selves: loss and every gradient."""

import pytest
import torch
import torch.nn.functional as F
from models import Stack, check_parity, compiled, seeded, shard_all, tokens
from ranks import on_ranks
from real_models import MODELS, bert_backbone, gpt2, language, llama
from torch._dynamo.utils import counters
from torch._higher_order_ops.wrap import tag_activation_checkpoint
from torch.utils.checkpoint import checkpoint

import shardc
from shardc.backend.compile import shardc_backend

COMPILED = [name for name in MODELS if name != "mixtral-balanced"]  # captured as without balance
ON_THREE_RANKS = ["gpt2", "mixtral"]
INDUCTOR = {"gpt2": lambda: gpt2("ForCausalLM"), "llama": llama}


def _pair(build, mesh):
    return seeded(build), shard_all(seeded(build), mesh)


@pytest.mark.parametrize("name", [name for name in COMPILED if name not in ON_THREE_RANKS])
@on_ranks(2)
def test_parity(mesh, name):
    _check(mesh, name)


@pytest.mark.parametrize("name", ON_THREE_RANKS)
@on_ranks(3)
def test_parity_on_three_ranks(mesh, name):
    _check(mesh, name)


def _check(mesh, name):
    case = MODELS[name]
    plain, model = _pair(case.build, mesh)
    counters.clear()
    step = compiled(model, fullgraph=case.fullgraph)
    check_parity(plain, model, step, case.batch, mesh, loss_of=case.loss)
    graphs = counters["stats"]["unique_graphs"]
    assert (graphs == 1) == case.fullgraph, f"{graphs} graphs for two steps"


@pytest.mark.parametrize("name", INDUCTOR)
@on_ranks(2)
def test_parity_inductor(mesh, name):
    plain, model = _pair(INDUCTOR[name], mesh)
    step = compiled(model, "inductor", fullgraph=True)
    check_parity(plain, model, step, language, mesh)


@pytest.mark.parametrize("name", MODELS)
@on_ranks(3)
def test_parity_uncompiled(mesh, name):
    case = MODELS[name]
    plain, model = _pair(case.build, mesh)
    check_parity(plain, model, model, case.batch, mesh, loss_of=case.loss)


# -- activation checkpointing ----------------------------------------------------------------------


@pytest.mark.parametrize("compile", [True, False])
@on_ranks(2)
def test_gradient_checkpointing(mesh, compile):
    plain, model = _pair(lambda: llama(use_cache=False), mesh)
    model.gradient_checkpointing_enable({"use_reentrant": False})
    step = compiled(model, fullgraph=True) if compile else model
    check_parity(plain, model, step, language, mesh)


class Checkpointed(Stack):
    """Every block under `torch.utils.checkpoint`."""

    def forward(self, tokens, targets):
        x = self.embed(tokens)
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=False)
        return F.cross_entropy(self.head(x).flatten(0, 1), targets.flatten())


def _batch(seed):
    return {"tokens": tokens(seed), "targets": tokens(seed + 1000)}


@on_ranks(2, 3)
def test_checkpointed_blocks(mesh):
    plain, model = _pair(Checkpointed, mesh)
    bodies = []

    def backend(gm, inputs):
        bodies.extend(n for n in gm.graph.nodes if n.target is tag_activation_checkpoint)
        return shardc_backend(gm, inputs, options={"executor": "eager"})

    step = torch.compile(model, backend=backend, fullgraph=True)
    check_parity(plain, model, step, _batch, mesh)
    assert len(bodies) == len(model.layers)


@on_ranks(2)
def test_checkpointed_blocks_uncompiled(mesh):
    plain, model = _pair(Checkpointed, mesh)
    calls = []
    for layer in model.layers:
        layer.register_forward_pre_hook(lambda *args: calls.append(args))
    check_parity(plain, model, model, _batch, mesh, steps=1)
    assert len(calls) == 2 * len(model.layers)  # forward, and once more in the backward


# -- what transformers does with a model beside training -------------------------------------------


@pytest.mark.parametrize("compile", [True, False])
@on_ranks(2)
def test_hidden_states(mesh, compile):
    """Recorded through hooks, which transformers finds by the name of the model's class."""
    plain, model = _pair(bert_backbone, mesh)
    ids = language(0)["input_ids"]
    step = compiled(model) if compile else model
    want = plain(ids, output_hidden_states=True).hidden_states
    got = step(ids, output_hidden_states=True).hidden_states
    assert len(want) == 3
    torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("build", [llama, gpt2])
@on_ranks(2)
def test_generate(mesh, build):
    """Trained and generating uncompiled; with the parameters gathered for all of it, and unit by
    unit for every token."""
    plain, model = _pair(build, mesh)
    check_parity(plain, model, model, language, mesh)
    ids = language(0, length=4)["input_ids"]
    options = {"max_new_tokens": 5, "do_sample": False, "pad_token_id": 0}
    want, got = plain.eval().generate(ids, **options), model.eval().generate(ids, **options)
    assert want.shape == (2, 9)
    assert torch.equal(got, want)
    with shardc.summon_full_params(model, writeback=False):
        assert torch.equal(model.generate(ids, **options), want)
    check_parity(plain.train(), model.train(), model, language, mesh)
