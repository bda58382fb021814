"""Joint graph: one reduction a bucket, however many of its reads a backward differentiates.

    before:  p = pack([a, None]); r = reduce(p); q = pack([b, c], pending); s = reduce(q)
             gradient = r + s
    after:   q = pack([a + b, c], pending); gradient = reduce(q)

Bodies of activation checkpointing read a bucket by themselves, and autograd reduces the gradient of
every read. Each of them would add the gradient that waits, and call the user's hook.
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
    """The nodes behind `pack` up to the first sum with another reduced gradient, that sum included.
    It may be one that is no reduction, of rows of a table; one of `others` follows. The sum with
    the gradients that wait for copies (`partial`) comes before, and is part of the reduction."""
    chain, sums = [pack], list[int]()
    while True:
        (user,) = chain[-1].users
        operands = [node for node in user.all_input_nodes if node is not chain[-1]]
        chain.append(user)
        if user.target is aten.add.Tensor and operands:
            sums.append(len(chain))
            if _come_of(operands, others):
                return chain[: sums[partial]]


def _come_of(nodes: Sequence[Node], sources: set[Node]) -> bool:
    return not reach(lambda node: node.all_input_nodes, *nodes).isdisjoint(sources)


def _take_in(last: Node, others: Sequence[Node]) -> None:
    """Add the parts of `others` to those of `last`."""
    sums, order = [], {node: index for index, node in enumerate(last.graph.nodes)}
    for parts in zip(*(pack.args[0] for pack in (*others, last)), strict=True):
        total, *rest = [part for part in parts if part is not None] or [None]
        for part in rest:
            # At once, so that what `part` is computed from is not held for a sum that comes later.
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
    """Erase what follows a gradient, and take the other operand for the sum at its end."""
    *before, result, total = chain
    (other,) = [node for node in total.all_input_nodes if node is not result]
    total.replace_all_uses_with(other)
    for node in (total, result, *reversed(before)):
        node.graph.erase_node(node)
