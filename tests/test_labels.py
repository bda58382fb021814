"""Names of units on collectives: what the profiler shows of graphs and of uncompiled models."""

import copy
import sys
from collections import Counter

import pytest
import torch
import torch.distributed._functional_collectives as funcol
from models import QUICK, Stack, compiled, seeded, shard_all, tokens
from ranks import mesh_of, on_ranks
from test_fold_repeats import Folds
from torch import nn
from torch._dynamo.utils import counters

import shardc
from shardc import fully_shard
from shardc.runtime.watch.progress import Label, in_short, progress


def _step(call):
    call(tokens(1), tokens(2)).backward()


def _shown(call):
    """How often the profiler shows each of our names in one step; it has compiled before."""
    _step(call)
    with torch.profiler.profile() as profile:
        _step(call)
    names = (event.name for event in profile.events() if event.name.startswith("shardc: "))
    return Counter(name.removeprefix("shardc: ") for name in names if "forward" not in name)


def _expected(*blocks):
    """Of a step: all units are gathered twice but the root, and reduced."""
    verbs = {"gather": 2, "wait gather": 2, "reduce": 1, "wait reduce": 1}
    counts = {f"{verb} {unit}": n for unit in blocks for verb, n in verbs.items()}
    return Counter({f"{verb} Stack": 1 for verb in verbs} | counts)


def asked_autograd(call):
    """How often torch's Python that differentiates an op is asked in a call."""
    asked = []

    def note(frame, event, arg):
        if event == "call" and frame.f_code.co_filename.endswith("_library/autograd.py"):
            asked.append(frame.f_code.co_name)

    sys.setprofile(note)
    try:
        call()
    finally:
        sys.setprofile(None)
    return len(asked)


@pytest.mark.parametrize("executor", ["eager", "inductor", None])
@on_ranks(2)
def test_every_collective_and_wait_has_the_name_of_its_unit(mesh, executor):
    model = shard_all(seeded(lambda: Stack(blocks=6)), mesh)
    call = model if executor is None else compiled(model, executor, fullgraph=True)
    with Folds() as folds:
        shown = _shown(call)
    assert bool(folds.calls("backward")) == (executor == "inductor")
    assert shown == _expected(*(f"layers.{n}" for n in range(6)))
    assert progress.inside is None and not progress.shown
    if executor:  # torch asks its formulas for collectives in Python, where nothing tells it not to
        group = mesh.get_group()
        assert asked_autograd(lambda: funcol.all_gather_tensor(tokens(1), 0, group).sum()) > 0
        assert asked_autograd(lambda: call(tokens(1), tokens(2))) == 0


@on_ranks(2)
def test_coalesced_collectives_name_all_their_buckets(mesh):
    shardc.set_profile(QUICK)
    model = fully_shard(seeded(Stack), mesh=mesh, units="auto")
    shardc.set_profile(None)
    options = {"profile": QUICK, "coalesce": True}
    shown = []
    for executor in ("eager", "inductor"):
        torch._dynamo.reset()
        own = {**options, "executor": executor}
        shown.append(_shown(torch.compile(model, backend="shardc", options=own)))
    assert shown[0] == shown[1]
    together = {name: n for name, n in shown[0].items() if "," in name or "+" in name}
    assert together and all(  # one wait a bucket
        together[f"wait {name}"] == n * (name.count(",") + name.count("+") + 1)
        for name, n in together.items()
        if not name.startswith("wait")
    ), shown


class Renamed(Stack):
    """A Stack whose blocks have another name."""

    def __init__(self):
        super().__init__()
        self.blocks = self.layers
        del self.layers

    def forward(self, tokens, targets):
        x = self.embed(tokens)
        for layer in self.blocks:
            x = layer(x)
        return nn.functional.cross_entropy(self.head(x).flatten(0, 1), targets.flatten())


@on_ranks(2)
def test_names_are_part_of_the_key_of_the_graph_cache(mesh):
    hits, names = [], []
    for build in (Stack, Renamed, Stack):
        torch._dynamo.reset()
        counters.clear()
        shown = _shown(compiled(shard_all(seeded(build), mesh), "inductor"))
        names.append({name for name in shown if "Stack" not in name and "Renamed" not in name})
        hits.append(counters["aot_autograd"]["autograd_cache_hit"])
    assert names[0] == names[2] and all("layers." in name for name in names[0])
    assert names[1] == {name.replace("layers", "blocks") for name in names[0]}
    assert hits[2] == 1, hits


@on_ranks(2)
def test_blocks_that_run_one_compiled_graph_show_their_own_names(mesh):
    model = shard_all(seeded(Stack), mesh)
    for layer in model.layers:
        layer.compile(backend="shardc")
    counters.clear()
    shown = _shown(model)
    assert counters["stats"]["unique_graphs"] == 1
    assert shown == _expected("layers.0", "layers.1")


@pytest.mark.parametrize("executor", ["eager", None])
@on_ranks(2)
def test_a_copy_shows_the_names_of_its_original(mesh, executor):
    model = shard_all(seeded(Stack), mesh)
    copied = copy.deepcopy(model)
    assert [unit._shardc_unit.name for unit in shardc.units_of(copied).values()] == [
        "Stack", "layers.0", "layers.1",
    ]  # fmt: skip
    shown = _shown(copied if executor is None else compiled(copied, executor))
    assert shown == _expected("layers.0", "layers.1")


@on_ranks(2)
def test_buckets_of_equal_names_in_one_graph_are_told_apart(mesh):
    """A graph that was compiled for a pair of one name runs pairs of other names."""
    first, second = (shard_all(seeded(Stack), mesh).layers for _ in range(2))

    @torch.compile(backend="shardc", options={"executor": "eager"})
    def both(one, other, x):
        return one(other(x)).sum()

    def gathered(*pair):
        with torch.profiler.profile() as profile:
            both(*pair, torch.randn(2, 18)).backward()
        names = (event.name.removeprefix("shardc: ") for event in profile.events())
        return Counter(name for name in names if name.startswith("gather "))

    counters.clear()
    assert gathered(first[0], second[0]) == {"gather layers.0": 2, "gather layers.0 (2)": 2}
    assert gathered(first[0], second[1]) == {"gather layers.0": 2, "gather layers.1": 2}
    assert counters["stats"]["unique_graphs"] == 1


@pytest.mark.parametrize("executor", ["eager", None])
@on_ranks(2)
def test_copies_of_the_model_are_reduced_over_by_name(mesh, executor):
    grid = mesh_of("cpu", (2, 1), mesh_dim_names=("replicate", "shard"))
    model = shard_all(seeded(Stack), grid)
    shown = _shown(model if executor is None else compiled(model, executor))
    for unit in ("Stack", "layers.0", "layers.1"):
        assert shown[f"all-reduce {unit}"] == shown[f"wait all-reduce {unit}"] == 1


@on_ranks(2)
def test_an_unscheduled_graph_has_names(mesh):
    model = shard_all(seeded(Stack), mesh)
    options = {"executor": "eager", "schedule": False}
    shown = _shown(torch.compile(model, backend="shardc", options=options))
    assert shown == _expected("layers.0", "layers.1")


def test_names_in_short():
    assert in_short(("layers.0",)) == "layers.0"
    assert in_short(("layers.0[0]", "layers.0[1]", "head")) == "layers.0[0,1]+head"
    label = Label("reduce_scatter", ("layers.0[0]", "layers.0[1]"), "backward", waits=True)
    assert label.name == "shardc: wait reduce layers.0[0,1]"
    assert str(label) == "the reduce-scatter of layers.0[0,1] in the backward"
    assert repr(eval(repr(label))) == repr(label)  # it is written into generated code


def test_a_label_keeps_what_failed():
    start, wait = (Label("all_gather", ("a",), "forward", waits) for waits in (False, True))
    before = progress.started
    with start:
        assert progress.inside is start
    assert progress.inside is None and progress.started == before + 1 and progress.last is start
    with pytest.raises(ValueError), wait:
        raise ValueError
    assert progress.inside is wait and progress.started == before + 1
    progress.inside = None
