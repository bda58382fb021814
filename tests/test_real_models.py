"""Models that nobody here wrote train equal to their unsharded selves: loss and every gradient."""

import pytest
import torch
from models import Checkpointed, batch_of, check_parity, compiled, seeded, shard_all
from ranks import on_ranks
from real_models import MODELS, bert_backbone, gpt2, language, llama
from torch._dynamo.utils import counters
from torch._higher_order_ops.wrap import tag_activation_checkpoint

import shardc
from shardc.backend.compile import shardc_backend

COMPILED = [name for name in MODELS if name != "mixtral-balanced"]  # captured as without balance


def _pair(build, mesh):
    return seeded(build), shard_all(seeded(build), mesh)


@pytest.mark.parametrize("name", COMPILED)
@on_ranks(2)
def test_parity(mesh, name):
    case = MODELS[name]
    plain, model = _pair(case.build, mesh)
    counters.clear()
    step = compiled(model, "inductor" if name == "llama" else "eager", fullgraph=case.fullgraph)
    check_parity(plain, model, step, case.batch, mesh)
    graphs = counters["stats"]["unique_graphs"]
    assert (graphs == 1) == case.fullgraph, f"{graphs} graphs for two steps"


@pytest.mark.parametrize("name", MODELS)
@on_ranks(3)
def test_parity_uncompiled(mesh, name):
    case = MODELS[name]
    plain, model = _pair(case.build, mesh)
    check_parity(plain, model, model, case.batch, mesh)


# -- activation checkpointing ----------------------------------------------------------------------


@on_ranks(2)
def test_gradient_checkpointing(mesh):
    """Compiled; uncompiled: see test_transformers."""
    plain, model = _pair(lambda: llama(use_cache=False), mesh)
    model.gradient_checkpointing_enable({"use_reentrant": False})
    check_parity(plain, model, compiled(model, fullgraph=True), language, mesh)


@on_ranks(2)
def test_checkpointed_blocks(mesh):
    plain, model = _pair(Checkpointed, mesh)
    calls, bodies = [], []
    note = lambda *args: calls.append(args)  # noqa: E731
    hooks = [layer.register_forward_pre_hook(note) for layer in model.layers]
    check_parity(plain, model, model, batch_of, mesh, steps=1)
    assert len(calls) == 2 * len(model.layers)  # forward, and once more in the backward
    for hook in hooks:
        hook.remove()

    def backend(gm, inputs):
        bodies.extend(n for n in gm.graph.nodes if n.target is tag_activation_checkpoint)
        return shardc_backend(gm, inputs, options={"executor": "eager"})

    step = torch.compile(model, backend=backend, fullgraph=True)
    check_parity(plain, model, step, batch_of, mesh)
    assert len(bodies) == len(model.layers)


# -- what transformers does with a model beside training -------------------------------------------


@on_ranks(2)
def test_hidden_states(mesh):
    """Recorded through hooks, which transformers finds by the name of the model's class."""
    plain, model = _pair(bert_backbone, mesh)
    ids = language(0)["input_ids"]
    with torch.no_grad():
        for call in (model, compiled(model)):
            want, got = (f(ids, output_hidden_states=True).hidden_states for f in (plain, call))
            assert len(want) == 3
            torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)


@on_ranks(2)
def test_generate(mesh):
    """Trained and generating uncompiled; with the parameters gathered for all of it, and unit by
    unit for every token."""
    plain, model = _pair(gpt2, mesh)
    check_parity(plain, model, model, language, mesh, steps=1)
    ids = language(0, length=4)["input_ids"]
    options = {"max_new_tokens": 5, "do_sample": False, "pad_token_id": 0}
    want, got = plain.eval().generate(ids, **options), model.eval().generate(ids, **options)
    assert want.shape == (2, 9)
    assert torch.equal(got, want)
    with shardc.summon_full_params(model, writeback=False):
        assert torch.equal(model.generate(ids, **options), want)
    check_parity(plain.train(), model.train(), model, language, mesh, steps=1)
