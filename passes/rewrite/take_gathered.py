"""Dynamo graph: parameters of buckets that the eager runtime gathers come in as inputs.

Where a graph is a piece of a model that runs eagerly (one block compiled by itself, a graph that a
break has cut), gathering in the graph would gather a bucket once a piece, and could start no gather
before the piece begins. Those buckets are the runtime's: it gathers them ahead, once.

    before:  w = shardc.unshard_slot(segment, "a1b2", 0)
    after:   w = placeholder
"""

from dataclasses import dataclass

from torch.fx import GraphModule, Node

from shardc.passes.context import PassContext
from shardc.passes.contract import contract
from shardc.passes.nodes import graph_modules
from shardc.passes.rewrite.insert_unshard import is_marker, refuse_in_place_update
from shardc.runtime import compat


@dataclass(frozen=True)
class Taken:
    """A full parameter that a graph is given: `slot` of the bucket at input `position`."""

    position: int
    slot: int


TAKEN = "shardc_taken"
"""Where the meta of an input of a Dynamo graph has what it takes, if `take_gathered` made it."""


@contract(needs="markers")
def take_gathered(gm: GraphModule, ctx: PassContext) -> GraphModule:
    """Make the parameters of the buckets at `ctx.outside` inputs of `gm`, behind all others.

    A bucket that is also read in the body of a higher-order op (activation checkpointing) stays as
    it is: there it has to be gathered again with the rest that is recomputed.

    Raises:
        RuntimeError: the forward updates a parameter in place.
    """
    bodies = [body for body in graph_modules(gm) if body is not gm]
    if not ctx.outside or any(markers_of(body) for body in bodies):
        return gm
    gm = compat.copy_dynamo_graph(gm)
    inputs = gm.graph.find_nodes(op="placeholder")
    taken: dict[Taken, Node] = {}
    for marker in markers_of(gm):
        segment, _, slot, _ = marker.args
        place = Taken(inputs.index(segment), slot)  # type: ignore[arg-type]
        if place.position not in ctx.outside:
            continue
        refuse_in_place_update(marker)
        if place not in taken:
            with gm.graph.inserting_after([*inputs, *taken.values()][-1]):
                taken[place] = gm.graph.placeholder(f"full_{place.position}_{slot}")
            compat.make_input_without_source(taken[place], marker)
            taken[place].meta[TAKEN] = place
        marker.replace_all_uses_with(taken[place])
        gm.graph.erase_node(marker)
    return gm


def taken_by(gm: GraphModule) -> list[Taken]:
    """The full parameters that come in as inputs, behind all others."""
    inputs = gm.graph.find_nodes(op="placeholder")
    return [node.meta[TAKEN] for node in inputs if TAKEN in node.meta]


def markers_of(gm: GraphModule) -> list[Node]:
    """The reads of parameters in one graph."""
    return [node for node in gm.graph.nodes if is_marker(node) and node.users]
