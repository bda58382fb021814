"""Dynamo graph: parameters of buckets that the eager runtime gathers become inputs.

A graph may be a piece of a model that runs eagerly (one block compiled by itself, a graph that a
break has cut). Gathers in the graph would gather a bucket once for each piece, and none could start
before its piece. So the eager runtime gathers such a bucket ahead, once.

    before:  w = shardc.unshard_slot(segment, "a1b2", 0)
    after:   w = placeholder

A parameter in a bucket of a unit around has an input already, its marker. The runtime gives the
parameter in the marker's place, also to bodies of higher-order ops:

    before:  w = shardc.unshard_place(segment, "a1b2", 0, marker)
    after:   w = marker
"""

from dataclasses import dataclass

import torch
from torch.fx import GraphModule, Node

from shardc.passes.context import PassContext
from shardc.passes.contract import contract
from shardc.passes.nodes import body_calls, body_operands, graph_modules
from shardc.passes.rewrite.insert_unshard import is_mark, refuse_in_place_update
from shardc.runtime import compat


@dataclass(frozen=True)
class Taken:
    """A full parameter that is an input of a graph.

    Attributes:
        position: the input that is the segment of its bucket, or the marker of its slot.
        slot: the slot in the bucket; None: the parameter takes the place of the marker.
    """

    position: int
    slot: int | None


TAKEN = "shardc_taken"
"""The key in the meta of an input that `take_gathered` made, for its `Taken`."""


@contract(needs="marks")
def take_gathered(gm: GraphModule, ctx: PassContext) -> GraphModule:
    """Turn the parameters of the buckets at `ctx.outside` into inputs of `gm`, behind all others.

    No such inputs are made if the body of a higher-order op (activation checkpointing) reads a
    bucket: the body must gather it again when it is recomputed. Parameters with a marker become
    inputs in any case.

    Raises:
        RuntimeError: the forward updates a parameter in place.
    """
    gm = _give_places(gm)
    bodies = [body for body in graph_modules(gm) if body is not gm]
    if not ctx.outside or any(marks_of(body) for body in bodies):
        return gm
    gm = compat.copy_dynamo_graph(gm)
    inputs = gm.graph.find_nodes(op="placeholder")
    taken: dict[Taken, Node] = {}
    for mark in marks_of(gm):
        segment, _, slot, _ = mark.args
        place = Taken(inputs.index(segment), slot)  # type: ignore[arg-type]
        if place.position not in ctx.outside:
            continue
        refuse_in_place_update(mark)
        if place not in taken:
            with gm.graph.inserting_after([*inputs, *taken.values()][-1]):
                taken[place] = gm.graph.placeholder(f"full_{len(taken)}")
            compat.make_input_without_source(taken[place], mark)
            taken[place].meta[TAKEN] = place
        mark.replace_all_uses_with(taken[place])
        gm.graph.erase_node(mark)
    return gm


def _give_places(gm: GraphModule) -> GraphModule:
    """Make each marker the full parameter for which it stands."""
    if not any(_reads_of_markers(body) for body in graph_modules(gm)):
        return gm
    gm = compat.copy_dynamo_graph(gm)
    given: set[Node] = set()
    bodies = list(graph_modules(gm))
    for body in bodies:
        for mark in _reads_of_markers(body):
            refuse_in_place_update(mark)
            marker: Node = mark.args[3]  # type: ignore[assignment]
            compat.make_input_without_source(marker, mark)
            given.add(marker)
            mark.replace_all_uses_with(marker)
            body.graph.erase_node(mark)
    pairs = [
        pair
        for body in bodies
        for inner, call in body_calls(body)
        for pair in body_operands(call, inner.graph)
    ]
    while more := {b: a for a, b in pairs if a in given and b not in given}:
        for operand, placeholder in more.items():
            compat.make_input_without_source(operand, placeholder)
            given.add(operand)
    for position, node in enumerate(gm.graph.find_nodes(op="placeholder")):
        if node in given:
            node.meta[TAKEN] = Taken(position, None)
    return gm


def _reads_of_markers(gm: GraphModule) -> list[Node]:
    packet = torch.ops.shardc.unshard_place
    return [node for node in gm.graph.nodes if node.target in (packet, packet.default)]


def taken_by(gm: GraphModule) -> list[Taken]:
    """The full parameters that are inputs of `gm`, in order."""
    inputs = gm.graph.find_nodes(op="placeholder")
    return [node.meta[TAKEN] for node in inputs if TAKEN in node.meta]


def marks_of(gm: GraphModule) -> list[Node]:
    """The marks of one graph that have readers."""
    return [node for node in gm.graph.nodes if is_mark(node) and node.users]
