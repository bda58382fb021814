"""Liveness of small graphs by hand, and planned against measured peaks."""

import copy
import functools
import operator
import os
from unittest import mock

import pytest
import torch
from models import Gated, Live, Stack, compiled, measured_peak, tokens
from ranks import on_ranks
from torch import nn
from torch.fx import Graph, GraphModule

import shardc
from shardc import fully_shard
from shardc.backend import lowering
from shardc.backend.graph_plan import graph_plans
from shardc.passes import pipeline
from shardc.passes.budget import choose as budget
from shardc.passes.budget.choose import choose_kept
from shardc.passes.budget.tradeoff import Choice, Tradeoff
from shardc.passes.budget.trial import Trial
from shardc.passes.context import UNITS_IN_FLIGHT, PassContext, ScheduleOptions
from shardc.passes.estimate import hardware
from shardc.passes.estimate.hardware import PROFILES, budget_bytes, host_bytes
from shardc.passes.estimate.memory import measure_liveness
from shardc.passes.nodes import is_all_gather
from shardc.passes.repeat.store_smaller import store_smaller
from shardc.runtime.layout.spec import Moved, UnshardSpec, intern_spec

aten, c10d = torch.ops.aten, torch.ops._c10d_functional
OPS = {name: getattr(aten, name).Tensor for name in ("add", "sub", "mul", "div")} | {
    "sum": aten.sum.dim_IntList,
    "empty": aten.empty.memory_format,
    "all_gather": c10d.all_gather_into_tensor.default,
    "reduce_scatter": c10d.reduce_scatter_tensor.default,
    "wait": c10d.wait_tensor.default,
}


class _Graph:
    """A graph that grows: `g.mm(g.x, g.x)` calls that op, and gives its node, of 400 bytes if no
    value is given. The last one is returned."""

    def __init__(self, device="meta", value=None):
        self.graph, self.root = Graph(), nn.Module()
        self.value = torch.empty(10, 10, device=device) if value is None else value
        self.x = self.input()

    def input(self, value=None):
        node = self.graph.placeholder(f"input_{len(self.graph.nodes)}")
        node.meta["val"] = torch.empty_like(self.value) if value is None else value
        return node

    def call(self, target, *operands, value=None):
        self.last = self.graph.call_function(target, operands)
        self.last.meta["val"] = self.value if value is None else value
        return self.last

    def __getattr__(self, name):
        return functools.partial(self.call, OPS.get(name) or getattr(aten, name).default)

    @functools.cached_property
    def gm(self):
        self.graph.output((self.last,))
        return GraphModule(self.root, self.graph)

    def measured(self, **options):
        return measure_liveness(self.gm, **{"owns_inputs": False, "fused": True, **options})

    def live(self, **options):
        return self.measured(**options).live


def _bytes(count):
    return torch.empty(count // 4, device="meta")


def _gated(device="meta"):
    """A product with a gate, and the gradient of the gate in the same kernel."""
    g = _Graph(device)
    gate, up = g.mm(g.x, g.x), g.mm(g.x, g.x)
    hidden = g.mul(gate, up)
    used = g.mm(hidden, hidden)
    grad = g.mul(g.mm(g.x, g.x), gate)  # with hidden
    g.mm(used, grad)
    return g


def test_liveness_counts_storages_from_their_maker_to_their_last_reader():
    g = _Graph()
    g.exp(g.mul(g.detach(g.cos(g.x)), 2))
    assert g.live(fused=False) == (0, 400, 400, 800, 800)
    owned = g.measured(owns_inputs=True, fused=False)
    assert owned.live == (400, 800, 400, 800, 800) and owned.inputs == 400 and owned.outputs == 400
    assert owned.peak == 800 and owned.peak_node == "cos_default"
    assert g.live() == (0, 0, 0, 0, 400)


def test_matmuls_take_a_workspace_while_they_run():
    """It is given back before a kernel reads the product."""
    g = _Graph()
    g.exp(g.mm(g.x, g.x))
    assert g.live(fused=False, workspace=1000) == (0, 1400, 800)
    assert _gated().live(workspace=1000) == (0, 1400, 1800, 2200, 2200, 800, 800, 2200)


@pytest.mark.parametrize("kept", [False, True])
def test_a_bucket_that_stays_for_the_next_forward_is_held_to_the_end(kept):
    g = _Graph()
    spec = UnshardSpec(torch.float32, 2, "group", ((100, 0),), ((10, 10),), (True,), kept=kept)
    saved = {g.x.name: Moved(intern_spec(spec), 0, "layers.0")}
    g.exp(g.cos(g.sin(g.x)))
    given = {"owns_inputs": True, "fused": False, "gathered": saved}
    stays = 400 * kept
    assert g.live(**given) == (400, 800, 800 + stays, 800 + stays)
    assert g.measured(**given).live_with({"layers.0": 400}) == [400, 800, 1200, 1200]


@pytest.mark.parametrize("version", ["2.14.1", "2.15.0"])
def test_where_torch_keeps_workspaces(version, monkeypatch):
    profile = PROFILES["h100-nvlink"]
    monkeypatch.setattr(torch, "__version__", torch.torch_version.TorchVersion(version))
    monkeypatch.delenv("TORCH_CUBLAS_WORKSPACE_CACHE", raising=False)
    found = hardware.workspace_bytes(profile), hardware.matmul_bytes(profile)
    kept = 2 * profile.workspace, 0
    assert found == (kept if version == "2.14.1" else (0, profile.workspace))
    monkeypatch.setenv("TORCH_CUBLAS_WORKSPACE_CACHE", "1")
    assert (hardware.workspace_bytes(profile), hardware.matmul_bytes(profile)) == kept


def test_a_fused_kernel_has_what_it_reads_until_it_has_run():
    g = _Graph()
    cos = g.cos(g.mm(g.x, g.x))  # in a register of the kernel for the product
    g.mul(cos, g.mm(g.x, g.x))
    assert g.live() == (0, 400, 400, 800, 800)


def test_a_fused_kernel_has_all_its_results_when_it_has_run():
    assert _gated().live(fused=False) == (0, 400, 800, 1200, 1200, 1200, 1600, 1200)
    assert _gated().live() == (0, 400, 800, 1200, 1200, 800, 800, 1200)


def test_a_view_of_what_moves_to_a_kernel_moves_with_it():
    def live(view):
        g = _Graph()
        gate = g.mm(g.x, g.x)
        hidden = g.mul(gate, 2)
        used, tangent = g.mm(hidden, hidden), g.mm(g.x, g.x)
        grad = g.mul(g.view(tangent, (100,)) if view else tangent, gate)  # with hidden
        g.mm(used, grad)
        return g.live()

    plain, seen = live(False), live(True)
    assert plain == (0, 400, 1200, 1200, 800, 800, 1200)
    assert (*seen[:5], *seen[6:]) == plain


def test_a_kernel_waits_for_no_collective():
    g = _Graph()
    gate = g.mm(g.x, g.x)
    hidden = g.cos(gate)
    used = g.mm(hidden, hidden)
    late = g.mul(g.wait(g.all_gather(g.x, 1, "0")), gate)  # written over the gate
    g.mm(used, late)
    assert g.live() == (0, 400, 800, 1200, 1200, 1200, 1200, 1200)


def test_a_kernel_may_read_what_a_constant_went_into():
    g = _Graph()
    g.root.weight = torch.empty(100)
    cos = g.cos(g.x)
    g.mm(cos, cos)
    g.add(g.x, g.mm(g.graph.get_attr("weight"), g.x))
    assert g.measured().peak > 0


def test_what_is_slow_and_read_twice_is_stored_on_cpus():
    def held(device):
        g = _Graph(device)
        tanh = g.tanh(g.x)
        a = g.cos(tanh)
        g.mm(g.mul(tanh, g.mm(a, a)), g.x)
        return g.live()

    assert held("cpu") == (0, 800, 800, 1200, 800, 800)
    assert held("meta") == (0, 0, 400, 800, 400, 800)


@pytest.mark.parametrize("follows", ["empty", "exp"])
def test_what_a_call_of_kernels_reads_is_held_until_it_returns_on_cpus(follows):
    """Kernels that follow each other are one call there; an empty tensor is made before it."""

    def held(device):
        g = _Graph(device)
        grad = g.cos(g.input())  # of the logits
        buffer = g.empty((10, 10)) if follows == "empty" else g.exp(g.x)
        again = g.mm(g.mm(grad, buffer), buffer)
        g.mm(again, grad)
        return g.live(owns_inputs=True)

    more = [on - other for on, other in zip(held("cpu"), held("meta"), strict=True)]
    assert more == [0, 0, 0, 400, 0, 0, 0]  # the logits


def test_kernels_on_cpus_stay_between_matmuls_where_they_are_in_order():
    def held(device, in_order):
        return _gated(device).live(in_order=in_order)

    assert held("cpu", False) == (0, 400, 800, 1200, 1200, 800, 800, 1200)  # grad beside hidden
    assert held("cpu", True) == (0, 400, 800, 800, 1200, 1200, 1200, 1200)
    assert held("meta", True) == held("meta", False) == held("cpu", False)


def test_a_sum_on_a_cpu_is_computed_with_the_matmul_that_it_alone_reads():
    """The matmul comes to the sum, and what it reads is held until then."""

    def held(device):
        g = _Graph(device)
        left = g.mm(g.x, g.x)
        other, right, late = g.mm(left, g.x), g.mm(left, left), g.mm(g.x, g.x)
        g.mm(g.add(other, right), late)
        return g.live()

    assert held("cpu") == (0, 400, 800, 800, 1200, 1600, 1200)  # left, until the sum
    assert held("meta") == (0, 400, 800, 1200, 1200, 1200, 1200)  # right


def test_what_rows_are_read_of_is_not_stored():
    g, column = _Graph(), torch.empty(10, 1, device="meta")
    rows = g.input(column.long())
    shifted = g.sub(g.mm(g.x, g.x), 1)
    picked = g.gather(shifted, 1, rows, value=column)
    g.mm(picked, picked)
    assert g.live() == (0, 0, 400, 400, 440, 440)


def test_a_constant_is_not_stored_for_ops_that_are_loops():
    g = _Graph("cpu")
    zeros, row = g.full([10, 10], 0.0), g.mm(g.x, g.x, value=torch.empty(10))
    made = g.select_scatter(zeros, row, 0, 1)
    g.mm(made, made)
    assert g.live() == (0, 0, 40, 440, 800)


def test_a_kernel_writes_over_what_it_has_reduced_before():
    def live(by_total):
        g = _Graph("cpu")
        made = g.mm(g.x, g.x)
        total = g.sum(made, [1], True, value=torch.empty(10, 1))
        shares = g.div(made, total if by_total else g.x)
        g.mm(g.mm(shares, total), shares)
        return g.live()

    assert live(True) == (0, 400, 440, 440, 840, 1200)
    assert live(False) == (0, 400, 840, 840, 840, 1200)  # another reads it in the same kernel


def test_what_one_kernel_computes_and_reads_is_not_stored():
    g = _Graph("cpu")
    tanh = g.tanh(g.x)
    product = g.mul(tanh, g.cos(tanh))
    g.mm(product, product)
    assert g.live() == (0, 400, 400, 400, 800)


def test_what_one_later_kernel_reads_is_computed_there():
    """A kernel before it reads the same, but to store a value for one reader would save nothing."""
    g = _Graph("cpu")
    a = g.mm(g.x, g.x)
    b, gate = g.cos(a), g.sigmoid(a)
    total = g.add(g.mul(g.mm(b, g.x), gate), gate)
    made = g.mul(total, a)
    g.mm(made, made)
    assert g.live() == (0, 400, 400, 800, 1200, 800, 800, 800, 800)


def test_what_one_op_reads_is_stored_when_that_op_needs_it():
    """What several read is stored at once, and so is a sum."""

    def live(op, *operands, value=None):
        g = _Graph("cpu")
        made = getattr(g, op)(g.x, *operands, value=value)
        empty, other = g.empty([10, 10]), g.mm(g.x, g.x)
        g.mm(g.mm(other, made), empty)
        return g.live()

    assert live("cos") == (0, 0, 400, 1200, 1600, 1200)
    column = torch.empty(10, 1)
    assert live("sum", [1], True, value=column) == (0, 40, 440, 840, 1240, 1200)


def test_a_kernel_writes_over_what_nothing_reads_after_it():
    """Not over an input, what another op reads, or what is read in another order."""

    def begun():
        g = _Graph("cpu")
        return g, g.mm(g.x, g.x)

    g, made = begun()
    used = g.mm(made, g.x)
    g.mm(g.mul(made, g.x), used)
    assert g.live() == (0, 400, 800, 800, 1200)
    g, made = begun()
    g.mm(g.mul(made, g.x), g.mm(made, g.x))
    assert g.live() == (0, 400, 400, 800, 1200)  # it is put off until then
    g, made = begun()
    scaled = g.mul(made, g.x)
    g.mm(scaled, g.mm(made, g.mm(scaled, g.x)))
    assert g.live() == (0, 400, 800, 1200, 1600, 1200)
    g, made = begun()
    used, turned = g.mm(made, g.x), g.t(made, value=g.value.t())
    g.mm(g.mul(turned, g.x), used)
    assert g.live() == (0, 400, 800, 800, 1200, 1200)


def test_a_call_does_not_write_over_what_it_is_given():
    """Kernels outside of calls write over what was made before a collective, too."""

    def live(sends=False, **calls):
        g = _Graph("cpu")
        made = g.mm(g.x, g.x)
        if sends:
            g.wait(g.all_gather(g.x, 2, "0", value=torch.empty(0)), value=torch.empty(0))
        g.mm(g.mul(made, g.x), g.x)
        return g.live(calls=calls)

    assert live() == live(mm_default=0, mul_tensor=0) == (0, 400, 400, 800)
    assert live(True) == (0, 400, 400, 400, 400, 800)
    given = live(True, mul_tensor=0)
    assert given == live(True, mm_default=0, mul_tensor=1) == (0, 400, 400, 400, 800, 800)


def test_what_is_smaller_than_what_it_is_made_of_is_stored():
    """With a budget, where a matmul and a collective come before what reads it."""

    def live(of_two, in_order=True):
        g = _Graph("cpu")
        left, right = g.mm(g.x, g.x), g.mm(g.x, g.x)
        made = g.mul(left, right) if of_two else g.mul(left, g.x, value=torch.empty(20, 10))
        used = g.mm(g.x, g.x)
        g.wait(g.all_gather(g.x, 2, "0", value=torch.empty(0)), value=torch.empty(0))
        g.mm(g.mul(g.mm(used, g.x), made), g.x)
        options = ScheduleOptions(PROFILES["h100-nvlink"], in_order=in_order)
        store_smaller(g.gm, PassContext("backward", options=options))
        return g.live(in_order=True)

    held = live(True, in_order=False)
    assert held == (0, 400, 800, 800, 1200, 1200, 1200, 1600, 1200, 800)
    assert live(True) == (0, 400, 800, 800, 800, 800, 800, 1200, 800, 800)
    assert live(False) == live(False, in_order=False)


def test_what_is_made_of_much_is_stored_where_several_read_it():
    def live(count):
        g = _Graph()
        total = functools.reduce(g.add, [g.mm(g.x, g.x) for _ in range(count)])
        m = g.mm(g.cos(total), g.x)
        g.mm(g.mul(total, m), g.x)
        return g.live()[-3]

    assert live(4) == 2400 and live(5) == 1200  # when `m` is there


def test_a_sum_of_rows_computes_anew_what_is_not_stored_yet():
    """On CPUs: what its operand is made of lives until then."""

    def live(device, dims):
        g = _Graph(device)
        product = g.mul(g.mm(g.x, g.x), g.mm(g.x, g.x))
        apart = g.mm(g.x, g.x)
        bias = g.sum(product, dims, value=g.value[0])
        g.mm(g.mm(product, apart), bias)
        return g.live()

    assert live("cpu", (0,)) == (0, 400, 800, 800, 1200, 1240, 1240, 840)
    assert live("cpu", ()) == live("cpu", (1,))
    with_the_product = (0, 400, 800, 840, 840, 840, 1240, 840)
    assert live("meta", (0,)) == live("cpu", (1,)) == with_the_product


def test_a_sum_of_a_scalar_is_no_sum_of_rows():
    g = _Graph(value=torch.empty(()))
    total = g.sum(g.x, (0,))
    g.mm(total, total)
    assert g.measured().peak == 8


def test_the_input_of_a_collective_lives_until_its_wait():
    g = _Graph(value=_bytes(800))
    start = g.reduce_scatter(g.cos(g.x), "sum", 2, "0", value=_bytes(400))
    g.sin(g.x)
    g.wait(start, value=_bytes(400))
    assert g.live(fused=False) == (0, 800, 1200, 2000, 1200)
    assert g.live(fused=False, clones=True) == (0, 800, 2000, 2800, 2000)


def test_what_is_gathered_together_is_freed_apart():
    g, gathered = _Graph(value=_bytes(400)), [_bytes(800), _bytes(400)]
    together = c10d.all_gather_into_tensor_coalesced.default
    start = g.call(together, [g.x, g.input(_bytes(200))], 2, "0", value=gathered)
    parts = [g.call(operator.getitem, start, i, value=value) for i, value in enumerate(gathered)]
    first, second = (g.wait(part, value=part.meta["val"]) for part in parts)
    used = g.call(aten.sum.default, first, value=_bytes(4))
    g.add(second, used)
    measured = g.measured(fused=False)
    assert measured.live == (0, 0, 1200, 1200, 1200, 1200, 1200, 1204, 804)
    assert measured.gathered == measured.live  # and what is made of it


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


def test_room_on_the_host_in_bytes(monkeypatch, tmp_path):
    limit = tmp_path / "memory.max"
    monkeypatch.setattr(hardware, "_CONTAINER", limit)
    whole = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    assert 0.9 * whole < host_bytes(1.0) <= whole  # two digits of it
    limit.write_text("max\n")
    assert 0.9 * whole < host_bytes(1.0) <= whole
    limit.write_text("1234567890\n")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    assert host_bytes(0.5) == 150e6 and host_bytes("2GB") == 2e9
    with pytest.raises(ValueError, match=r"host_memory must .* fraction of the host's .* '1 pB'"):
        host_bytes("1 pB")


def _gathers(gm):
    return sum(map(is_all_gather, gm.graph.nodes))


def _explain(memory_budget, **sharding):
    graph_plans.clear()
    options = {"executor": "eager", "memory_budget": memory_budget}
    shardc.explain(Stack(3), tokens(0), tokens(1), world_size=4, options=options, **sharding)


def _trials():
    """Has what is tried for a budget noted, in a list."""
    tried, run = [], budget.run_trial
    noting = mock.patch.object(budget, "run_trial", lambda *a: tried.append(run(*a)) or tried[-1])
    return tried, noting


@functools.cache
def _roomy():
    """The bytes of a step that stay, and the peak of the others with all resharded."""
    trials, noting = _trials()
    with noting:
        _explain("1GB")
    return graph_plans[0].static, trials[0].peak


def test_a_trial_has_the_collectives_of_what_runs(monkeypatch):
    """Among others, one gather in the forward of a bucket that the backward gathers among fewer."""
    run, (trials, noting) = [], _trials()

    def seen(gm, ctx):
        if ctx.number is not None:
            run.append(gm)
        return gm

    monkeypatch.setattr(pipeline, "GRAPH_PASSES", [*pipeline.GRAPH_PASSES, seen])
    with noting:
        _explain("1GB", reshard_after_forward=2)
    assert [_gathers(gm) for gm in run] == [4, 4]
    assert {(_gathers(t.forward.gm), _gathers(t.backward.gm)) for t in trials} == {(4, 4)}


def test_a_choice_that_holds_too_much_is_not_taken(monkeypatch):
    """However little its choices are thought to hold."""
    room, peak = sum(_roomy()) + 1, Tradeoff.peak
    monkeypatch.setattr(Tradeoff, "peak", lambda self, choice: peak(self, choice) // 2)
    monkeypatch.setattr(Tradeoff, "fastest", lambda self, room: Choice(0, len(self.buckets)))
    trials, noting = _trials()
    with noting:
        _explain(room)
    assert len(trials) > 3 and max(plan.peak for plan in graph_plans) <= room


def _kept(share):
    """What a budget keeps that has room for a share of the peak with all resharded."""
    static, peak = _roomy()
    kept, choosing = _choices()
    with choosing:
        _explain(static + int(peak * share))
    return kept[-1]


def test_what_holds_least_is_tried_with_gathers_ahead(monkeypatch):
    """However much it is thought to hold."""
    monkeypatch.setattr(Tradeoff, "fastest", lambda self, room: Choice())
    kept = _kept(0.7)
    assert kept.ahead == UNITS_IN_FLIGHT and kept.recomputed


def test_a_choice_that_holds_less_than_was_thought_is_followed_by_a_larger_one(monkeypatch):
    peak = Tradeoff.peak

    def fastest(self, room):
        is_larger = room > self.trial.forward.ctx.budget.room
        return Choice(2 if is_larger else 7, 3)

    monkeypatch.setattr(Tradeoff, "peak", lambda self, choice: int(1.2 * peak(self, choice)))
    monkeypatch.setattr(Tradeoff, "fastest", fastest)
    assert sum(_kept(1.1).recomputes.values()) == 2


def test_a_slow_choice_with_gathers_ahead_is_not_taken(monkeypatch):
    """However fast it is thought to be."""
    monkeypatch.setattr(Tradeoff, "least_seconds", lambda self, room: -self.trial.kept.ahead)
    monkeypatch.setattr(Trial, "seconds", property(lambda self: 1 + self.kept.ahead))
    assert _kept(0.7).ahead == 0


@on_ranks(2)
def test_planned_peak_is_within_a_tenth_of_the_measured_one(mesh, tmp_path):
    model = fully_shard(Gated(4, 64), mesh=mesh, units="auto")
    step, x = compiled(model), torch.randn(8, 32, 64)
    graph_plans.clear()
    step(x).backward()
    model.zero_grad()
    segments = sum(p.to_local().nbytes for p in model.parameters())
    folder = tmp_path / str(mesh.get_local_rank())
    folder.mkdir()
    measured = measured_peak(lambda: step(x).backward(), folder) + 3 * segments
    planned = max(plan.peak for plan in graph_plans)
    assert abs(planned / measured - 1) < 0.1, (planned, measured)


def _choices():
    """Has what each compile keeps noted, in a list."""
    kept = []

    def choose(gm, ctx):
        kept.append(choose_kept(gm, ctx))
        return kept[-1]

    return kept, mock.patch.object(lowering, "choose_kept", choose)


class _Layers(nn.Module):
    """Four of two matmuls each, and a loss."""

    def __init__(self, width=256):
        super().__init__()
        parts = [[nn.Linear(width, width), nn.GELU()] * 2 for _ in range(4)]
        self.layers = nn.ModuleList(nn.Sequential(*map(copy.deepcopy, part)) for part in parts)

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x.square().mean()


def _held(step, model, x):
    """The most bytes that a step holds, segments, states of the optimizer and `x` counted.

    By the account of the second step: the states come after the first one.
    """
    for _ in range(2):
        with Live() as live:
            step(x).backward()
        model.zero_grad()
    return live.peak + graph_plans[-1].static + x.nbytes


@on_ranks(2)
def test_ranks_keep_the_same_gathered_when_sizes_grow(mesh):
    """A copy compiles for other sizes on each rank: none compares anything, all send the same, and
    each computes as much again as it needs."""
    model, (kept, noting) = fully_shard(_Layers(), mesh=mesh, units="auto"), _choices()
    options = {"executor": "eager", "memory_budget": "13.5MB"}
    with noting:
        for rows in (8, (256, 512)[mesh.get_rank()]):
            torch._dynamo.reset()
            copied = copy.deepcopy(model)
            step = torch.compile(copied, backend="shardc", options=options)
            assert _held(step, copied, torch.randn(rows, 256)) <= 13.5e6, rows
    small, large = kept
    assert large.positions == small.positions and large.ahead == small.ahead
    assert small.positions and not small.recomputes
    assert bool(large.recomputes) == (mesh.get_rank() == 1)


@on_ranks(2)
def test_sizes_that_have_grown_too_much_are_refused(mesh):
    """With what ranks keep gathered, for which a small batch has left room."""
    model, memory_budget = fully_shard(_Layers(512), mesh=mesh, units="auto"), "1GB"
    for _ in range(2):
        torch._dynamo.reset()
        graph_plans.clear()
        options = {"executor": "eager", "memory_budget": memory_budget}
        step = torch.compile(model, backend="shardc", options=options, dynamic=False)
        step(torch.ones(8, 512)).backward()
        memory_budget = max(plan.peak for plan in graph_plans) + 1000
    with pytest.raises(Exception, match=r"sizes that have grown.* at least .*kept gathered"):
        step(torch.ones(128, 512))


@on_ranks(2)
def test_a_graph_of_dynamic_sizes_is_compiled_anew_before_it_would_hold_too_much(mesh):
    model, (kept, noting) = fully_shard(_Layers(), mesh=mesh, units="auto"), _choices()
    options = {"executor": "eager", "memory_budget": "13.5MB"}
    step = torch.compile(model, backend="shardc", options=options, dynamic=True)
    compiles = []
    with noting:
        for rows in (8, 64, 512, 16):
            assert _held(step, model, torch.randn(rows, 256)) <= 13.5e6, rows
            compiles.append(len(kept))
    assert compiles == [1, 1, 2, 2]
    assert kept[1].recomputes and kept[1].positions == kept[0].positions
