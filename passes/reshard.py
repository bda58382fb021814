"""Joint graph: decide what the backward finds of the gathered weights.

A unit that reshards after its forward must leave no gathered weight among the saved tensors: its
gather, and everything computed from gathered weights alone (views, casts, transposes), is tagged
to be recomputed, so the backward gathers again from the segment. A unit that does not reshard has
its whole gathered bucket saved, one tensor, and views of it are taken anew.

The partitioner does the rest; the tags are those of activation checkpointing.
"""

import torch
from torch.fx import GraphModule, Node
from torch.utils.checkpoint import CheckpointPolicy

from shardc.passes.context import PassContext, is_all_gather, is_view, is_wait, spec_of_node

_AC_GRAPH_ID = 10**9
"""Far from any id that activation checkpointing gives: at 0 the partitioner's clean-up would turn
MUST_RECOMPUTE into MUST_SAVE (seen on 2.11 to 2.15)."""


def tag_reshard(gm: GraphModule, ctx: PassContext) -> GraphModule:
    """Tag gathered weights, and what depends on nothing else, as recomputed or saved."""
    resharded: dict[Node, bool] = {}
    for node in gm.graph.nodes:
        if node.op != "call_function":
            continue
        spec = spec_of_node(node) if is_all_gather(node) else None
        if spec is not None:
            resharded[node] = ctx.reshards(node)
        elif node.all_input_nodes and all(i in resharded for i in node.all_input_nodes):
            if torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ()):
                continue
            resharded[node] = any(resharded[i] for i in node.all_input_nodes)
    for node, reshard in resharded.items():
        if reshard or is_view(node):
            _tag(node, CheckpointPolicy.MUST_RECOMPUTE)
        elif is_wait(node):
            _tag(node, CheckpointPolicy.MUST_SAVE)
    return gm


def _tag(node: Node, policy: CheckpointPolicy) -> None:
    node.meta["recompute"] = policy
    node.meta["ac_graph_id"] = _AC_GRAPH_ID
