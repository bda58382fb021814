"""Joint graph: decide whether the backward finds gathered weights saved, or gathers again.

A unit that reshards after its forward must leave no gathered weight among the saved tensors. So the
pass tags its gather to be recomputed, with all values computed from gathered weights alone (views,
casts, transposes, scales that were computed for the gather) and the cast of the segment before the
gather. The backward then gathers again from the segment. For a unit that does not reshard, the
forward saves the whole gathered bucket, one tensor, and the backward takes views of it anew.

For a unit that reshards to fewer ranks, a rank saves its part among these ranks, and the backward
gathers the parts:

    before:  wait -> views -> uses
    after:   wait -> recut -> all_gather (smaller group) -> wait -> views -> uses

The forward saves `recut`, and the backward recomputes the nodes after it. Both waits have the same
value. So the forward graph reads the first wait (`drop_second_gathers`), and only the backward has
the second gather.

The partitioner does the rest; the tags are the tags of activation checkpointing.
"""

import torch
from torch import Tensor
from torch.fx import GraphModule, Node
from torch.utils.checkpoint import CheckpointPolicy

from shardc.passes.context import PassContext
from shardc.passes.contract import contract
from shardc.passes.nodes import (
    FETCH,
    c10d,
    computed_for,
    is_all_gather,
    is_random,
    is_view,
    is_wait,
    meta_for_another,
    moved_by,
    prepares,
    reach,
    results_of,
)
from shardc.passes.rewrite.recompute import tag


@contract(needs="gathers", gives="tags")
def tag_reshard(gm: GraphModule, ctx: PassContext) -> GraphModule:
    """Tag gathered weights, and values computed from them alone, as recomputed or saved."""
    resharded: dict[Node, bool] = {}
    views: set[Node] = set()  # of gathered buckets
    parts = _gather_among_fewer(gm)
    prepared: set[Node] = set()  # computed from a segment alone, for a gather
    for node in gm.graph.nodes:
        if node.op != "call_function" or node in parts:
            continue
        if is_all_gather(node) and moved_by(node):
            resharded[node] = any(map(ctx.kept.reshards, moved_by(node)))
            prepared |= prepares(node)
            continue
        gathered = [i for i in node.all_input_nodes if i in resharded or i in parts]
        if gathered and all(i in prepared or i in gathered for i in node.all_input_nodes):
            if is_random(node):
                continue
            resharded[node] = any(resharded.get(i, True) for i in gathered)
            if is_wait(node) or (is_view(node) and views.issuperset(node.all_input_nodes)):
                views.add(node)
    for node, reshard in resharded.items():
        if reshard or (node in views and not is_wait(node)):
            tag(node, CheckpointPolicy.MUST_RECOMPUTE)
        elif is_wait(node):
            tag(node, CheckpointPolicy.MUST_SAVE)
        if reshard and is_all_gather(node) and not prepares(node):
            # A cast, or codes and scales. Smaller than the segment, they would be saved.
            for made in computed_for(node):
                tag(made, CheckpointPolicy.MUST_RECOMPUTE)
    for part in parts:
        tag(part, CheckpointPolicy.MUST_SAVE)
    for fetch in gm.graph.find_nodes(op="call_function", target=FETCH):
        for found in results_of(fetch)[1:]:  # to fetch again would cost messages
            for wait in found.users:
                tag(wait, CheckpointPolicy.MUST_SAVE)
    _recompute_views_of_inputs(gm)
    return gm


def _recompute_views_of_inputs(gm: GraphModule) -> None:
    """Recompute views of inputs that checkpoints read, where an input is a whole gathered bucket.

    Reads outside of checkpoints take the same views, and the partitioner merges equal nodes. It
    would then have to save the list that a split returns.
    """
    for given in gm.graph.find_nodes(op="placeholder"):
        if not isinstance(given.meta.get("val"), Tensor):
            continue  # a size, which views of any value may take
        views = reach(lambda node: filter(is_view, node.users), *filter(is_view, given.users))
        if any("recompute" in view.meta for view in views):
            for view in views:
                tag(view, CheckpointPolicy.MUST_RECOMPUTE)


def _gather_among_fewer(gm: GraphModule) -> list[Node]:
    """Cut and gather again after every gather of a re-cut bucket; return the `recut` nodes."""
    graph, parts = gm.graph, []
    for start in filter(is_all_gather, list(graph.nodes)):
        recut = next((moved.spec.recut for moved in moved_by(start)), None)
        if recut is None:
            continue
        ranks, group = recut
        (wait,) = start.users
        readers = list(wait.users)
        with graph.inserting_after(wait):
            part = graph.call_function(torch.ops.shardc.recut.default, (wait, ranks, group))
        with graph.inserting_after(part):
            again = graph.call_function(c10d.all_gather_into_tensor.default, (part, ranks, group))
        with graph.inserting_after(again):
            ready = graph.call_function(c10d.wait_tensor.default, (again,))
        value = wait.meta["val"]
        part.meta = {**meta_for_another(wait), "val": value.new_empty(value.numel() // ranks)}
        again.meta, ready.meta = meta_for_another(start), meta_for_another(wait)
        for reader in readers:
            reader.replace_input_with(wait, ready)
        parts.append(part)
    return parts


@contract(needs="tags one_wait")
def drop_second_gathers(gm: GraphModule, ctx: PassContext) -> GraphModule:
    """Forward graph: erase the second gather of a re-cut bucket; its readers read the first."""
    for part in gm.graph.find_nodes(op="call_function", target=torch.ops.shardc.recut.default):
        for again in [user for user in part.users if is_all_gather(user)]:
            (ready,) = again.users
            ready.replace_all_uses_with(part.args[0])
            gm.graph.erase_node(ready)
            gm.graph.erase_node(again)
    return gm
