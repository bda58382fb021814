"""Forward and backward graphs: what repeats from block to block becomes one body, called often.

    before:  wait0; a0; b0; c0; ag2; wait1; a1; b1; c1; ag3; wait2; a2; b2; c2
    after:   wait0; call(body, wait0); ag2; wait1; call(body, wait1); ag3; wait2; ...

Inductor compiles a body once, so the time it takes stops growing with the number of blocks. It is
the very last pass: collectives stay where they were planned, outside of bodies, and so prefetch
across the border of a block is what it was. The trace does not depend on it: it needs no changes
to the model, and a graph without repeats stays as it is.

The price: no kernel is fused across the border of a call, so what would be one kernel is brought
between the same collectives before (`near_readers`). What a call gives is memory of its own; views
are taken anew outside, because the compiler does not see that a call's result aliases.
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
from shardc.passes.repeat.repeated_stretches import Stretch, ends_no_stretch, find_repeats
from shardc.passes.rewrite.recompute import is_checkpointed
from shardc.passes.runner import copy_graph
from shardc.runtime import compat

log = logging.getLogger("shardc.passes")
aten, INVOKE = torch.ops.aten, torch.ops.higher_order.invoke_subgraph


@contract(needs="scheduled labels")
def fold_repeats(gm: GraphModule, ctx: PassContext) -> GraphModule:
    """A copy of `gm` in which stretches that repeat are calls; `gm` itself where none do."""
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
    """The number of the call that each node of `gm` comes to lie in, by its name.

    Nodes outside of calls have none.
    """
    if ctx.options is None or not ctx.options.folds:
        return {}
    stretches = itertools.chain.from_iterable(find_repeats(_moved(gm, ctx)))
    return {node.name: number for number, each in enumerate(stretches) for node in each.nodes}


def _moved(gm: GraphModule, ctx: PassContext) -> GraphModule:
    """A copy of `gm` in which ops lie near what reads them."""
    moved = copy_graph(gm)
    recomputes = bool(ctx.kept.recomputed) or any(map(is_checkpointed, moved.graph.nodes))
    move_near_readers(
        moved,
        ends_no_stretch,
        anew=ctx.phase == "backward" and recomputes,
        in_order=ctx.options is not None and ctx.options.in_order,
    )
    return moved


def _store_what_calls_read(graph: Graph) -> None:
    """Mark the operands of calls to be stored where they are computed.

    A call needs it in memory, but the blocks before and after the repeated ones would compute it
    themselves (the sines of rotary embeddings): their kernels would be others than the body's, and
    what it is made of would be held until the first call, which the plan of memory does not know.
    """
    for call in graph.find_nodes(op="call_function", target=INVOKE):
        for operand in sources_of(call):
            if operand.op == "call_function":
                compat.store_at_once(operand)


def make_body(stretch: Stretch, twins: Mapping[Node, Node]) -> GraphModule:
    """A stretch as a graph of its own: operands in, results out.

    `twins` are what stands in the place of nodes of stretches that are calls already.
    """
    graph = Graph()
    inner: dict[Node, Node] = {}
    for index, operand in enumerate(stretch.operands):
        placeholder = inner[twins.get(operand, operand)] = graph.placeholder(f"operand_{index}")
        placeholder.meta = {"val": operand.meta["val"]}
    for node in stretch.body:
        inner[node] = graph.node_copy(node, inner.__getitem__)
        if node.target is aten.view.default:  # as Inductor does outside: it chooses strides anew
            inner[node].target = aten.reshape.default
    graph.output(tuple(inner[result] for result in stretch.results))
    body = GraphModule({}, graph)
    compat.keep_output_strides(body)
    return body


def _call(
    graph: Graph, stretch: Stretch, body: Node, twins: Mapping[Node, Node]
) -> dict[Node, Node]:
    """A call of `body` in the place of `stretch`; what stands in the place of what is read."""
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
