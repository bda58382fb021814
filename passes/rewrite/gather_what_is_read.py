"""Forward and backward graphs: gather only the tensors of an extension that the graph reads.

A subclass may send several tensors for its parameter (`runtime.tensor.extension`). Of a format with
two planes, one scaled along rows and one along columns, the forward reads the first and the
backward the second. The result of the gather is split into the sent tensors:

    before:  m = cat([a, b, c, d]); split = all_gather(m).view(W, -1).split([4, 1, 4, 1], 1)
    after:   all_gather(m[0:5]).view(W, -1).split([4, 1], 1)             (a and b have readers)

The tensors between the first and the last one with a reader are sent. The message is made whole, or
saved whole for the backward: it has a rank's rows only. A gather whose whole result is saved stays
as it is.
"""

import operator

import torch
from torch.fx import GraphModule, Node

from shardc.passes.context import PassContext
from shardc.passes.contract import contract
from shardc.passes.nodes import (
    c10d,
    is_all_gather,
    meta_for_another,
    moved_by,
    our_collectives,
    ranks_in,
)

aten = torch.ops.aten


@contract(needs="one_wait")
def gather_what_is_read(gm: GraphModule, ctx: PassContext) -> GraphModule:
    """Shorten the messages of extensions to the tensors that `gm` reads."""
    for start in filter(is_all_gather, our_collectives(gm)):
        split = _split_of(start) if moved_by(start)[0].spec.extension else None
        if split is not None:
            _shorten(start, split)
    return gm


def _split_of(start: Node) -> Node | None:
    """The split of a gather's result into the sent tensors; None if anything else reads it."""
    node = start
    for target in (c10d.wait_tensor.default, aten.view.default):
        if len(node.users) != 1:
            return None
        (node,) = node.users
        if node.target is not target:
            return None
    splits = [user for user in node.users if user.target is aten.split_with_sizes.default]
    return splits[0] if len(node.users) == len(splits) == 1 else None


def _shorten(start: Node, split: Node) -> None:
    """Send the tensors from the first to the last one that is read."""
    view, sizes, _ = split.args
    assert isinstance(view, Node) and isinstance(sizes, list)
    read = sorted({user.args[1] for user in split.users})  # type: ignore[type-var]
    first, end = int(read[0]), int(read[-1]) + 1  # type: ignore[arg-type]
    if end - first == len(sizes):
        return
    message = _cut(start, sizes, first, end)
    start.args = (message, *start.args[1:])
    split.args = (view, sizes[first:end], *split.args[2:])
    for user in list(split.users):
        assert user.target is operator.getitem
        user.args = (split, int(user.args[1]) - first)  # type: ignore[arg-type]
    ranks, nbytes = ranks_in(start), sum(sizes[first:end])
    split.meta["val"] = list(split.meta["val"])[first:end]
    view.meta["val"] = view.meta["val"].new_empty((ranks, nbytes))
    for node in (start, view.args[0]):
        assert isinstance(node, Node)
        node.meta["val"] = node.meta["val"].new_empty(ranks * nbytes)


def _cut(start: Node, sizes: list[int], first: int, end: int) -> Node:
    """The tensors `first` to `end` of a message, as a slice of the message."""
    whole = start.args[0]
    assert isinstance(whole, Node)
    begin, until = sum(sizes[:first]), sum(sizes[:end])
    with start.graph.inserting_before(start):
        cut = start.graph.call_function(aten.slice.Tensor, (whole, 0, begin, until))
    cut.meta = {**meta_for_another(whole), "val": whole.meta["val"].new_empty(until - begin)}
    return cut
