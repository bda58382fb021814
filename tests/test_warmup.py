"""`warmup` compiles what a training needs, and leaves no trace; long compiles say what they do."""

import logging
import re

import pytest
import torch
from models import seeded
from ranks import on_ranks
from torch import nn

from shardc import fully_shard, warmup
from shardc.backend import compile as backend
from shardc.backend import stages
from shardc.backend.stages import DYNAMO, INDUCTOR, PASSES, Stages


class Noisy(nn.Module):
    """Has all that a forward may change: running statistics, random numbers."""

    def __init__(self):
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Linear(8, 3)

    def forward(self, x):
        return {
            "out": self.last(nn.functional.dropout(self.norm(self.first(x)), 0.5, self.training))
        }


def _count(monkeypatch):
    compiled = []
    real = backend.compile_graph

    def counting(*args):
        compiled.append(args)
        return real(*args)

    monkeypatch.setattr(backend, "compile_graph", counting)
    return compiled


@pytest.mark.parametrize("wrapped", [False, True])
@on_ranks(2)
def test_nothing_is_compiled_afterwards(mesh, wrapped):
    with pytest.MonkeyPatch.context() as monkeypatch:
        compiled = _count(monkeypatch)
        model = fully_shard(seeded(Noisy), mesh=mesh)
        options = {"executor": "eager"}
        call = torch.compile(model, backend="shardc", options=options)
        if not wrapped:
            model.compile(backend="shardc", options=options)
            call = model
        model.last.eval()
        before = {name: value.clone() for name, value in model.named_buffers()}
        states = model.state_dict()
        values = {name: value.full_tensor().clone() for name, value in model.named_parameters()}
        random = torch.get_rng_state()
        x = torch.randn(4, 6)
        torch.set_rng_state(random)
        warmup(call, x, accumulation=True)
        done = len(compiled)
        assert done >= 4  # with sync, without, with what waited, evaluation
        assert torch.equal(torch.get_rng_state(), random)
        assert model.training and not model.last.training
        model.last.train()
        assert model.state_dict().keys() == states.keys()
        for name, value in model.named_buffers():
            assert torch.equal(value, before[name]), name
        for name, param in model.named_parameters():
            assert torch.equal(param.full_tensor(), values[name]) and param.grad is None, name
        call(x)["out"].sum().backward()
        assert any(not torch.equal(value, before[n]) for n, value in model.named_buffers())
        model.zero_grad()
        with model.no_sync():
            call(x)["out"].sum().backward()
        call(x)["out"].sum().backward()
        model.eval()
        with torch.no_grad():
            call(x)
        assert len(compiled) == done


@on_ranks(2)
def test_what_cannot_be_warmed_up_is_refused(mesh):
    x = torch.randn(4, 6)
    with pytest.raises(ValueError, match=r"warmup takes a model that was sharded"):
        warmup(torch.compile(seeded(Noisy)), x)
    model = fully_shard(seeded(Noisy), mesh=mesh)
    with pytest.raises(ValueError, match=r"takes a compiled model, got .*model.compile"):
        warmup(model, x)
    model.compile(backend="shardc", options={"executor": "eager"})
    model(x)["out"].sum().backward()
    with pytest.raises(ValueError, match=r"first.weight has a gradient.*zero_grad"):
        warmup(model, x)
    model.zero_grad()
    with pytest.raises(ValueError, match=r"give loss="):
        warmup(model.requires_grad_(False), x)
    assert model.training


# -- what a compile says ---------------------------------------------------------------------------


def test_stages_take_their_time_from_what_is_around_them(monkeypatch):
    now = [0.0]
    monkeypatch.setattr(stages.time, "monotonic", lambda: now[0])

    def work(seconds):
        now[0] += seconds

    with Stages(shown=False) as made:
        work(1)
        with made.stage(INDUCTOR):
            work(2)
            with made.stage(PASSES):
                work(4)
            work(8)
        work(16)
    want = {DYNAMO: 0, "AOT autograd": 17, INDUCTOR: 10, PASSES: 4}
    assert made.seconds == want
    text = "compiled a graph in 31.0 s: Dynamo 0.0, AOT autograd 17.0, Inductor 10.0, passes 4.0"
    assert str(made) == text


@pytest.mark.parametrize(("shown", "progress"), [(True, "1"), (False, "1"), (True, "0")])
def test_a_long_compile_is_shown(shown, progress, monkeypatch, capsys):
    monkeypatch.setenv("SHARDC_PROGRESS", progress)
    monkeypatch.setattr(stages, "_LONG", 0.0)
    monkeypatch.setattr(stages, "_AGAIN", 0.001)
    monkeypatch.setattr(logging.getLogger("shardc"), "level", logging.WARNING)
    is_said, text = shown and progress != "0", ""
    with Stages(shown) as made, made.stage(INDUCTOR):
        while is_said and "Inductor" not in text:
            text += capsys.readouterr().err
    text += capsys.readouterr().err
    if is_said:
        assert re.search(r"^shardc: compiling a graph, \d+ s: Inductor$", text, re.MULTILINE), text
        assert re.search(r"^shardc: compiled a graph in .* s: Dynamo 0.0, ", text, re.MULTILINE), (
            text
        )
    else:
        assert text == ""


class Plain(nn.Sequential):
    def __init__(self):
        super().__init__(nn.Linear(6, 6), nn.ReLU(), nn.Linear(6, 6))
        self.limit = 3

    def forward(self, x, mode="add"):
        return super().forward(x).mean() + (1 if mode == "add" else 2) * self.limit


def _to_double(model, given):
    model.double()
    given["x"] = given["x"].detach().double().requires_grad_()


AGAIN = {
    "the gradient divide factor was changed": lambda m, _: m.set_gradient_divide_factor(3.0),
    "gradient sync was switched off": lambda m, _: m.set_requires_gradient_sync(False),
    "reshard_after_forward was switched on": lambda m, _: m.set_reshard_after_forward(True),
    "parameters were frozen or unfrozen": lambda m, _: m[0].requires_grad_(False),
    "dim 0 of x is 7 instead of 4": lambda m, given: given.update(x=torch.randn(7, 6)),
    "x needs a gradient now": lambda m, given: given["x"].requires_grad_(),
    "mode is no longer 'add'": lambda m, given: given.update(mode="twice"),
    "self.limit is no longer 3": lambda m, _: setattr(m, "limit", 4),
    "x has dtype Double instead of Float": _to_double,
    "a unit was gathered by unshard()": lambda m, _: m.unshard(),
}


@on_ranks(2)
def test_a_graph_compiled_again_says_why(mesh):
    """One change after the other, each of which stays."""
    model, given, said = fully_shard(seeded(Plain), mesh=mesh), {"x": torch.randn(4, 6)}, []
    model.compile(backend="shardc", options={"executor": "eager"}, dynamic=False)
    handler, log = logging.Handler(), logging.getLogger("shardc")
    handler.emit = lambda record: said.append(record.getMessage())
    log.addHandler(handler)
    before, _ = log.level, log.setLevel(logging.INFO)
    try:
        with torch._dynamo.config.patch(recompile_limit=20):
            model(**given).backward()
            model.zero_grad()
            for change in AGAIN.values():
                change(model, given)
                model(**given)
    finally:
        log.removeHandler(handler)
        log.setLevel(before)
    first, *again = (line for line in said if line.startswith("compiled graph"))
    assert re.match(r"compiled graph \d+/0 in .* s: Dynamo ", first), first
    for number, (why, line) in enumerate(zip(AGAIN, again, strict=True), 1):
        told = rf"compiled graph \d+/{number} \(again: {re.escape(why)}\) in"
        assert re.match(told, line), (why, line)
