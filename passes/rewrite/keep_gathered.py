"""Forward and backward graph: save a gathered bucket in the place of its segment.

    forward:   ag = all_gather(segment); w = wait(ag) ... return y, segment
    becomes:   ag = all_gather(segment); w = wait(ag) ... return y, w
    backward:  ag = all_gather(segment); w = wait(ag) ... f(w)
    becomes:   f(w)

The pass edits both graphs right after the partitioner, for buckets that stay gathered by a decision
that needs both halves (`choose_read_first`).
"""

from dataclasses import dataclass

from torch.fx import GraphModule, Node

from shardc.passes.context import PassContext
from shardc.passes.contract import contract
from shardc.passes.nodes import (
    c10d,
    computed_for,
    is_all_gather,
    meta_for_another,
    moved_by,
    our_collectives,
    returned_and_saved,
    waits_for,
)
from shardc.runtime.layout.spec import Moved, UnshardSpec

_SUFFIX = "_kept"


@dataclass(frozen=True)
class GatheredTwice:
    """A bucket that a forward gathers, and its backward from the same segment again.

    Attributes:
        moved: the bucket.
        wait: of the forward, the wait for the gathered bucket.
        again: of the backward, the start of the gather.
        given: of the backward, the input with the segment, which nothing else reads.
    """

    moved: Moved
    wait: Node
    again: Node
    given: Node


def gathered_twice(
    forward: GraphModule, backward: GraphModule, again: Node, results: int | None
) -> GatheredTwice | None:
    """The bucket of a gather `again` of the backward, if the forward could save it gathered.

    Args:
        results: the number of results of the forward (`PassContext.results`).
    """
    if again.target is not c10d.all_gather_into_tensor.default or len(waits_for(again)) != 1:
        return None
    (moved,) = moved_by(again)
    first = [
        node
        for node in our_collectives(forward)
        if node.target is again.target and moved_by(node) == (moved,) and len(waits_for(node)) == 1
    ]
    own = {again, *computed_for(again)}
    inputs = {node for each in own for node in each.all_input_nodes} - own
    if len(first) != 1 or len(inputs) != 1 or not _is_plain(moved.spec):
        return None
    (given,) = inputs
    returned, saved = returned_and_saved(forward, results)
    if not own.issuperset(given.users) or [node.name for node in saved].count(given.name) != 1:
        return None
    (wait,) = waits_for(first[0])
    return None if wait in returned else GatheredTwice(moved, wait, again, given)


def _is_plain(spec: UnshardSpec) -> bool:
    """Whether a message is the segment, perhaps cast."""
    return not (spec.extension or spec.wire or spec.device or spec.recut)


@contract(needs="tags")
def keep_gathered(forward: GraphModule, backward: GraphModule, ctx: PassContext) -> None:
    """Save the buckets of `ctx.kept.positions` gathered that the backward would gather again."""
    for again in filter(is_all_gather, our_collectives(backward)):
        if any(moved.position in ctx.kept.positions for moved in moved_by(again)):
            twice = gathered_twice(forward, backward, again, ctx.results)
            if twice is not None:
                _keep(forward, backward, twice)


def _keep(forward: GraphModule, backward: GraphModule, twice: GatheredTwice) -> None:
    again, given = twice.again, twice.given
    (old,) = waits_for(again)
    twice.wait.name += _SUFFIX  # the halves know a saved value by its name
    output = forward.graph.output_node()
    outputs = output.args[0]
    assert isinstance(outputs, (list, tuple))
    saved = max(at for at, each in enumerate(outputs) if getattr(each, "name", "") == given.name)
    output.args = (tuple(twice.wait if at == saved else each for at, each in enumerate(outputs)),)
    with backward.graph.inserting_before(given):
        new = backward.graph.placeholder(twice.wait.name)
    new.meta = meta_for_another(old)
    old.replace_all_uses_with(new)
    for node in (old, again, *sorted(computed_for(again), reverse=True), given):
        backward.graph.erase_node(node)
