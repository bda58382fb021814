"""Joint graph: tell the partitioner to save nodes for the backward, or to compute them again.

The tags are the tags of activation checkpointing.
"""

from torch.fx import GraphModule, Node
from torch.utils.checkpoint import CheckpointPolicy

from shardc.passes.context import PassContext
from shardc.passes.contract import contract

_AC_GRAPH_ID = 10**9
"""An id far from all ids of activation checkpointing. With id 0, the partitioner's clean-up would
turn MUST_RECOMPUTE into MUST_SAVE."""


@contract(needs="tags")
def tag_recomputed(gm: GraphModule, ctx: PassContext) -> GraphModule:
    """Tag the nodes that a memory budget chose to compute again, or to save on the host."""
    for node in gm.graph.nodes:
        if node.name in ctx.kept.offloaded:
            tag(node, CheckpointPolicy.MUST_SAVE)
        elif node.name in ctx.kept.recomputed:
            tag(node, CheckpointPolicy.MUST_RECOMPUTE)
    return gm


def tag(node: Node, policy: CheckpointPolicy) -> None:
    """Tell the partitioner to save a node or to compute it again."""
    node.meta["recompute"] = policy
    node.meta["ac_graph_id"] = _AC_GRAPH_ID


def is_tagged(node: Node) -> bool:
    """Whether a pass has tagged a node, and not the user's checkpointing."""
    return node.meta.get("ac_graph_id") == _AC_GRAPH_ID


def is_checkpointed(node: Node) -> bool:
    """Whether the user's checkpointing tagged a node to be computed again."""
    again = (CheckpointPolicy.MUST_RECOMPUTE, CheckpointPolicy.PREFER_RECOMPUTE)
    return node.meta.get("recompute") in again and not is_tagged(node)
