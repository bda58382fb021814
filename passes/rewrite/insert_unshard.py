"""Dynamo graph: turn the marks of a bucket into one gather.

    before:  w = shardc.unshard_slot(segment, "a1b2", 0)
             b = shardc.unshard_slot(segment, "a1b2", 1)
    after:   full = unshard(segment, "a1b2"); w = full[0]; b = full[1]

A graph has one gather for a bucket, for any number of reads. Each body of a higher-order op
(activation checkpointing) has a gather of its own, which is recomputed with the body.
"""

import itertools
import operator
from collections import Counter, defaultdict

import torch
from torch.fx import Graph, GraphModule, Node

from shardc.passes.context import PassContext
from shardc.passes.contract import contract
from shardc.passes.nodes import body_calls, body_operands, graph_modules
from shardc.runtime import compat
from shardc.runtime.comm.unshard import unshard, unshard_extended
from shardc.runtime.layout.spec import Moved, spec_of

SLOTS = "shardc_slots"
"""The key in the meta of a segment, an input of a Dynamo graph, for the slots that are read."""


@contract(needs="marks", gives="gathers", ends="marks")
def insert_unshard(gm: GraphModule, ctx: PassContext) -> GraphModule:
    """Replace the marks in `gm` and its bodies by gathers; inputs that are segments get `SLOTS`.

    Raises:
        RuntimeError: the forward updates a parameter in place; or gradients of a bucket wait, and
            both a nested compile region and another place of the graph read the bucket.
    """
    inputs = gm.graph.find_nodes(op="placeholder")
    places: _Places = {gm: {node: Counter([position]) for position, node in enumerate(inputs)}}
    _find_places(gm, places)
    found = {body: _marks(body) for body in places}
    _refuse_what_waits(gm, found, places, ctx)
    for body, by_segment in found.items():
        for segment, marks in by_segment.items():
            positions = places[body][segment]
            slots = _insert(body.graph, marks, _moved(marks[0], positions, ctx))
            for position in positions:
                known: frozenset[int] = inputs[position].meta.get(SLOTS, frozenset())
                inputs[position].meta[SLOTS] = known | slots
    return gm


def slots_read(gm: GraphModule) -> dict[int, frozenset[int]]:
    """For each input that is a segment, the slots that a Dynamo graph reads."""
    inputs = enumerate(gm.graph.find_nodes(op="placeholder"))
    return {position: node.meta[SLOTS] for position, node in inputs if SLOTS in node.meta}


_Places = dict[GraphModule, dict[Node, Counter[int]]]
"""By input of a graph, how many times each input of the outermost graph arrives there."""


def _find_places(gm: GraphModule, places: _Places) -> None:
    """Add the bodies of `gm` to `places`."""
    calls = body_calls(gm)
    for body, call in calls:
        known = places.setdefault(body, {})
        for placeholder, operand in body_operands(call, body.graph):
            known.setdefault(placeholder, Counter()).update(places[gm].get(operand, ()))
    for body in dict.fromkeys(body for body, _ in calls):
        _find_places(body, places)


def _refuse_what_waits(
    gm: GraphModule,
    found: dict[GraphModule, dict[Node, list[Node]]],
    places: _Places,
    ctx: PassContext,
) -> None:
    """Raise if several reductions would each add the waiting gradients of a bucket.

    `reduce_once` merges the reductions that autograd makes. But a body that is called as a region
    keeps its own reduction.
    """
    reads, waiting, apart = Counter[int](), set[int](), set[int]()
    regions = _regions(gm)
    for body, by_segment in found.items():
        for segment, marks in by_segment.items():
            positions = places[body][segment]
            reads.update(positions)
            reduction = spec_of(str(marks[0].args[1])).reduction
            if reduction.pending or reduction.partial:
                waiting.update(positions)
            if body in regions:
                apart.update(positions)
    for position in waiting & apart:
        if reads[position] > 1:
            label, _ = ctx.buckets.get(position, ("a bucket", 0))
            raise RuntimeError(
                f"gradients of {label} wait to be reduced, and a nested_compile_region reads it, "
                f"as {reads[position] - 1} other place(s) of the graph do: they would be added "
                "more than once. Reduce the gradients of every micro-batch, or read the unit's "
                "parameters in one call of one region"
            )


def _regions(gm: GraphModule) -> set[GraphModule]:
    """The bodies that `invoke_subgraph` calls, and the bodies inside them."""
    found: set[GraphModule] = set()
    for body in graph_modules(gm):
        for call in body.graph.find_nodes(
            op="call_function", target=torch.ops.higher_order.invoke_subgraph
        ):
            target = getattr(body, str(call.args[0].target))
            found.update(graph_modules(target))
    return found


def _moved(mark: Node, positions: Counter[int], ctx: PassContext) -> Moved:
    """The bucket that `mark` reads; in a body of several calls, only its signature is known."""
    signature = str(mark.args[1])
    if len(positions) != 1:
        return Moved(signature)
    (position,) = positions
    return Moved(signature, position, *ctx.buckets.get(position, ()))


def _marks(gm: GraphModule) -> dict[Node, list[Node]]:
    """The marks of one graph by the segment they read, in graph order."""
    found: defaultdict[Node, list[Node]] = defaultdict(list)
    for node in gm.graph.nodes:
        if not is_mark(node):
            continue
        if not node.users:  # only its shape was asked for
            gm.graph.erase_node(node)
        else:
            found[node.args[0]].append(node)
    return found


def is_mark(node: Node) -> bool:
    """Whether the node marks the use of a parameter."""
    return node.op == "call_function" and node.target in (
        torch.ops.shardc.unshard_slot,
        torch.ops.shardc.unshard_slot.default,
        unshard_extended,
    )


def _insert(graph: Graph, marks: list[Node], moved: Moved) -> frozenset[int]:
    """Insert one `unshard` and its views before the modules that read it; return the slots read."""
    segment, _, _, extras = marks[0].args
    assert isinstance(extras, (list, tuple))
    around = _around(marks)
    slots: set[int] = set()
    with graph.inserting_before(_outside_regions(_first_inside(around, marks[0]))):
        full = graph.call_function(unshard, (segment, moved, *extras))
        for mark in marks:
            refuse_in_place_update(mark)
            slot = mark.args[2]
            slots.add(int(slot))  # type: ignore[arg-type]
            view = graph.call_function(operator.getitem, (full, slot))
            view.meta = {**mark.meta, "nn_module_stack": around}
            mark.replace_all_uses_with(view)
    for mark in marks:
        graph.erase_node(mark)
    return frozenset(slots)


_Stack = dict[str, tuple[str, object]]
"""The modules that a node lies in, outermost first: each a path and a class."""


def _stack(node: Node) -> _Stack:
    return node.meta.get("nn_module_stack") or {}


def _around(nodes: list[Node]) -> _Stack:
    """The modules that contain all of `nodes`."""
    shared = list(_stack(nodes[0]).items())
    for node in nodes:
        pairs = zip(shared, _stack(node).items(), strict=False)
        shared = [own for own, _ in itertools.takewhile(lambda pair: pair[0] == pair[1], pairs)]
    return dict(shared)


def _first_inside(around: _Stack, node: Node) -> Node:
    """The first node of the module call right inside `around` that contains `node`.

    The gather goes before that node, so that the code of equal modules stays equal: each module of
    a shared bucket gets its parameters from outside, also the first reader.
    """
    inner = list(_stack(node))[: len(around) + 1]
    if len(inner) == len(around):
        return node
    while node.prev.op != "placeholder" and list(_stack(node.prev))[: len(inner)] == inner:
        node = node.prev
    return node


def _outside_regions(mark: Node) -> Node:
    """The node before which the gather goes: outside of `no_grad` and function transforms.

    The first use of a weight may lie inside such a region, and a later use outside.
    """
    opens, closes = compat.region_nodes()
    no_grad: Node | None = None
    transforms: list[Node] = []
    for node in mark.graph.nodes:
        if node is mark:
            break
        if node.target is compat.SET_GRAD_ENABLED and torch.is_grad_enabled():
            no_grad = None if node.args[0] else no_grad or node
        elif node.target in opens:
            transforms.append(node)
        elif node.target in closes:
            transforms.pop()
    around = [*([no_grad] if no_grad else []), *transforms[:1], mark]
    return next(node for node in mark.graph.nodes if node in around)


def refuse_in_place_update(mark: Node) -> None:
    """Raise if the forward updates the parameter that `mark` reads."""
    value = mark.meta.get("example_value")
    if value is None:
        return
    if any(alias._version > 0 for alias in (value, *compat.read_as_data(mark.graph, value))):
        shape = tuple(spec_of(mark.args[1]).shapes[mark.args[2]])  # type: ignore[arg-type,index]
        raise RuntimeError(
            f"the forward updates a sharded parameter of shape {shape} in place; its full value "
            "is a temporary, so the update would be lost. Update it outside the forward, or make "
            f"it a buffer. It was read at:\n{mark.meta.get('stack_trace', '(unknown)')}"
        )
