"""Order, messages and memory of compiled steps, on small graphs and on ranks."""

import json
import os
import re
from dataclasses import replace
from unittest import mock

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from models import QUICK, Stack, check_parity, compiled, seeded, tokens
from ranks import on_ranks
from torch.fx import Graph, GraphModule

import shardc
from shardc import fully_shard, units_of
from shardc.backend.agreements import Agreements
from shardc.backend.executor import eager_executor
from shardc.backend.graph_plan import graph_plans
from shardc.passes.context import PassContext, ScheduleOptions
from shardc.passes.estimate.hardware import Link, set_profile
from shardc.passes.nodes import is_collective, is_wait, kind_of, set_moved
from shardc.passes.rewrite.verify import verify
from shardc.passes.rewrite.write_gradients import write_gradients
from shardc.passes.schedule.coalesce import coalesce
from shardc.passes.schedule.events import read_events, read_problem
from shardc.passes.schedule.schedule import schedule
from shardc.runtime import compat
from shardc.runtime.layout.spec import Moved, UnshardSpec, intern_spec
from shardc.sharding import unit_plan

c10d, aten = torch.ops._c10d_functional, torch.ops.aten

SLOW_WIRE = shardc.Profile(
    "slow wire", "made up", (("float32", 1e9),), 1e9, 1e9, 1, Link(1e-6, 1e8), Link(1e-6, 1e8)
)


def _signature(numel, world):
    pieces = ((numel, 0),)
    return intern_spec(UnshardSpec(torch.float32, world, "0", pieces, ((numel,),), (True,)))


def _graph(reads, world=2):
    """Step i reads bucket `reads[i]`, or reduces a gradient for bucket -1 - reads[i]."""
    graph, segments, last, grads = Graph(), {}, None, {}
    keys = sorted({read if read >= 0 else -1 - read for read in reads})
    for key in keys:
        segments[key] = graph.placeholder(f"primals_{key + 1}")
        segments[key].meta["val"] = torch.empty(8 * (key + 1), device="meta")
    x = last = graph.placeholder("x")
    x.meta["val"] = torch.empty(4, 8, device="meta")

    def call(target, args, val, moved=None):
        node = graph.call_function(target, args)
        node.meta["val"] = val
        if moved:
            set_moved(node, [moved])
        return node

    full = {}
    for read in reads:
        key = read if read >= 0 else -1 - read
        numel = 8 * (key + 1) * world
        whole, part = torch.empty(numel, device="meta"), segments[key].meta["val"]
        name = Moved(_signature(numel, world), key, str(key), key)
        if read >= 0:
            if key not in full:
                gathered = segments[key], world, "0"
                start = call(c10d.all_gather_into_tensor.default, gathered, whole, name)
                full[key] = call(c10d.wait_tensor.default, (start,), whole)
            weight = call(aten.view.default, (full[key], [-1, 8]), whole.view(-1, 8))
            total = call(aten.sum.dim_IntList, (weight, [0]), whole.view(-1, 8).sum(0))
            last = call(aten.add.Tensor, (last, total), x.meta["val"])
        elif key not in grads:
            summed = call(aten.sum.dim_IntList, (last, [0]), torch.empty(8, device="meta"))
            wide = call(aten.expand.default, (summed, [numel // 8, 8]), whole.view(-1, 8))
            packed = [wide], [numel], torch.float32
            pack = call(torch.ops.shardc.pack.default, packed, whole, name)
            start = call(c10d.reduce_scatter_tensor.default, (pack, "sum", world, "0"), part, name)
            grads[key] = call(c10d.wait_tensor.default, (start,), part)
    graph.output((last, *grads.values()))
    gm = GraphModule(torch.nn.Module(), graph)
    return gm, PassContext("backward", options=ScheduleOptions(SLOW_WIRE))


def _local(gm):
    """`gm` with collectives of one process: gathers repeat, reductions take the first part."""
    collectives = {
        c10d.all_gather_into_tensor.default: lambda s, w, g: s.repeat(w),
        c10d.all_gather_into_tensor_coalesced.default: lambda s, w, g: [t.repeat(w) for t in s],
        c10d.reduce_scatter_tensor.default: lambda t, op, w, g: t[: t.numel() // w],
        c10d.reduce_scatter_tensor_coalesced.default: lambda ts, op, w, g: [
            t[: t.numel() // w] for t in ts
        ],
        c10d.wait_tensor.default: lambda t: t,
    }
    for node in gm.graph.nodes:
        node.target = collectives.get(node.target, node.target)
    return gm


def _run(gm):
    torch.manual_seed(0)
    inputs = [torch.randn(n.meta["val"].shape) for n in gm.graph.find_nodes(op="placeholder")]
    return eager_executor(gm)(inputs)


READS = st.lists(st.integers(-6, 5), min_size=1, max_size=24)


@given(READS)
@settings(max_examples=60, deadline=None)
def test_random_graphs_keep_their_results_and_their_limits(reads):
    gm, ctx = _graph(reads)
    want = _run(_local(_graph(reads)[0]))
    for step in (coalesce, schedule, write_gradients, verify):
        gm = step(gm, ctx)
        gm.graph.lint()
    _check_in_flight(gm, ctx)
    for one, other in zip(_run(_local(gm)), want, strict=True):
        assert torch.equal(one, other)


def _check_in_flight(gm, ctx):
    """At no node are more bytes under way or unread than the limit, unless it is one message."""
    events = read_events(gm)
    limit = read_problem(gm, ctx, events).in_flight.get("gather", 0)
    nodes = list(gm.graph.nodes)
    spans = []
    for gather in events.of("gather"):
        views = [n for n in gather.after if not is_wait(n)]
        reads = [nodes.index(u) for v in views for u in v.users if u not in gather.after]
        values = gather.start.meta["val"]
        values = values if isinstance(values, list) else [values]
        size = sum(value.nbytes for value in values)
        spans.append((nodes.index(gather.start), min(reads, default=len(nodes)), size))
    for index in range(len(nodes)):
        held = [size for start, read, size in spans if start <= index < read]
        assert sum(held) <= limit or len(held) == 1


def test_collectives_of_other_groups_are_not_merged():
    def sent(*groups):
        gm, ctx = _graph([0, 1, 2, 3, 4, 5, -6, -5, -4, -3, -2, -1])
        for target in (c10d.all_gather_into_tensor.default, c10d.reduce_scatter_tensor.default):
            for index, start in enumerate(gm.graph.find_nodes(op="call_function", target=target)):
                start.args = (*start.args[:-1], groups[index % len(groups)])
        return sum(map(is_collective, coalesce(gm, ctx).graph.nodes))

    assert sent("0") < 12 == sent("0", "1")


def test_order_of_a_small_graph():
    gm, ctx = _graph([0, 1, 2, -3, -2, -1])
    names = [n.name for n in schedule(gm, ctx).graph.nodes if is_collective(n) or is_wait(n)]
    gather, wait = "all_gather_into_tensor_default", "wait_tensor_default"
    reduce = "reduce_scatter_tensor_default"
    assert names == [
        gather, f"{gather}_1", f"{gather}_2",  # the wire is slow: all at once, within the limit
        wait, f"{wait}_1", f"{wait}_2",
        reduce, f"{reduce}_1", f"{reduce}_2", f"{wait}_3", f"{wait}_4", f"{wait}_5",
    ]  # fmt: skip


def test_two_of_the_largest_units_may_be_under_way():
    gm, ctx = _graph([0, 1, 2, 3])  # of 1, 2, 3 and 4 times the bytes
    sent = [n for n in schedule(gm, ctx).graph.nodes if is_collective(n) or is_wait(n)]
    kinds = [kind_of(n) or "wait" for n in sent]
    assert kinds == ["all_gather"] * 3 + ["wait"] * 2 + ["all_gather"] + ["wait"] * 2


def test_a_schedule_plans_with_the_seconds_that_ranks_agree_on():
    gm, ctx = _graph([0, 1, 2])
    assert set(read_problem(gm, ctx, read_events(gm)).seconds) != {7.0}
    ctx = replace(ctx, agree_on_seconds=lambda facts, seconds: [7.0] * len(seconds))
    assert set(read_problem(gm, ctx, read_events(gm)).seconds) == {7.0}


def _called(graph, op, *operands, shape):
    node = graph.call_function(op, operands)
    node.meta["val"] = torch.empty(shape)
    return node


def _packed(graph, parts, sizes, dtype=torch.float32, more=()):
    """A graph that packs gradients, and returns that and `more`."""
    pack = graph.call_function(torch.ops.shardc.pack.default, (parts, sizes, dtype))
    pack.meta["val"] = torch.empty(sum(sizes), dtype=dtype)
    graph.output((pack, *more))
    return GraphModule(torch.nn.Module(), graph)


def test_matmuls_write_into_the_buffer_that_is_reduced():
    graph = Graph()
    a, b, c = (graph.placeholder(name) for name in "abc")
    left = _called(graph, aten.mm.default, a, b, shape=(4, 3))
    total = _called(graph, aten.sum.dim_IntList, c, [0], shape=5)
    right = _called(graph, aten.mm.default, c, c, shape=(5, 5))
    gm = _packed(graph, [right, left, None, total, None], [25, 12, 4, 5, 3])
    inputs = [torch.randn(4, 2), torch.randn(2, 3), torch.randn(5, 5)]
    (want,) = eager_executor(gm)(list(inputs))
    gm = write_gradients(gm, PassContext("backward"))
    assert [n.target for n in gm.graph.nodes if n.op == "call_function"] == [
        torch.ops.shardc.first_matmul.default,
        aten.sum.dim_IntList,
        torch.ops.shardc.write_matmul.default,
        torch.ops.shardc.write_parts.default,
    ]
    (got,) = eager_executor(gm)(list(inputs))
    assert torch.equal(got, want) and not got[37:41].any() and not got[46:].any()


def test_gradients_without_matmuls_stay_packed():
    graph = Graph()
    a, b = (graph.placeholder(name) for name in "ab")
    a.meta["val"], b.meta["val"] = torch.empty(3), torch.empty(2, 4)
    gm = _packed(graph, [a, None, b], [3, 5, 8], torch.bfloat16)
    gm = write_gradients(gm, PassContext("backward"))
    inputs = [torch.randn(3), torch.randn(4, 2).t()]
    (got,) = eager_executor(gm)(list(inputs))
    want = torch.cat([inputs[0], torch.zeros(5), inputs[1].flatten()])
    assert torch.equal(got, want.bfloat16())


def test_a_gradient_that_others_read_is_copied_into_the_buffer():
    graph = Graph()
    a, b = (graph.placeholder(name) for name in "ab")
    products = [_called(graph, aten.mm.default, a, b, shape=(4, 3)) for _ in range(2)]
    gm = _packed(graph, products, [12, 12], more=products[1:])
    gm = write_gradients(gm, PassContext("backward"))
    inputs = [torch.randn(4, 2), torch.randn(2, 3)]
    flat, other = eager_executor(gm)(list(inputs))
    want = inputs[0] @ inputs[1]
    assert torch.equal(other, want) and torch.equal(flat, want.flatten().repeat(2))


# -- on ranks ------------------------------------------------------------------------------------


def _batch(seed, length=7):
    x = tokens(seed, (2, length))
    return {"tokens": x, "targets": x}


def _planned(mesh, run, **options):
    """The plans that compiling and running a sharded Stack leaves, and its gradients."""
    graph_plans.clear()
    model = fully_shard(seeded(lambda: Stack(blocks=4)), mesh=mesh, units="auto")
    step = torch.compile(model, backend="shardc", options={"executor": "eager", **options})
    run(model, step)
    return list(graph_plans), [p.grad.to_local() for p in model.parameters()]


def _backward(model, step):
    step(**_batch(0)).backward()


@on_ranks(2)
def test_scheduled_results_are_bitwise_those_of_the_unscheduled_graph(mesh):
    set_profile(SLOW_WIRE)
    (forward, backward), got = _planned(mesh, _backward)
    (plain_forward, plain_backward), want = _planned(mesh, _backward, schedule=False)
    set_profile(None)
    assert forward.order != plain_forward.order  # the two sides differ
    assert backward.order != plain_backward.order
    assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))


@on_ranks(2)
def test_units_are_split_and_merged_and_train_as_before(mesh):
    set_profile(QUICK)
    plain, sharded = seeded(Stack), seeded(Stack)
    fully_shard(sharded, mesh=mesh, units="auto")
    set_profile(None)
    buckets = [len(m._shardc_unit.buckets) for m in units_of(sharded).values()]
    assert buckets == [2, 2, 2]  # embedding and head; up with the vectors, and down
    options = {"executor": "eager", "profile": QUICK, "coalesce": True}
    step = torch.compile(sharded, backend="shardc", options=options, fullgraph=True)
    check_parity(plain, sharded, step, _batch, mesh)
    coalesced = [line for plan in graph_plans for line in plan.collectives if " and " in line]
    assert coalesced and all("coalesced" in line for line in coalesced)


@pytest.mark.parametrize("executor", ["eager", "inductor"])
@on_ranks(2)
def test_what_stays_gathered_may_travel_with_what_does_not(mesh, executor):
    far = replace(QUICK, name="far", message=1e-3)
    set_profile(QUICK)
    with mock.patch.object(unit_plan, "_LARGE", 1):  # so that the model has the blocks' vectors
        plain, sharded = seeded(Stack), fully_shard(seeded(Stack), mesh=mesh, units="auto")
    set_profile(None)
    settings = [unit._shardc_unit.buckets[0].settings for unit in units_of(sharded).values()]
    assert [each.reshard_after_forward for each in settings] == [False, True, True]
    options = {"executor": executor, "profile": far, "coalesce": True}
    step = torch.compile(sharded, backend="shardc", options=options, fullgraph=True)
    graph_plans.clear()
    check_parity(plain, sharded, step, _batch, mesh)
    forward = next(iter(graph_plans)).collectives
    assert any(line.startswith("layers.1[1]+Stack[2]: all_gather") for line in forward), forward


@on_ranks(2)
def test_ranks_with_other_shapes_plan_the_same(mesh):
    rank = mesh.get_local_rank()

    def run(model, step):
        step(**_batch(rank, length=5 + 40 * rank)).backward()
        step(**_batch(rank, length=9 + 40 * rank)).backward()  # compiles for any length
        step(**_batch(rank, length=1 + 10 * rank)).backward()  # rank 0 compiles alone

    plans, _ = _planned(mesh, run)
    texts = ["\n".join(plan.collectives) for plan in plans[:4]]
    gathered = [None] * mesh.size()
    torch.distributed.all_gather_object(gathered, texts)
    assert gathered[0] == gathered[1] and all(texts)


@pytest.mark.parametrize("options", [{"prefetch": 0}, {"backward_prefetch": None}], ids=str)
@on_ranks(2)
def test_prefetch_options(mesh, options):
    plain, sharded = seeded(Stack), fully_shard(seeded(Stack), mesh=mesh, units="auto")
    step = torch.compile(sharded, backend="shardc", options={"executor": "eager", **options})
    check_parity(plain, sharded, step, _batch, mesh, steps=1)


@on_ranks(2)
def test_hints_groups_and_buffers(mesh):
    plain = seeded(lambda: Stack(blocks=3))
    sharded = fully_shard(seeded(lambda: Stack(blocks=3)), mesh=mesh, units="auto")
    step = compiled(sharded)
    check_parity(plain, sharded, step, _batch, mesh, steps=1)
    graph_plans.clear()
    first, second, third = sharded.layers
    sharded.set_modules_to_forward_prefetch([third])
    third.set_modules_to_backward_prefetch([second, first])
    sharded.set_reduce_scatter_max_input_buffers(1)
    sharded.set_separate_reduce_scatter_group()
    sharded.set_separate_all_gather_group()
    check_parity(plain, sharded, step, _batch, mesh, steps=1)
    assert len(graph_plans) == 2  # compiled anew, once
    buckets = [b for m in units_of(sharded).values() for b in m._shardc_unit.buckets]
    groups = {bucket.key.code.reduction.group for bucket in buckets}
    assert len(groups) == 1 and None not in groups
    sharded.set_separate_reduce_scatter_group(False)
    code = first._shardc_unit.buckets[0].key.code
    assert code.reduction.group == compat.group_name(mesh.get_group()) != code.group
    sharded.set_separate_all_gather_group(False)
    assert first._shardc_unit.buckets[0].key.code.reduction.group is None
    shardc.share_comm_ctx([first, second])


@on_ranks(2)
def test_memory_budget(mesh):
    (_, resharded), want = _planned(mesh, _backward)
    (_, roomy), got = _planned(mesh, _backward, memory_budget="1GB")
    gathers = [sum("all_gather" in c for c in p.collectives) for p in (resharded, roomy)]
    assert gathers[0] > 0 and gathers[1] == 0
    assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))


@on_ranks(2)
def test_ranks_keep_what_the_tightest_of_them_can(mesh):
    asked = []

    def tight(self, group, what, facts, choice):
        ahead, positions, *others = json.loads(choice)
        asked.append(positions)  # another rank has room for one bucket only
        return frozenset([choice, json.dumps([ahead, positions[:1], *others])])

    with mock.patch.object(Agreements, "choices", tight):
        (_, backward), _ = _planned(mesh, _backward, memory_budget="1GB")
    gathers = sum("all_gather" in line for line in backward.collectives)
    assert gathers == len(asked[0]) - 1 > 0, (asked, backward.collectives)


@on_ranks(2)
def test_an_explicit_reshard_wins_over_the_budget(mesh):
    model = seeded(Stack)
    fully_shard(model.layers[0], mesh=mesh, reshard_after_forward=True)
    fully_shard(model.layers[1], mesh=mesh)
    fully_shard(model, mesh=mesh)
    graph_plans.clear()
    step = torch.compile(
        model, backend="shardc", options={"executor": "eager", "memory_budget": "1GB"}
    )
    step(**_batch(0)).backward()
    (_, backward) = graph_plans
    assert sum("all_gather" in line for line in backward.collectives) == 1


@on_ranks(2)
def test_calibrate(mesh, tmp_path):
    once = mock.patch("shardc.calibration._ROUNDS", 1)
    with mock.patch.dict(os.environ, XDG_CACHE_HOME=str(tmp_path)):
        profile, kept = shardc.calibrate(mesh), shardc.calibrate(mesh)
        with once:
            refreshed = shardc.calibrate(mesh, refresh=True)
    set_profile(None)
    assert profile.source == "calibrate()" and profile.peak(torch.float32) > 1e8
    assert 1e6 < profile.inside.bandwidth < 1e13
    everywhere = [None] * mesh.size()
    torch.distributed.all_gather_object(everywhere, profile)
    assert everywhere[0] == everywhere[1] == kept != refreshed


@on_ranks(2)
def test_inductor_keeps_the_planned_order_and_copies_no_weight(mesh):
    from torch._inductor.utils import run_and_get_code

    set_profile(SLOW_WIRE)
    model = fully_shard(seeded(lambda: Stack(blocks=3)), mesh=mesh, units="auto")
    step = compiled(model, executor="inductor")
    graph_plans.clear()
    _, codes = run_and_get_code(lambda: step(**_batch(0)).backward())
    set_profile(None)
    pattern = re.compile(r"_c10d_functional\.(all_gather|reduce_scatter|wait)_\w+\.\w+\(")
    for plan, code in zip(graph_plans, codes, strict=True):
        found = [match[1] for match in pattern.finditer(code)]
        in_tail = 2 if plan.phase == "backward" else 0
        assert [*found, *["wait"] * in_tail] == plan.order, (found, plan.order)
        allocated = re.findall(r"= empty_strided_cpu\(\((\d+), (\d+)\)", code)
        assert allocated  # it is what the pattern looks for
        assert not {("37", "18"), ("18", "37")} & set(allocated)  # no block's weight or gradient
