"""Dynamo graph: buckets that the eager runtime gathers come in as full parameters.

Where a graph is a piece of a model that runs eagerly (one block compiled by itself, a graph that a
break has cut), gathering in the graph would gather a bucket once a piece, and could start no gather
before the piece begins. Those buckets are the runtime's: it gathers them ahead, once.

    before:  w = shardc.unshard_slot(segment, "a1b2", 0)
    after:   w = placeholder
"""

from dataclasses import dataclass

from torch.fx import GraphModule, Node

from shardc.passes.context import graph_modules
from shardc.passes.insert_unshard import is_marker, refuse_in_place_update
from shardc.runtime import compat


@dataclass(frozen=True)
class Taken:
    """An input that a graph was given: parameter `slot` of the bucket at input `position`."""

    position: int
    slot: int


def take_gathered(gm: GraphModule, positions: frozenset[int]) -> list[Taken]:
    """Make the parameters of the buckets at `positions` inputs of `gm`, behind all others.

    A bucket that is also read in the body of a higher-order op (activation checkpointing) stays as
    it is: there it has to be gathered again with the rest that is recomputed.
    """
    inputs = gm.graph.find_nodes(op="placeholder")
    inside = {id(node) for body in graph_modules(gm) if body is not gm for node in _markers(body)}
    taken: dict[Taken, Node] = {}
    if inside:
        return []
    for marker in _markers(gm):
        segment, _, slot, _ = marker.args
        place = Taken(inputs.index(segment), slot)  # type: ignore[arg-type]
        if place.position not in positions:
            continue
        refuse_in_place_update(marker)
        if place not in taken:
            with gm.graph.inserting_after([*inputs, *taken.values()][-1]):
                taken[place] = gm.graph.placeholder(f"full_{place.position}_{slot}")
            compat.make_input_without_source(taken[place], marker)
        marker.replace_all_uses_with(taken[place])
        gm.graph.erase_node(marker)
    return list(taken)


def _markers(gm: GraphModule) -> list[Node]:
    return [node for node in gm.graph.nodes if is_marker(node)]
