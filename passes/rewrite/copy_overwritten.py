"""Joint graph: the backward gets the value that an input had before the forward wrote to it.

A forward may end with a write to an input (a buffer that counts steps). The partitioner saves such
an input for the backward if it is smaller than the values computed from it. The backward would then
read the new value. Therefore all readers read a copy, and the partitioner may not recompute the
copy. An input that no backward depends on stays as it is.
"""

from collections.abc import Iterable

import torch
from torch.fx import GraphModule, Node
from torch.utils.checkpoint import CheckpointPolicy

from shardc.passes.context import PassContext
from shardc.passes.contract import contract
from shardc.passes.nodes import reach


@contract()
def copy_overwritten(gm: GraphModule, ctx: PassContext) -> GraphModule:
    """Clone every input that the forward writes to and the backward depends on.

    before: add = p + 1; ...; copy_(p, add)         after: c = clone(p); add = c + 1; ...
    """
    graph = gm.graph
    writes = graph.find_nodes(op="call_function", target=torch.ops.aten.copy_.default)
    if not writes:
        return gm
    placeholders = graph.find_nodes(op="placeholder")
    backward = reach(_users, *(node for node in placeholders if "tangents" in str(node.target)))
    for node in placeholders:
        is_written = any(w.args[0] is node and w not in backward for w in writes)
        if not is_written or node in backward:
            continue
        readers = [user for user in node.users if user not in writes and user.op != "output"]
        if not reach(_users, *readers).isdisjoint(backward):
            _read_copy(node, readers)
    return gm


def _read_copy(node: Node, readers: Iterable[Node]) -> None:
    with node.graph.inserting_after(node):
        copy = node.graph.call_function(torch.ops.aten.clone.default, (node,))
    copy.meta["val"] = node.meta["val"]
    copy.meta["recompute"] = CheckpointPolicy.MUST_SAVE
    for reader in readers:
        reader.replace_input_with(node, copy)


def _users(node: Node) -> list[Node]:
    """The nodes that are computed from a node."""
    return [user for user in node.users if user.op != "output"]
