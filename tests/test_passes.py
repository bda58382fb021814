"""Passes on small graphs, without a process group: exact nodes before and after."""

import warnings
from dataclasses import replace

import pytest
import torch
from torch.fx import Graph, GraphModule
from torch.utils.checkpoint import CheckpointPolicy

from shardc.backend.executor import eager_executor
from shardc.passes.context import PassContext
from shardc.passes.nodes import set_moved
from shardc.passes.rewrite.cut_tail import MOST_COMPUTED, cut_tail
from shardc.passes.rewrite.insert_unshard import insert_unshard, slots_read
from shardc.passes.rewrite.reshard import tag_reshard
from shardc.passes.rewrite.verify import collective_sequence, verify
from shardc.passes.rewrite.wait_once import wait_once
from shardc.passes.runner import copy_graph, run_passes
from shardc.runtime.comm.unshard import pack_gradients, unshard
from shardc.runtime.layout.layout import Param, plan_bucket
from shardc.runtime.layout.spec import Moved, UnshardSpec, intern_spec, spec_of

c10d, aten = torch.ops._c10d_functional, torch.ops.aten


def _signature(reshard=True):
    layout = plan_bucket([Param("w", (4, 4)), Param("b", (4,))], 2)
    return intern_spec(
        UnshardSpec(
            torch.float32, 2, "0", tuple(layout.split_sizes()),
            tuple(slot.shape for slot in layout.slots), (True, True), reshard,
        )
    )  # fmt: skip


def test_gradients_of_frozen_parameters_are_not_sent():
    grads = [torch.ones(4, 4), torch.ones(4)]
    spec = spec_of(_signature())
    assert pack_gradients(grads, spec, None).sum() == 20
    frozen = replace(spec, trainable=(True, False))
    assert pack_gradients(grads, frozen, None).sum() == 16


def _marked(reads):
    graph = Graph()
    segments = [graph.placeholder(name) for name in ("first", "second")]
    outs = [
        graph.call_function(torch.ops.shardc.unshard_slot, (segments[s], _signature(), slot, []))
        for s, slot in reads
    ]
    graph.output(tuple(outs))
    return GraphModule(torch.nn.Module(), graph)


def test_one_unshard_a_bucket_before_its_first_mark():
    ctx = PassContext("dynamo", {1: ("block", 3)})
    gm = run_passes(_marked([(0, 0), (1, 1), (0, 1), (0, 0)]), ctx, [insert_unshard])
    calls = [n for n in gm.graph.nodes if n.op == "call_function"]
    assert [n.target is unshard for n in calls] == [True, False, False, False, True, False]
    assert [n.args[0].name for n in calls] == [
        "first", "unshard", "unshard", "unshard", "second", "unshard_1"
    ]  # fmt: skip
    assert [n.args[1] for n in calls if n.target is unshard] == [
        Moved(_signature(), 0), Moved(_signature(), 1, "block", 3)
    ]  # fmt: skip
    assert slots_read(gm) == {0: frozenset({0, 1}), 1: frozenset({1})}


def test_a_parameter_of_which_only_the_shape_is_read_is_not_gathered():
    gm = _marked([(0, 0), (1, 1)])
    output = gm.graph.output_node()
    output.args = (output.args[0][:1],)
    insert_unshard(gm, PassContext("dynamo"))
    calls = [n for n in gm.graph.nodes if n.op == "call_function"]
    assert [n.args[0].name for n in calls] == ["first", "unshard"]


def test_in_place_update_is_refused():
    gm = _marked([(0, 0)])
    mark = next(n for n in gm.graph.nodes if n.op == "call_function")
    mark.meta["example_value"] = torch.ones(4, 4).mul_(2)
    with pytest.raises(RuntimeError, match=r"parameter of shape \(4, 4\) in place"):
        insert_unshard(gm, PassContext("dynamo"))


def _gathered(reshard=True, save=None, derive=aten.exp.default):
    """segment -> gather -> wait -> view -> exp; behind the result, node `save` is saved."""
    graph = Graph()
    x, segment = graph.placeholder("primals_1"), graph.placeholder("primals_2")
    gather = graph.call_function(c10d.all_gather_into_tensor.default, (segment, 2, "0"))
    set_moved(gather, [Moved(_signature(reshard), 1, "block")])
    wait = graph.call_function(c10d.wait_tensor.default, (gather,))
    view = graph.call_function(aten.view.default, (wait, [4, -1]))
    derived = graph.call_function(derive, (view,))
    out = graph.call_function(aten.mm.default, (x, derived))
    nodes = {"wait": wait, "view": view, "exp": derived, "mm": out}
    graph.output((out, nodes[save]) if save else (out,))
    return GraphModule(torch.nn.Module(), graph)


def test_a_gather_is_waited_for_once():
    gm = _gathered(True)
    (start,) = gm.graph.find_nodes(op="call_function", target=c10d.all_gather_into_tensor.default)
    (wait,) = start.users
    with gm.graph.inserting_before(gm.graph.output_node()):
        again = gm.graph.call_function(c10d.wait_tensor.default, (start,))
        gm.graph.call_function(aten.cos.default, (again,))
    run_passes(gm, PassContext("forward"), [wait_once])
    assert list(start.users) == [wait]
    (cos,) = gm.graph.find_nodes(op="call_function", target=aten.cos.default)
    assert cos.args == (wait,)


@pytest.mark.parametrize("reshard", [True, False])
def test_tags(reshard):
    gm = run_passes(_gathered(reshard), PassContext("joint"), [tag_reshard])
    tags = {n.name: n.meta.get("recompute") for n in gm.graph.nodes if n.op == "call_function"}
    again, keep = CheckpointPolicy.MUST_RECOMPUTE, CheckpointPolicy.MUST_SAVE
    assert tags == {
        "all_gather_into_tensor_default": again if reshard else None,
        "wait_tensor_default": again if reshard else keep,
        "view_default": again,
        "exp_default": again if reshard else None,
        "mm_default": None,
    }


def test_what_is_drawn_for_a_weight_is_not_drawn_again():
    gm = run_passes(_gathered(derive=aten.rand_like.default), PassContext("joint"), [tag_reshard])
    tags = {n.name: n.meta.get("recompute") for n in gm.graph.nodes if n.op == "call_function"}
    assert tags["view_default"] == CheckpointPolicy.MUST_RECOMPUTE
    assert tags["rand_like_default"] is None


def test_verify():
    ctx = PassContext("forward", results=1)
    run_passes(_gathered(), ctx, [verify])
    run_passes(_gathered(save="mm"), ctx, [verify])
    for name in ("wait", "view", "exp"):
        run_passes(_gathered(reshard=False, save=name), ctx, [verify])
        run_passes(_gathered(save=name), PassContext("forward"), [verify])  # no backward: a result
        with pytest.raises(AssertionError, match=f"block is resharded .*, as '{name}_"):
            run_passes(_gathered(save=name), ctx, [verify])
    gm = _gathered()
    gather = next(n for n in gm.graph.nodes if "all_gather" in n.name)
    gm.graph.output_node().args = ((gather,),)
    with pytest.raises(AssertionError, match="must be read by one wait only"):
        run_passes(gm, ctx, [verify])
    assert collective_sequence(_gathered()) == [
        "block: all_gather_into_tensor of 32 float32 over 2 ranks (4x4 4)"
    ]


def test_a_copy_of_a_graph_with_nested_inputs_warns_of_nothing():
    class Sum(torch.nn.Module):
        def forward(self, pair):
            return pair[0] + pair[1]

    pair = (torch.fx.PH, torch.fx.PH)
    gm = torch.fx.symbolic_trace(Sum(), concrete_args={"pair": pair})
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        copied = copy_graph(gm)
    x, y = torch.randn(2, 3)
    assert torch.equal(copied((x, y)), x + y)
    copied.graph.set_codegen(torch.fx.graph.CodeGen())  # which leaves the first one as it was
    assert torch.equal(torch.fx.GraphModule(gm, gm.graph)((x, y)), x + y)


def _backward(moved, last=None, more=0):
    """A backward that ends with the wait for the reduction of a sum, and maybe an op behind it."""
    graph = Graph()
    first, second = graph.placeholder("first"), graph.placeholder("second")
    sent = graph.call_function(aten.add.Tensor, (first, second))
    start = graph.call_function(c10d.reduce_scatter_tensor.default, (sent, "sum", 2, "0"))
    set_moved(start, moved)
    wait = graph.call_function(c10d.wait_tensor.default, (start,))
    halved = graph.call_function(aten.mul.Tensor, (wait, 0.5))
    for _ in range(more):
        halved = graph.call_function(aten.neg.default, (halved,))
    others = [] if last is None else [graph.call_function(last, (first,))]
    graph.output((halved, None, second, *others))
    return GraphModule(torch.nn.Module(), graph)


def test_a_tail_has_the_last_waits_and_the_head_keeps_what_is_sent():
    moved = (Moved("layer", spec_of(_signature())),)
    head, tail = cut_tail(_backward(moved))
    (results,) = head.graph.output_node().args
    names = [node.name for node in results]
    assert names == ["reduce_scatter_tensor_default", "second", "add_tensor"]
    reduced, passed, sent = torch.ones(1), torch.zeros(2), torch.ones(2)
    halved, *others = eager_executor(tail.module)([reduced, passed, sent])
    assert halved == 0.5 and others == [None, passed]

    assert cut_tail(_backward(moved, more=MOST_COMPUTED - 1))[1] is not None
    computes, of_no_bucket = _backward(moved, aten.neg.default), _backward(())
    for gm in (computes, of_no_bucket, _backward(moved, more=MOST_COMPUTED)):
        same, nothing = cut_tail(gm)
        assert same is gm and nothing is None
    head, tail = cut_tail(_backward(moved, aten.t.default))
    assert tail is not None and "t_default" in [node.name for node in head.graph.nodes]
