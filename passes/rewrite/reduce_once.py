"""Joint graph: one reduction for a bucket, for any number of reads with a gradient.

    before:  p = pack([a, None]); r = reduce(p); q = pack([b, c], pending); s = reduce(q)
             gradient = r + s
    after:   q = pack([a + b, c], pending); gradient = reduce(q)

Each body of activation checkpointing reads a bucket by itself, and autograd reduces the gradient of
every read. Each reduction would add the waiting gradient, and call the user's hook.
"""

from collections import defaultdict
from collections.abc import Sequence

import torch
from torch.fx import GraphModule, Node

from shardc.passes.context import PassContext
from shardc.passes.contract import contract
from shardc.passes.nodes import moved_by, reach
from shardc.runtime.layout.spec import Moved

aten, ops = torch.ops.aten, torch.ops.shardc


@contract(needs="gathers")
def reduce_once(gm: GraphModule, ctx: PassContext) -> GraphModule:
    """Add the earlier gradients of each bucket to its last one before the reduction."""
    packs: defaultdict[tuple[Moved, ...], list[Node]] = defaultdict(list)
    for pack in gm.graph.find_nodes(op="call_function", target=ops.pack.default):
        packs[moved_by(pack)].append(pack)
    for (moved,), (*others, last) in packs.items():
        if not others or moved.position < 0:
            continue
        _take_in(last, others)
        for pack in others:
            _leave_out(_to_sum(pack, {*others, last} - {pack}, moved.spec.reduction.partial))
    return gm


def _to_sum(pack: Node, others: set[Node], partial: bool) -> list[Node]:
    """The nodes from `pack` up to and including the first sum with another gradient of the bucket.

    The other gradient may be rows of a table, which no reduction made; then one of `others` follows
    in a later sum. The sum with the gradients that wait for copies (`partial`) comes before, and is
    part of the reduction.
    """
    chain, sums = [pack], list[int]()
    while True:
        (user,) = chain[-1].users
        operands = [node for node in user.all_input_nodes if node is not chain[-1]]
        chain.append(user)
        if user.target is aten.add.Tensor and operands:
            sums.append(len(chain))
            if not others.isdisjoint(reach(lambda node: node.all_input_nodes, *operands)):
                return chain[: sums[partial]]


def _take_in(last: Node, others: Sequence[Node]) -> None:
    """Add the parts of `others` to the parts of `last`."""
    sums, order = [], {node: index for index, node in enumerate(last.graph.nodes)}
    for parts in zip(*(pack.args[0] for pack in (*others, last)), strict=True):
        total, *rest = [part for part in parts if part is not None] or [None]
        for part in rest:
            # At once: otherwise the inputs of `part` are held for a sum that comes later.
            after = max(total, part, key=order.__getitem__)
            if after.op == "placeholder":
                after = last.prev
            with last.graph.inserting_after(after):
                added = last.graph.call_function(aten.add.Tensor, (total, part))
            added.meta, order[added] = dict(part.meta), order[after]
            total = added
        sums.append(total)
    last.args = (sums, *last.args[1:])


def _leave_out(chain: list[Node]) -> None:
    """Erase a chain that ends with a sum; the other operand of the sum takes its place."""
    *before, result, total = chain
    (other,) = [node for node in total.all_input_nodes if node is not result]
    total.replace_all_uses_with(other)
    for node in (total, result, *reversed(before)):
        node.graph.erase_node(node)
