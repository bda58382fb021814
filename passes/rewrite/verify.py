"""Forward and backward graphs: check the invariants that the passes before must keep.

Every collective has exactly one wait for each bucket that it moves. Every copy to or from the host
has exactly one wait, except an optimizer's state that returns: compute waits for it at the end.
Nothing but a wait reads the result of a collective or copy. The forward saves no resharded weight,
no view of one, and no value computed from such weights alone. `collective_sequence` gives the lines
that ranks compare.
"""

from collections.abc import Sequence

import torch
from torch.fx import Graph, GraphModule, Node

from shardc.passes.context import PassContext
from shardc.passes.contract import contract
from shardc.passes.nodes import (
    FETCH_STATE,
    describe_collective,
    is_all_gather,
    is_host_copy,
    is_random,
    is_wait,
    labels_of,
    moved_by,
    our_collectives,
    results_of,
    returned_and_saved,
)


@contract(needs="one_wait scheduled")
def verify(gm: GraphModule, ctx: PassContext) -> GraphModule:
    """Raise AssertionError if `gm` breaks an invariant."""
    copies = (n for n in gm.graph.nodes if is_host_copy(n) and n.target is not FETCH_STATE)
    started = [*our_collectives(gm), *copies]
    for result in (result for node in started for result in results_of(node)):
        users = list(result.users)
        assert len(users) == 1 and is_wait(users[0]), (
            f"{result.name} must be read by one wait only, is read by {users}"
        )
    if ctx.phase == "forward":
        _no_resharded_weight_is_saved(gm, ctx)
    return gm


def _no_resharded_weight_is_saved(gm: GraphModule, ctx: PassContext) -> None:
    if ctx.results is None:  # no backward follows
        return
    made_of: dict[Node, Node] = {}  # by value made of weights alone, a gather of these weights
    for node in gm.graph.nodes:
        if is_all_gather(node) and moved_by(node):
            for result in results_of(node):
                index = 0 if result is node else int(result.args[1])  # type: ignore[arg-type]
                if ctx.kept.reshards(moved_by(node)[index]):
                    made_of[result] = node
        elif node in made_of or node.target is torch.ops.shardc.recut.default or is_random(node):
            continue
        elif node.all_input_nodes and all(i in made_of for i in node.all_input_nodes):
            made_of[node] = made_of[node.all_input_nodes[0]]
    for saved in returned_and_saved(gm, ctx.results)[1]:
        assert saved not in made_of, (
            f"{' and '.join(labels_of(made_of[saved]))} is resharded after the forward, which "
            f"keeps its parameters all the same, as '{saved}': a pass or a partitioner among the "
            "settings of Inductor must have taken away the tags that have them recomputed"
        )


def check_collectives(planned: Sequence[str], graph: Graph) -> None:
    """Raise RuntimeError if a user's own passes have changed the collectives of a graph."""
    assert graph.owning_module is not None
    found = collective_sequence(graph.owning_module)
    if found != list(planned):
        raise RuntimeError(
            "a pass among the settings of Inductor (post_grad_custom_pre_pass or "
            "post_grad_custom_post_pass) moves or changes collectives on which all ranks have "
            f"agreed: {list(planned)} became {found}"
        )


def collective_sequence(gm: GraphModule, by_number: bool = False) -> list[str]:
    """One line for each collective that moves buckets, in graph order; equal on all ranks."""
    return [describe_collective(node, by_number) for node in our_collectives(gm)]
