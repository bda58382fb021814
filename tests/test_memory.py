"""Liveness of small graphs by hand, and planned against measured peaks."""

import copy
import functools
import json
import logging
from unittest import mock

import pytest
import torch
from models import Stack, compiled, tokens
from ranks import on_ranks
from torch import nn
from torch.fx import Graph, GraphModule

import shardc
from shardc import fully_shard
from shardc.backend import graph_plan
from shardc.backend.graph_plan import graph_plans
from shardc.passes import budget, pipeline
from shardc.passes.budget import choose_kept
from shardc.passes.context import is_all_gather
from shardc.passes.hardware import PROFILES, budget_bytes
from shardc.passes.memory import measure_liveness
from shardc.passes.tradeoff import Choice, Tradeoff

aten, c10d = torch.ops.aten, torch.ops._c10d_functional


def _graph(*calls):
    """A graph of (name, target, operand names, value); the last is returned."""
    graph, nodes = Graph(), {}
    for name, target, operands, value in calls:
        if target == "input":
            nodes[name] = graph.placeholder(name)
        else:
            nodes[name] = graph.call_function(target, tuple(nodes.get(o, o) for o in operands))
        nodes[name].meta["val"] = value
    graph.output((nodes[name],))
    return GraphModule(nn.Module(), graph)


def _bytes(count):
    return torch.empty(count // 4, device="meta")


def test_liveness_counts_storages_from_their_maker_to_their_last_reader():
    gm = _graph(
        ("x", "input", (), _bytes(400)),
        ("a", aten.cos.default, ("x",), _bytes(400)),
        ("view", aten.detach.default, ("a",), _bytes(400)),
        ("b", aten.mul.Tensor, ("view", 2), _bytes(400)),
        ("c", aten.exp.default, ("b",), _bytes(400)),
    )
    assert measure_liveness(gm, owns_inputs=False).live == (0, 400, 400, 800, 800)
    owned = measure_liveness(gm, owns_inputs=True)
    assert owned.live == (400, 800, 400, 800, 800) and owned.inputs == 400 and owned.outputs == 400
    assert owned.peak == 800 and owned.peak_node == "cos_default"
    fused = measure_liveness(gm, owns_inputs=False, fused=True)
    assert fused.live == (0, 0, 0, 0, 400)


def test_a_fused_kernel_has_what_it_reads_until_it_has_run():
    gm = _graph(
        ("x", "input", (), _bytes(400)),
        ("a", aten.mm.default, ("x", "x"), _bytes(400)),
        ("cos", aten.cos.default, ("a",), _bytes(400)),  # in a register of the kernel for c
        ("b", aten.mm.default, ("x", "x"), _bytes(400)),
        ("c", aten.mul.Tensor, ("cos", "b"), _bytes(400)),
    )
    assert measure_liveness(gm, owns_inputs=False, fused=True).live == (0, 400, 400, 800, 1200)


def test_a_fused_kernel_has_all_its_results_when_it_has_run():
    gm = _graph(
        ("x", "input", (), _bytes(400)),
        ("gate", aten.mm.default, ("x", "x"), _bytes(400)),
        ("up", aten.mm.default, ("x", "x"), _bytes(400)),
        ("hidden", aten.mul.Tensor, ("gate", "up"), _bytes(400)),
        ("used", aten.mm.default, ("hidden", "hidden"), _bytes(400)),
        ("tangent", aten.mm.default, ("x", "x"), _bytes(400)),
        ("grad", aten.mul.Tensor, ("tangent", "gate"), _bytes(400)),  # with hidden
        ("out", aten.mm.default, ("used", "grad"), _bytes(400)),
    )
    live = measure_liveness(gm, owns_inputs=False).live
    assert live == (0, 400, 800, 1200, 1200, 1200, 1600, 1200)
    live = measure_liveness(gm, owns_inputs=False, fused=True).live
    assert live == (0, 400, 800, 2000, 1200, 800, 800, 1200)


def test_a_kernel_waits_for_no_collective():
    gm = _graph(
        ("x", "input", (), _bytes(400)),
        ("gate", aten.mm.default, ("x", "x"), _bytes(400)),
        ("hidden", aten.cos.default, ("gate",), _bytes(400)),
        ("used", aten.mm.default, ("hidden", "hidden"), _bytes(400)),
        ("gather", c10d.all_gather_into_tensor.default, ("x", 1, "0"), _bytes(400)),
        ("wait", c10d.wait_tensor.default, ("gather",), _bytes(400)),
        ("late", aten.mul.Tensor, ("wait", "gate"), _bytes(400)),
        ("out", aten.mm.default, ("used", "late"), _bytes(400)),
    )
    live = measure_liveness(gm, owns_inputs=False, fused=True).live
    assert live == (0, 400, 800, 1200, 1200, 1200, 1600, 1200)


def test_a_kernel_may_read_what_a_constant_went_into():
    gm = _graph(
        ("x", "input", (), _bytes(400)),
        ("cos", aten.cos.default, ("x",), _bytes(400)),
        ("used", aten.mm.default, ("cos", "cos"), _bytes(400)),
        ("late", aten.mm.default, ("used", "x"), _bytes(400)),
        ("sum", aten.add.Tensor, ("x", "late"), _bytes(400)),
    )
    gm.weight = torch.empty(100)
    late = gm.graph.find_nodes(op="call_function", target=aten.mm.default)[1]
    with gm.graph.inserting_before(late):
        late.update_arg(0, gm.graph.get_attr("weight"))
    assert measure_liveness(gm, owns_inputs=False, fused=True).peak > 0


def test_what_is_slow_and_read_twice_is_stored_on_cpus():
    def held(device):
        gm = _graph(
            ("x", "input", (), torch.empty(100, device=device)),
            ("tanh", aten.tanh.default, ("x",), torch.empty(100, device=device)),
            ("a", aten.cos.default, ("tanh",), torch.empty(100, device=device)),
            ("b", aten.mul.Tensor, ("tanh", "a"), torch.empty(100, device=device)),
            ("out", aten.mm.default, ("b", "b"), torch.empty(100, device=device)),
        )
        return measure_liveness(gm, owns_inputs=False, fused=True).live

    assert held("cpu") == (0, 800, 400, 400, 800) and held("meta") == (0, 0, 0, 400, 800)


def test_a_sum_of_rows_computes_anew_what_is_not_stored_yet():
    """On CPUs: what its operand is made of lives until then."""

    def live(device, dims):
        value = torch.empty(10, 10, device=device)
        gm = _graph(
            ("x", "input", (), value),
            ("grad", aten.mm.default, ("x", "x"), value),
            ("other", aten.mm.default, ("x", "x"), value),
            ("product", aten.mul.Tensor, ("grad", "other"), value),
            ("apart", aten.mm.default, ("x", "x"), value),
            ("bias", aten.sum.dim_IntList, ("product", dims), value[0]),
            ("used", aten.mm.default, ("product", "apart"), value),
            ("out", aten.mm.default, ("used", "bias"), value),
        )
        return measure_liveness(gm, owns_inputs=False, fused=True).live

    assert live("cpu", (0,)) == (0, 400, 800, 800, 1200, 1640, 1240, 840)
    assert live("cpu", ()) == live("cpu", (1,))
    with_the_product = (0, 400, 800, 1240, 840, 840, 1240, 840)
    assert live("meta", (0,)) == live("cpu", (1,)) == with_the_product


def test_a_sum_of_a_scalar_is_no_sum_of_rows():
    scalar = torch.empty(())
    gm = _graph(
        ("x", "input", (), scalar),
        ("sum", aten.sum.dim_IntList, ("x", (0,)), scalar),
        ("out", aten.mm.default, ("sum", "sum"), scalar),
    )
    assert measure_liveness(gm, owns_inputs=False, fused=True).peak == 8


def test_the_input_of_a_collective_lives_until_its_wait():
    gm = _graph(
        ("x", "input", (), _bytes(800)),
        ("flat", aten.cos.default, ("x",), _bytes(800)),
        ("start", c10d.reduce_scatter_tensor.default, ("flat", "sum", 2, "0"), _bytes(400)),
        ("other", aten.sin.default, ("x",), _bytes(800)),
        ("wait", c10d.wait_tensor.default, ("start",), _bytes(400)),
    )
    assert measure_liveness(gm, owns_inputs=False).live == (0, 800, 1200, 2000, 1200)
    cloned = measure_liveness(gm, owns_inputs=False, clones=True)
    assert cloned.live == (0, 800, 2000, 2800, 2000)


@pytest.mark.parametrize(
    "given, nbytes",
    [
        ("70GB", 70e9),
        ("16GiB", 16 * 2**30),
        ("1.5 mb", 1.5e6),
        ("100", 100),
        (0.5, 40e9),
        (7, 7),
        ("0.5", 40e9),
        ("1.0", 80e9),
        ("1", 1),
    ],
)
def test_budget_in_bytes(given, nbytes):
    assert budget_bytes(given, PROFILES["h100-nvlink"]) == nbytes


def _gathers(gm):
    return sum(map(is_all_gather, gm.graph.nodes))


def test_a_trial_has_the_collectives_of_what_runs(monkeypatch):
    """Among others, one gather in the forward of a bucket that the backward gathers among fewer."""
    trials, run = [], []
    whole = budget.run_trial
    monkeypatch.setattr(budget, "run_trial", lambda *a: trials.append(whole(*a)) or trials[-1])

    def seen(gm, ctx):
        if ctx.number is not None:
            run.append(gm)
        return gm

    monkeypatch.setattr(pipeline, "GRAPH_PASSES", [*pipeline.GRAPH_PASSES, seen])
    options = {"executor": "eager", "memory_budget": "1GB"}
    shardc.explain(
        Stack(3), tokens(0), tokens(1), world_size=4, reshard_after_forward=2, options=options
    )
    assert [_gathers(gm) for gm in run] == [4, 4]
    assert {(_gathers(t.forward.gm), _gathers(t.backward.gm)) for t in trials} == {(4, 4)}


def test_a_choice_that_holds_too_much_is_not_taken(monkeypatch):
    """However little its choices are thought to hold."""
    options = {"executor": "eager", "memory_budget": "1GB"}
    call = functools.partial(shardc.explain, Stack(3), tokens(0), tokens(1), world_size=4)
    graph_plans.clear()
    call(options=options)
    trials, whole = [], budget.run_trial
    monkeypatch.setattr(budget, "run_trial", lambda *a: trials.append(whole(*a)) or trials[-1])
    room = graph_plans[0].static + 1
    call(options={**options, "memory_budget": "1GB"})
    room += trials[0].peak
    peak = Tradeoff.peak
    monkeypatch.setattr(Tradeoff, "peak", lambda self, choice: peak(self, choice) // 2)
    monkeypatch.setattr(Tradeoff, "fastest", lambda self, room: Choice(0, len(self.buckets)))
    graph_plans.clear()
    call(options={**options, "memory_budget": room})
    assert len(trials) > 3 and max(plan.peak for plan in graph_plans) <= room


class _Deep(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(
            *(nn.TransformerEncoderLayer(64, 4, 256, 0.0, batch_first=True) for _ in range(4))
        )

    def forward(self, x):
        return self.layers(x).square().mean()


def measured_peak(run, folder):
    """The most bytes that `run` allocates at a time, by the profiler's account."""
    activities = [torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=activities, profile_memory=True) as profile:
        run()
    path = str(folder / "trace.json")
    profile.export_chrome_trace(path)
    with open(path) as file:
        events = [e for e in json.load(file)["traceEvents"] if e.get("name") == "[memory]"]
    live = peak = 0
    for event in sorted(events, key=lambda event: event["ts"]):
        live += event["args"]["Bytes"]
        peak = max(peak, live)
    return peak


@on_ranks(2)
@pytest.mark.parametrize("executor", ["eager", "inductor"])
def test_planned_peak_is_within_a_tenth_of_the_measured_one(mesh, executor, tmp_path):
    model = fully_shard(_Deep(), mesh=mesh, units="auto")
    step, x = compiled(model, executor), torch.randn(8, 32, 64)
    graph_plans.clear()
    step(x).backward()
    model.zero_grad()
    segments = sum(p.to_local().nbytes for p in model.parameters())
    folder = tmp_path / str(mesh.get_local_rank())
    folder.mkdir()
    measured = measured_peak(lambda: step(x).backward(), folder) + 3 * segments
    planned = max(plan.peak for plan in graph_plans)
    assert abs(planned / measured - 1) < 0.1, (planned, measured)


@on_ranks(2)
def test_ranks_keep_the_same_when_sizes_grow(mesh):
    """A copy compiles for other sizes on each rank: none compares anything, all keep the same."""
    layers = [nn.Sequential(nn.Linear(512, 512), nn.Tanh()) for _ in range(4)]
    for layer in layers:
        fully_shard(layer, mesh=mesh)
    model, kept = fully_shard(nn.Sequential(*layers), mesh=mesh), []

    def choose(gm, ctx):
        kept.append(choose_kept(gm, ctx))
        return kept[-1]

    options = {"executor": "eager", "memory_budget": "14MB"}
    logged = mock.Mock()
    with (
        mock.patch.object(graph_plan, "choose_kept", choose),
        mock.patch.object(logging.getLogger("shardc"), "warning", logged),
    ):
        for rows in (8, (256, 320)[mesh.get_rank()]):
            torch._dynamo.reset()
            call = torch.compile(copy.deepcopy(model), backend="shardc", options=options)
            call(torch.ones(rows, 512)).sum().backward()
    small, large = kept
    assert large == small
    assert "its budget is" in str(logged.call_args)
