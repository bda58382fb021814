"""Joint graph: tell the partitioner what to save for the backward and what to compute again.

The tags are those of activation checkpointing.
"""

from torch.fx import GraphModule, Node
from torch.utils.checkpoint import CheckpointPolicy

from shardc.passes.context import PassContext
from shardc.passes.contract import contract

_AC_GRAPH_ID = 10**9
"""Far from any id that activation checkpointing gives: at 0 the partitioner's clean-up would turn
MUST_RECOMPUTE into MUST_SAVE."""


@contract(needs="tags")
def tag_recomputed(gm: GraphModule, ctx: PassContext) -> GraphModule:
    """Tag what a memory budget has the backward compute again, or find saved on the host."""
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
    """Whether a pass has tagged it, not the user's checkpointing."""
    return node.meta.get("ac_graph_id") == _AC_GRAPH_ID


def is_checkpointed(node: Node) -> bool:
    """Whether the user's checkpointing has a node computed again."""
    again = (CheckpointPolicy.MUST_RECOMPUTE, CheckpointPolicy.PREFER_RECOMPUTE)
    return node.meta.get("recompute") in again and not is_tagged(node)
