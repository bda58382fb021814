"""Joint graph: decide what the backward finds of the gathered weights.

A unit that reshards after its forward must leave no gathered weight among the saved tensors: its
gather, and everything computed from gathered weights alone (views, casts, transposes, scales that
were computed for the gather), is tagged to be recomputed, so the backward gathers again from the
segment; so is what the segment was cast to for the gather. A unit that does not reshard has its
whole gathered bucket saved, one tensor, and views of it are taken anew.

A unit that reshards to fewer ranks keeps this rank's part among them and gathers that:

    before:  wait -> views -> uses
    after:   wait -> recut -> all_gather (smaller group) -> wait -> views -> uses

where `recut` is saved and what follows is recomputed. It is the same value, so the forward graph
goes on with the first wait (`drop_second_gathers`), and only the backward has the second gather.

The partitioner does the rest; the tags are those of activation checkpointing.
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
    """Tag gathered weights, and what depends on nothing else, as recomputed or saved."""
    resharded: dict[Node, bool] = {}
    views: set[Node] = set()  # of gathered buckets
    parts = _gather_among_fewer(gm)
    prepared: set[Node] = set()  # of a segment alone, for a gather
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
            # A cast, or codes and scales: smaller than the segment, the partitioner would keep it.
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
    """Recompute views of inputs that checkpoints read: of a bucket that is given whole.

    Reads outside of checkpoints take the same ones, and the partitioner merges what is equal: it
    would have to save the list that a split is.
    """
    for given in gm.graph.find_nodes(op="placeholder"):
        if not isinstance(given.meta.get("val"), Tensor):
            continue  # a size, which views of anything may have
        views = reach(lambda node: filter(is_view, node.users), *filter(is_view, given.users))
        if any("recompute" in view.meta for view in views):
            for view in views:
                tag(view, CheckpointPolicy.MUST_RECOMPUTE)


def _gather_among_fewer(gm: GraphModule) -> list[Node]:
    """After every gather of a bucket that is re-cut, cut and gather again; the `recut` nodes."""
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
    """Forward graph: read the first gather where a re-cut bucket is gathered again."""
    for part in gm.graph.find_nodes(op="call_function", target=torch.ops.shardc.recut.default):
        for again in [user for user in part.users if is_all_gather(user)]:
            (ready,) = again.users
            ready.replace_all_uses_with(part.args[0])
            gm.graph.erase_node(ready)
            gm.graph.erase_node(again)
    return gm
