"""Forward and backward graphs: repeated stretches of compute become calls of one body.

    before:  wait0; a0; b0; c0; ag2; wait1; a1; b1; c1; ag3; wait2; a2; b2; c2
    after:   wait0; call(body, wait0); ag2; wait1; call(body, wait1); ag3; wait2; ...

Inductor compiles a body once, so compile time does not grow with the number of blocks. The pass is
the very last: collectives keep their planned places, outside of bodies, and prefetch crosses the
borders of blocks as before. The trace does not depend on the pass: a model needs no changes, and a
graph without repeats stays as it is.

The price: Inductor fuses no kernel across the border of a call. Therefore `near_readers` first
moves the ops of one kernel between the same collectives. The results of a call have storages of
their own. Views of them are taken outside, because the compiler sees no aliases of such results.
"""

import itertools
import logging
import operator
from collections.abc import Mapping

import torch
from torch.fx import Graph, GraphModule, Node

from shardc.passes.context import PassContext
from shardc.passes.contract import contract
from shardc.passes.nodes import sources_of
from shardc.passes.repeat.near_readers import move_near_readers
from shardc.passes.repeat.repeated_stretches import Stretch, find_repeats
from shardc.passes.rewrite.recompute import is_checkpointed
from shardc.passes.runner import copy_graph
from shardc.runtime import compat

log = logging.getLogger("shardc.passes")
aten, INVOKE = torch.ops.aten, torch.ops.higher_order.invoke_subgraph


@contract(needs="scheduled labels")
def fold_repeats(gm: GraphModule, ctx: PassContext) -> GraphModule:
    """A copy of `gm` in which repeated stretches are calls; `gm` itself if none repeat."""
    folded = _moved(gm, ctx)
    groups = find_repeats(folded)
    twins: dict[Node, Node] = {}
    for number, group in enumerate(groups):
        name = f"repeated_{number}"
        setattr(folded, name, make_body(group[0], twins))
        with folded.graph.inserting_before(group[0].nodes[0]):
            body = folded.graph.get_attr(name)
        for stretch in group:
            twins |= _call(folded.graph, stretch, body, twins)
    _store_what_calls_read(folded.graph)
    calls = sum(map(len, groups))
    log.debug("graph %s: %d stretches became calls of %d bodies", ctx.number, calls, len(groups))
    return folded if groups else gm


def calls_of(gm: GraphModule, ctx: PassContext) -> dict[str, int]:
    """By name of a node of `gm`, the number of the call that will contain the node.

    Nodes outside of calls are absent.
    """
    if ctx.options is None or not ctx.options.folds:
        return {}
    stretches = itertools.chain.from_iterable(find_repeats(_moved(gm, ctx)))
    return {node.name: number for number, each in enumerate(stretches) for node in each.nodes}


def _moved(gm: GraphModule, ctx: PassContext) -> GraphModule:
    """A copy of `gm` in which ops lie near their readers."""
    moved = copy_graph(gm)
    recomputes = bool(ctx.kept.recomputed) or any(map(is_checkpointed, moved.graph.nodes))
    move_near_readers(
        moved,
        anew=ctx.phase == "backward" and recomputes,
        in_order=ctx.options is not None and ctx.options.in_order,
    )
    return moved


def _store_what_calls_read(graph: Graph) -> None:
    """Mark the operands of calls: Inductor stores them where they are computed.

    Without the mark, the blocks before and after the repeated ones compute such an operand anew
    (the sines of rotary embeddings): other kernels, and inputs that live longer than planned.
    """
    for call in graph.find_nodes(op="call_function", target=INVOKE):
        for operand in sources_of(call):
            if operand.op == "call_function":
                compat.store_at_once(operand)


def make_body(stretch: Stretch, twins: Mapping[Node, Node]) -> GraphModule:
    """A stretch as a graph of its own: operands in, results out.

    `twins` gives the replacement of each node in a stretch that is a call already.
    """
    graph = Graph()
    inner: dict[Node, Node] = {}
    for index, operand in enumerate(stretch.operands):
        placeholder = inner[twins.get(operand, operand)] = graph.placeholder(f"operand_{index}")
        placeholder.meta = {"val": operand.meta["val"]}
    for node in stretch.body:
        inner[node] = graph.node_copy(node, inner.__getitem__)
        if node.target is aten.view.default:  # as Inductor does outside: it chooses new strides
            inner[node].target = aten.reshape.default
    graph.output(tuple(inner[result] for result in stretch.results))
    body = GraphModule({}, graph)
    compat.keep_output_strides(body)
    return body


def _call(
    graph: Graph, stretch: Stretch, body: Node, twins: Mapping[Node, Node]
) -> dict[Node, Node]:
    """Replace `stretch` by a call of `body`; return the replacement of each node with readers."""
    operands = [twins.get(operand, operand) for operand in stretch.operands]
    inside, own = set(stretch.nodes), dict[Node, Node]()
    with graph.inserting_after(stretch.nodes[-1]):
        last = call = graph.call_function(INVOKE, (body, str(body.target), *operands))
    call.meta = {"val": tuple(result.meta["val"] for result in stretch.results)}
    for index, result in enumerate(stretch.results):
        with graph.inserting_after(last):
            last = own[result] = graph.call_function(operator.getitem, (call, index))
        last.meta = dict(result.meta)
    for view in dict.fromkeys(view for chain in stretch.views for view in chain):
        with graph.inserting_after(last):
            last = own[view] = graph.node_copy(view, lambda n: own.get(n, n))
    for node, twin in own.items():
        node.replace_all_uses_with(twin, lambda user: user not in inside)
    for node in reversed(stretch.nodes):
        graph.erase_node(node)
    return own
