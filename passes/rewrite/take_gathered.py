"""Dynamo graph: parameters of buckets that the eager runtime gathers become inputs.

A graph may be a piece of a model that runs eagerly (one block compiled by itself, a graph that a
break has cut). Gathers in the graph would gather a bucket once for each piece, and none could start
before its piece. So the eager runtime gathers such a bucket ahead, once.

    before:  w = shardc.unshard_slot(segment, "a1b2", 0)
    after:   w = placeholder
"""

from dataclasses import dataclass

from torch.fx import GraphModule, Node

from shardc.passes.context import PassContext
from shardc.passes.contract import contract
from shardc.passes.nodes import graph_modules
from shardc.passes.rewrite.insert_unshard import is_mark, refuse_in_place_update
from shardc.runtime import compat


@dataclass(frozen=True)
class Taken:
    """A full parameter that is an input of a graph: `slot` of the bucket at input `position`."""

    position: int
    slot: int


TAKEN = "shardc_taken"
"""The key in the meta of an input that `take_gathered` made, for its `Taken`."""


@contract(needs="marks")
def take_gathered(gm: GraphModule, ctx: PassContext) -> GraphModule:
    """Turn the parameters of the buckets at `ctx.outside` into inputs of `gm`, behind all others.

    The graph stays as it is if the body of a higher-order op (activation checkpointing) reads a
    bucket: the body must gather it again when it is recomputed.

    Raises:
        RuntimeError: the forward updates a parameter in place.
    """
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


def taken_by(gm: GraphModule) -> list[Taken]:
    """The full parameters that are inputs of `gm`, behind all other inputs."""
    inputs = gm.graph.find_nodes(op="placeholder")
    return [node.meta[TAKEN] for node in inputs if TAKEN in node.meta]


def marks_of(gm: GraphModule) -> list[Node]:
    """The marks of one graph that have readers."""
    return [node for node in gm.graph.nodes if is_mark(node) and node.users]
