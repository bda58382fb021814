"""Both halves: does the bucket that the backward reads first stay gathered?

The forward reads it last. Resharded between, it is gathered again at once, behind nothing but the
loss. With the option `keep_read_first`, it stays gathered if

- the loss is in the graph, so that the backward follows the forward;
- its gather takes longer than the compute before its first reader in the backward;
- the step peaks no higher in memory. (The gather would start with the backward, so the bucket is
  held there in any case.)

`keep_gathered` edits the halves. Ranks agree.
"""

from dataclasses import replace

from torch import Tensor
from torch.fx import GraphModule

from shardc.passes.budget.trial import Phase
from shardc.passes.context import Kept, PassContext
from shardc.passes.estimate.cost import evaluate, symbol_hints, tensor_bytes
from shardc.passes.nodes import is_all_gather, is_view, our_collectives, reach, returned_and_saved
from shardc.passes.rewrite.keep_gathered import GatheredTwice, gathered_twice


def choose_read_first(forward: GraphModule, backward: GraphModule, ctx: PassContext) -> Kept:
    """Add the bucket that `backward` reads first to `ctx.kept`, if it is to stay gathered."""
    if ctx.options is None or not _has_loss(forward, ctx):
        return ctx.kept
    first = Phase(forward, replace(ctx, phase="forward"))
    own = replace(ctx, phase="backward", agree_on_seconds=None)
    then = Phase(backward, own, first.liveness.storages)
    for gather, sent in zip(then.events.of("gather")[:1], then.problem.of("gather"), strict=False):
        twice = gathered_twice(forward, backward, gather.start, ctx.results)
        if twice is None or twice.moved.position not in ctx.open_positions:
            break
        stays = sum(then.problem.seconds[: sent.event]) < sent.seconds
        stays = stays and _fits(first, then, twice)
        gathers = filter(is_all_gather, our_collectives(backward))
        if all(ctx.choices(_SUBJECT, ctx.options, gathers, stays)):
            one = frozenset({twice.moved.position})
            return replace(ctx.kept, among=ctx.kept.among | one, positions=ctx.kept.positions | one)
    return ctx.kept


_SUBJECT = "whether the bucket that the backward reads first stays gathered"


def _has_loss(forward: GraphModule, ctx: PassContext) -> bool:
    """Whether all floating-point results of a forward have one element."""
    given = [node.meta.get("val") for node in returned_and_saved(forward, ctx.results)[0]]
    floats = [each for each in given if isinstance(each, Tensor) and each.is_floating_point()]
    return bool(floats) and all(each.numel() == 1 for each in floats)


def _fits(first: Phase, then: Phase, twice: GatheredTwice) -> bool:
    """Whether a step peaks no higher if a bucket is held from its last reader in the forward on."""
    nbytes = int(evaluate(tensor_bytes(twice.wait.meta["val"]), symbol_hints(first.gm)))
    views = reach(lambda node: filter(is_view, node.users), twice.wait)
    readers = (first.places.get(user, 0) for view in views for user in view.users)
    before, after = first.liveness.live, then.liveness.live
    start, last = then.places[twice.again], max(readers)
    peak = max(*before, *(live + nbytes for live in after[:start]), *after[start:])
    return max(before[last + 1 :], default=0) + nbytes <= peak
