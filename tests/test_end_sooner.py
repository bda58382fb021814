"""The end of a backward: compute that the last reductions need comes in the order that ends sooner.

Decisions on plain figures, small graphs, and models whose gradients must keep their bits.
"""

import functools
from dataclasses import replace
from unittest import mock

import pytest
import torch
from models import QUICK, Stack, seeded, tokens
from ranks import on_ranks
from torch.fx import Graph, GraphModule

import shardc
from shardc import fully_shard
from shardc.passes import pipeline
from shardc.passes.context import Budget, PassContext, ScheduleOptions
from shardc.passes.estimate.hardware import Link, set_profile
from shardc.passes.nodes import kind_of, moved_by, set_moved
from shardc.passes.schedule import end_sooner as module
from shardc.passes.schedule.end_sooner import end_of, end_sooner, plan_order
from shardc.runtime.layout.spec import Moved, UnshardSpec, intern_spec
from shardc.sharding import unit_plan

c10d, aten = torch.ops._c10d_functional, torch.ops.aten

WIRE = replace(QUICK, name="wire", inside=Link(0.0, 1e6), across=Link(0.0, 1e6), message=0.0)
FAST = replace(WIRE, name="fast", inside=Link(0.0, 1e12), across=Link(0.0, 1e12))


# -- deciding ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("work", "sent", "order"),
    [
        ({(0,): 5, (1,): 5}, [4, 2], (0, 1)),  # the shortest lies open
        ({(0,): 5, (1,): 5}, [2, 4], (1, 0)),
        ({(0,): 5, (0, 1): 5, (1,): 1}, [6, 9], (1, 0)),  # the longer one needs less
        ({(0,): 5, (0, 1): 5}, [6, 2], (1, 0)),
        ({(0,): 5, (1, 2): 5, (2,): 1}, [3, 9, 1], (1, 0, 2)),
        ({(0,): 5, (1,): 5, (): 20}, [2, 4], (0, 1)),  # all are sent behind the rest
    ],
)
def test_the_order_that_ends_soonest(work, sent, order):
    assert plan_order({frozenset(needs): s for needs, s in work.items()}, sent) == order


def test_the_wire_sends_one_after_the_other():
    assert end_of([1, 2, 9], [4, 1, 2], 9) == 11
    assert end_of([1, 2, 9], [4, 1, 2], 9, speed=0.5) == 20
    assert end_of([1], [2], 9) == 9


# -- small graphs --------------------------------------------------------------------------------


def _graph(outputs, inputs, change=None):
    """The gradients of a layer's weight (outputs, 8) and of the table (inputs, 8) that it reads.

    `change` is an op on the gradient of what the layer reads.
    """
    graph = Graph()
    grad, saved, weight = (graph.placeholder(name) for name in ("grad", "saved", "weight"))
    shapes = ((outputs, inputs), (inputs, 8), (outputs, 8))
    for node, shape in zip((grad, saved, weight), shapes, strict=True):
        node.meta["val"] = torch.empty(shape, device="meta")

    def call(target, *args):
        node = graph.call_function(target, args)
        given = [a.meta["val"] if hasattr(a, "meta") else a for a in args]
        node.meta["val"] = target(*given)
        return node

    def reduce(gradient, name, position):
        value = gradient.meta["val"]
        pieces, shapes = ((value.numel(), 0),), (tuple(value.shape),)
        spec = UnshardSpec(value.dtype, 2, "0", pieces, shapes, (True,))
        flat = call(aten.view.default, gradient, [-1])
        start = graph.call_function(c10d.reduce_scatter_tensor.default, (flat, "sum", 2, "0"))
        start.meta["val"] = torch.empty(value.numel() // 2, device="meta")
        set_moved(start, [Moved(intern_spec(spec), position, name, position)])
        wait = graph.call_function(c10d.wait_tensor.default, (start,))
        wait.meta["val"] = start.meta["val"]
        return wait

    columns = call(aten.permute.default, grad, [1, 0])
    into = call(aten.mm.default, columns, weight)
    if change is not None:
        into = call(change, into)
    of_weight = call(aten.mm.default, grad, saved)
    of_table = call(aten.add.Tensor, into, 1.0)
    waits = [reduce(of_weight, "weight", 0), reduce(of_table, "table", 1)]
    graph.output(tuple(waits))
    for node, name in ((into, "d_input"), (of_weight, "d_weight"), (of_table, "d_table")):
        node.name = name
    gm = GraphModule({}, graph)
    gm.recompile()
    return gm


def _context(**changes):
    changes = {"options": ScheduleOptions(WIRE), "number": None, **changes}
    return PassContext("backward", **changes)


def _order(gm):
    """The compute and the reductions of a graph, in order."""
    found = []
    for node in gm.graph.nodes:
        if kind_of(node) == "reduce_scatter":
            found.append(f"send {moved_by(node)[0].label}")
        elif node.name.startswith("d_"):
            found.append(node.name)
    return found


AS_TRACED = ["d_input", "d_weight", "d_table", "send weight", "send table"]
WEIGHT_FIRST = ["d_weight", "send weight", "d_input", "d_table", "send table"]
TABLE_FIRST = ["d_input", "d_table", "send table", "d_weight", "send weight"]


@pytest.fixture
def roomy():
    """Memory peaks before the end: the small graphs are nothing but an end."""
    with mock.patch.object(module, "_peak", return_value=0):
        yield


@pytest.mark.parametrize(("sizes", "order"), [((256, 32), WEIGHT_FIRST), ((32, 256), TABLE_FIRST)])
def test_the_longer_reduction_goes_behind_compute(roomy, sizes, order):
    gm = _graph(*sizes)
    assert _order(gm) == AS_TRACED
    nodes = len(gm.graph.nodes)
    assert _order(end_sooner(gm, _context())) == order
    gm.graph.lint()
    assert len(gm.graph.nodes) == nodes


def test_what_must_keep_its_place_bounds_the_end(roomy):
    """Random numbers are drawn in the order of the trace: no weight moves before them."""
    gm = _graph(256, 32, change=aten.bernoulli.default)
    assert _order(end_sooner(gm, _context())) == TABLE_FIRST


@pytest.mark.parametrize(
    "changes",
    [
        {"phase": "forward"},
        {"options": None},
        {"budget": Budget(10**9, 0)},
        {"options": ScheduleOptions(FAST)},
    ],
    ids=["forward", "unscheduled", "budget", "nothing to gain"],
)
def test_graphs_that_are_kept(roomy, changes):
    gm = _graph(256, 32)
    assert _order(end_sooner(gm, replace(_context(), **changes))) == AS_TRACED


@pytest.mark.parametrize(
    ("after", "order"),
    [
        ((9.0, 9.0, 10.1, 10.1), WEIGHT_FIRST),  # a little longer where the wire is busy
        ((9.9, 9.9, 10.2, 10.2), AS_TRACED),  # longer on average
        ((8.0, 10.0, 9.0, 9.0), AS_TRACED),  # no shorter at the modelled speed
    ],
)
def test_shorter_as_modelled_and_on_average(roomy, after, order):
    with mock.patch.object(module, "_seconds", side_effect=[[10.0] * 4, list(after)]):
        assert _order(end_sooner(_graph(256, 32), _context())) == order


def test_memory_peaks_no_higher():
    """The gradient of the weight is held beside all that the gradient of the input needs."""
    assert _order(end_sooner(_graph(256, 32), _context())) == AS_TRACED


def test_ranks_reorder_only_what_all_of_them_would(roomy):
    said = []

    def agree(what, facts, choice, notes):
        said.append((facts(False), choice))
        return frozenset(notes)

    def order(notes, profile=WIRE):
        context = _context(
            options=ScheduleOptions(profile),
            agree_on_choice=functools.partial(agree, notes=notes),
        )
        return _order(end_sooner(_graph(256, 32), context))

    assert order(["[0, 1]"]) == WEIGHT_FIRST
    assert order(["[0, 1]", "null"]) == order(["[0, 1]", "[1, 0]"]) == AS_TRACED
    assert order(["[0, 1]"], FAST) == WEIGHT_FIRST  # as all ranks did when they compiled first
    assert [choice for _, choice in said] == ["[0, 1]", "[0, 1]", "[0, 1]", "null"]
    assert [len(facts) for facts, _ in said] == [3] * 4  # the options, and both reductions


# -- on ranks ------------------------------------------------------------------------------------


def _batch(seed):
    shape = (8, 16)  # activations hold more than parameters, so memory peaks early
    return {"tokens": tokens(seed, shape), "targets": tokens(seed + 1, shape)}


def _trained(mesh, executor, passes):
    """The report, the order of reductions, and the gradients of a sharded Stack."""
    torch._dynamo.reset()
    compute, link = (("float32", 4e9),), Link(0.0, 2e7)
    slow = replace(WIRE, flops=compute, inside=link, across=link, host_bandwidth=1e10)
    set_profile(slow)
    with mock.patch.object(unit_plan, "_LARGE", 1):  # the model has the vectors of blocks
        model = fully_shard(seeded(lambda: Stack(3)), mesh=mesh, units="auto")
    set_profile(None)
    options = {"executor": executor, "profile": slow}
    passes = [*passes, lambda gm, ctx: gm]  # of a test: no code of another test is loaded
    with mock.patch.object(pipeline, "GRAPH_PASSES", passes):
        step = torch.compile(model, backend="shardc", options=options, fullgraph=True)
        step(**_batch(0)).backward()
    report = shardc.report(step)
    sent = [row.buckets for row in report.collectives if row.kind.startswith("reduce_scatter")]
    return report, sent, [p.grad.to_local() for p in model.parameters()]


@pytest.mark.parametrize("executor", ["eager", "inductor"])
@on_ranks(2)
def test_less_lies_open_and_gradients_keep_their_bits(mesh, executor):
    without = [step for step in pipeline.GRAPH_PASSES if step is not end_sooner]
    before, sent_before, want = _trained(mesh, executor, without)
    after, sent, got = _trained(mesh, executor, list(pipeline.GRAPH_PASSES))
    assert sent != sent_before
    assert after.exposed_seconds < before.exposed_seconds
    assert after.step_seconds < before.step_seconds
    assert after.peak.total <= before.peak.total
    assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))
    assert any(grad.any() for grad in got)
