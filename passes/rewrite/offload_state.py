"""Forward and backward graph: the optimizer's state of chosen buckets waits on the host.

    forward:   ... return y, x
    becomes:   sent = send_state(segment); s = wait_until_state_sent(sent) ... return y, s, x
    backward:  x ... return gradient
    becomes:   s, x ... fetch_state(s) return gradient

`s` is a number. The pass edits both graphs right after the partitioner. `schedule` moves the wait
to a place at which the state has arrived on the host, and the fetch to a place from which the state
is back in time for the optimizer's step.
"""

from torch.fx import GraphModule, Node

from shardc.passes.context import PassContext
from shardc.passes.contract import contract
from shardc.passes.nodes import (
    COPIED_FOR,
    FETCH_STATE,
    SEND_STATE,
    STATE_BYTES,
    WAIT_STATE,
    is_all_gather,
    moved_by,
    note,
    our_collectives,
    returned_and_saved,
)

_SUFFIX = "_state"


@contract(needs="tags")
def offload_state(forward: GraphModule, backward: GraphModule, ctx: PassContext) -> None:
    """Move the state of the buckets in `ctx.kept.states` to the host in the forward, and back
    before the backward ends."""
    first = _first_saved(forward, backward, ctx)
    if first is None or ctx.options is None:
        return
    last, given = forward.graph.find_nodes(op="placeholder")[-1], first[1]
    for position, (segment, label) in segments_of(forward).items():
        if position not in ctx.kept.states:
            continue
        nbytes = ctx.options.states[position]
        with forward.graph.inserting_after(last):
            send = forward.graph.call_function(SEND_STATE, (segment,))
        with forward.graph.inserting_after(send):
            last = wait = forward.graph.create_node(
                "call_function", WAIT_STATE, (send,), name=segment.name + _SUFFIX
            )
        with backward.graph.inserting_before(given):
            saved = backward.graph.placeholder(wait.name)
        with backward.graph.inserting_before(backward.graph.output_node()):
            fetch = backward.graph.call_function(FETCH_STATE, (saved,))
        for node in (send, wait, saved):
            node.meta["val"] = SEND_STATE(segment.meta["val"])
        for node in (send, wait, fetch):
            note(node, STATE_BYTES, nbytes)
            note(node, COPIED_FOR, label)
        _save(forward, wait, first[0], ctx)


def _first_saved(
    forward: GraphModule, backward: GraphModule, ctx: PassContext
) -> tuple[Node, Node] | None:
    """The first value that the forward saves: its node there, and its input of the backward."""
    _, saved = returned_and_saved(forward, ctx.results)
    given = {node.name: node for node in backward.graph.find_nodes(op="placeholder")}
    return next(((node, given[node.name]) for node in saved if node.name in given), None)


def segments_of(forward: GraphModule) -> dict[int, tuple[Node, str]]:
    """The segments that a forward gathers and the names of their buckets, by input."""
    found: dict[int, tuple[Node, str]] = {}
    for gather in filter(is_all_gather, our_collectives(forward)):
        for moved, node in zip(moved_by(gather), _gathered(gather), strict=False):
            while node.all_input_nodes:
                node = node.all_input_nodes[0]
            if node.op == "placeholder":
                found.setdefault(moved.position, (node, moved.label))
    return found


def _gathered(gather: Node) -> list[Node]:
    """The tensors that a gather sends, one for each bucket."""
    given = gather.args[0]
    each = given if isinstance(given, (list, tuple)) else [given]
    return [node for node in each if isinstance(node, Node)]


def _save(forward: GraphModule, wait: Node, first: Node, ctx: PassContext) -> None:
    """Save the result of a wait, before `first` among the saved values."""
    output = forward.graph.output_node()
    outputs = output.args[0]
    assert isinstance(outputs, (list, tuple)) and ctx.results is not None
    place = outputs.index(first, ctx.results)
    output.args = (type(outputs)([*outputs[:place], wait, *outputs[place:]]),)
