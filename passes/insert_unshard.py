"""Dynamo graph: turn the markers of a bucket into one gather.

    before:  w = shardc.unshard_slot(segment, "a1b2", 0)
             b = shardc.unshard_slot(segment, "a1b2", 1)
    after:   full = unshard(segment, "a1b2"); w = full[0]; b = full[1]

However many parameters of a bucket a graph reads, and however often, there is one gather. Bodies of
higher-order ops (activation checkpointing) get their own, so that it is recomputed with the rest.
"""

import operator
from collections import defaultdict
from dataclasses import dataclass

import torch
from torch.fx import Graph, GraphModule, Node

from shardc.passes.context import PassContext, body_operands, graph_modules
from shardc.runtime import compat
from shardc.runtime.spec import spec_of
from shardc.runtime.unshard import unshard


def insert_unshard(gm: GraphModule, ctx: PassContext) -> GraphModule:
    """Replace all markers in `gm` and its bodies; note in `ctx.used` which slots are read.

    Raises:
        RuntimeError: the forward updates a parameter in place.
    """
    reads = {
        body: {segment: _insert(body.graph, markers) for segment, markers in _markers(body).items()}
        for body in graph_modules(gm)
    }
    for segment, read in _collect(gm, reads).items():
        ctx.used[segment.name] = read.slots
        if read.leaf is not segment:
            ctx.leaves[segment.name] = read.leaf.name
    return gm


@dataclass(frozen=True)
class _Read:
    """How a graph reads a bucket: which slots, and which input gets the gradient."""

    slots: frozenset[int]
    leaf: Node


def _markers(gm: GraphModule) -> dict[Node, list[Node]]:
    """The markers of one graph by the segment they read, in graph order."""
    found: defaultdict[Node, list[Node]] = defaultdict(list)
    for node in gm.graph.nodes:
        if not is_marker(node):
            continue
        if not node.users:  # only its shape was asked for
            gm.graph.erase_node(node)
        else:
            found[node.args[0]].append(node)
    return found


def is_marker(node: Node) -> bool:
    """Whether the node marks the use of a parameter."""
    return node.op == "call_function" and node.target in (
        torch.ops.shardc.unshard_slot,
        torch.ops.shardc.unshard_slot.default,
    )


def _insert(graph: Graph, markers: list[Node]) -> _Read:
    """One `unshard` before the first marker."""
    segment, signature, _, extras = markers[0].args
    assert isinstance(segment, Node) and isinstance(extras, (list, tuple))
    with graph.inserting_before(_outside_regions(markers[0])):
        full = graph.call_function(unshard, (segment, signature, *extras))
    slots: set[int] = set()
    for marker in markers:
        refuse_in_place_update(marker)
        slot = marker.args[2]
        slots.add(int(slot))  # type: ignore[arg-type]
        with graph.inserting_before(marker):
            view = graph.call_function(operator.getitem, (full, slot))
        view.meta = dict(marker.meta)
        marker.replace_all_uses_with(view)
        graph.erase_node(marker)
    given = dict(zip(spec_of(str(signature)).extras, extras, strict=True))
    leaf = given.get("sink", segment)
    assert isinstance(leaf, Node)
    return _Read(frozenset(slots), leaf)


def _outside_regions(marker: Node) -> Node:
    """Where the gather goes: before any `no_grad` or function transform that the marker lies in.

    The first use of a weight may lie inside and a later one outside.
    """
    opens, closes = compat.region_nodes()
    no_grad: Node | None = None
    transforms: list[Node] = []
    for node in marker.graph.nodes:
        if node is marker:
            break
        if node.target is compat.SET_GRAD_ENABLED and torch.is_grad_enabled():
            no_grad = None if node.args[0] else no_grad or node
        elif node.target in opens:
            transforms.append(node)
        elif node.target in closes:
            transforms.pop()
    around = [*([no_grad] if no_grad else []), *transforms[:1], marker]
    return next(node for node in marker.graph.nodes if node in around)


def refuse_in_place_update(marker: Node) -> None:
    """Raise if the forward updates the parameter that `marker` reads."""
    value = marker.meta.get("example_value")
    if value is not None and value._version > 0:
        shape = tuple(spec_of(marker.args[1]).shapes[marker.args[2]])  # type: ignore[arg-type,index]
        raise RuntimeError(
            f"the forward updates a sharded parameter of shape {shape} in place; its full value "
            "is a temporary, so the update would be lost. Update it outside the forward, or make "
            f"it a buffer. It was read at:\n{marker.meta.get('stack_trace', '(unknown)')}"
        )


def _collect(gm: GraphModule, reads: dict[GraphModule, dict[Node, _Read]]) -> dict[Node, _Read]:
    """What `gm` and, through their calls, its bodies read, by segment node of `gm`."""
    total = dict(reads[gm])
    for node in gm.graph.find_nodes(op="get_attr"):
        body = getattr(gm, str(node.target), None)
        if not isinstance(body, GraphModule):
            continue
        inner = _collect(body, reads)
        for call in node.users:
            outside = dict(body_operands(call, body.graph))
            for placeholder, read in inner.items():
                segment, leaf = outside[placeholder], outside[read.leaf]
                known = total[segment].slots if segment in total else frozenset()
                total[segment] = _Read(known | read.slots, leaf)
    return total
