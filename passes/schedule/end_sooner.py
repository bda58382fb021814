"""Backward graph: order the compute before the last reductions, so that less of them lies open.

    before:  dx; dw; rs_w; d_embedding; rs_embedding
    after:   dw; rs_w; dx; d_embedding; rs_embedding       (if rs_w would lie open)
    or:      dx; d_embedding; rs_embedding; dw; rs_w       (if rs_embedding would)

Messages that start after all compute are hidden by nothing. An order of the last reductions gives
an order of the compute before them: for each reduction, the ops that it needs and no earlier one
needed. The pass tries all orders of a few reductions with a small model, compute and one wire. The
best order is taken only if the planned backward is shorter at the modelled speed of compute, and on
average over `SPEEDS`, and peaks no higher in memory.

Ops run as before, so results are bitwise the same. Ranks agree on the order. With a memory budget
the pass does nothing: an op that runs later holds its operands longer.
"""

import itertools
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch.fx import GraphModule, Node

from shardc.passes.context import PassContext
from shardc.passes.contract import contract
from shardc.passes.estimate.cost import Registers, evaluate, node_seconds, symbol_hints
from shardc.passes.estimate.memory import measure_liveness
from shardc.passes.nodes import (
    computed_for,
    is_collective,
    is_random,
    is_view,
    is_wait,
    writes,
)
from shardc.passes.schedule.coalesce import SPEEDS, kinds_of, plan_groups, seconds_of
from shardc.passes.schedule.events import Events, Moving, read_events, read_problem
from shardc.passes.schedule.reorder import Key, reorder
from shardc.passes.schedule.timeline import Problem

MOST = 5
"""The most reductions that change places: all their orders are tried."""
LEAST = 1e-3
"""The share of its seconds that a backward must save to be reordered."""

Order = tuple[int, ...]
"""The last reductions by number, in the order in which they start."""


@contract(needs="one_wait movable")
def end_sooner(gm: GraphModule, ctx: PassContext) -> GraphModule:
    """Reorder the end of the backward `gm`, if it then ends sooner."""
    if ctx.phase != "backward" or ctx.options is None or ctx.budget is not None:
        return gm
    events = read_events(gm)
    reductions = events.of("reduce")
    if len(reductions) < 2:
        return gm
    end = _End.of(gm, events, reductions)
    starts, own = (each.start for each in reductions), _best(gm, ctx, events, end)
    order, *others = ctx.choices("the order of the last reductions", ctx.options, starts, own)
    if order is not None and not others:
        reorder(gm, end.keys(order))
    return gm


# -- deciding ------------------------------------------------------------------------------------


def plan_order(work: Mapping[frozenset[int], float], sent: Sequence[float]) -> Order:
    """The order of reductions in which the graph ends soonest, on average over `SPEEDS`.

    Args:
        work: seconds of compute, by the reductions that need it; compute for none comes last.
        sent: seconds on the wire of each reduction.
    """
    total = sum(work.values())

    def seconds(order: Order) -> float:
        ready, now, todo = [], 0.0, dict(work)
        for number in order:
            now += sum(todo.pop(needs) for needs in list(todo) if number in needs)
            ready.append(now)
        lengths = [sent[number] for number in order]
        return sum(end_of(ready, lengths, total, speed) for speed in SPEEDS)

    return min(itertools.permutations(range(len(sent))), key=seconds)


def end_of(
    ready: Sequence[float], sent: Sequence[float], total: float, speed: float = 1.0
) -> float:
    """Seconds until `total` compute is done and all reductions, one after the other, are sent."""
    arrived = 0.0
    for start, seconds in zip(ready, sent, strict=True):
        arrived = max(start / speed, arrived) + seconds
    return max(arrived, total / speed)


def _best(gm: GraphModule, ctx: PassContext, events: Events, end: "_End") -> Order | None:
    """The best order of the last reductions; None if the graph's own is as good."""
    merges, ctx = ctx.planned.coalesce, replace(ctx, agree_on_seconds=None)
    problem = read_problem(gm, ctx, events)
    sent = [each.seconds for each in problem.of("reduce")][-end.count :]
    least = LEAST * sum(problem.seconds)
    passed = [0.0, *itertools.accumulate(problem.seconds)]
    ready = [passed[each.event] for each in problem.of("reduce")][-end.count :]
    if end_of(ready, sent, passed[-1]) - passed[-1] <= least:
        return None
    order = plan_order(_work(gm, ctx, events, end), sent)
    before = _seconds(events, problem, merges)
    reorder(gm, end.keys(order))
    events = read_events(gm)
    after = _seconds(events, read_problem(gm, ctx, events), merges)
    saved = [old - new for old, new in zip(before, after, strict=True)]
    is_better = saved[SPEEDS.index(1.0)] > least and sum(saved) > 0
    peak = _peak(gm, ctx) if is_better else 0
    reorder(gm, end.as_it_was)
    return order if is_better and peak <= _peak(gm, ctx) else None


def _work(
    gm: GraphModule, ctx: PassContext, events: Events, end: "_End"
) -> dict[frozenset[int], float]:
    """Seconds of compute at the end of a graph, by the last reductions that need it."""
    profile, fused, hints = ctx.planned.profile, ctx.planned.fused, symbol_hints(gm)
    work, known = defaultdict[frozenset[int], float](float), Registers()
    for step in events.steps:
        seconds = evaluate(node_seconds(step, profile, fused, known), hints)
        if step in end.needs:
            work[end.needs[step]] += seconds
    return work


def _seconds(events: Events, problem: Problem, merges: bool) -> list[float]:
    """Seconds of a graph at each of `SPEEDS`, once it is scheduled, and coalesced with `merges`."""
    kinds = kinds_of(events) if merges else [object() for _ in events.transfers]
    return seconds_of(problem, plan_groups(problem, kinds))


def _peak(gm: GraphModule, ctx: PassContext) -> int:
    """The most bytes that a graph holds, before it is scheduled."""
    fused, clones = ctx.planned.fused, ctx.planned.clones
    return measure_liveness(gm, owns_inputs=True, fused=fused, clones=clones).peak


# -- editing -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _End:
    """The end of a graph, whose nodes may change places.

    Attributes:
        count: the number of the last reductions.
        needs: by node of the end, the last reductions that need it or that it belongs to.
        as_it_was: keys of all nodes, for the order of the graph.
    """

    count: int
    needs: Mapping[Node, frozenset[int]]
    as_it_was: Mapping[Node, Key]

    @staticmethod
    def of(gm: GraphModule, events: Events, reductions: list[Moving]) -> "_End":
        """The end behind all other reductions, and behind ops that must keep their order."""
        last, others = reductions[-MOST:], reductions[:-MOST]
        kept = [index + 1 for index, step in enumerate(events.steps) if not _may_move(step)]
        first = max([0, *kept, *(each.step for each in others)])
        nodes = [node for node in gm.graph.nodes if node.op == "call_function"]
        index = {node: number for number, node in enumerate(nodes)}
        begin = index[events.steps[first]] if first < len(events.steps) else len(nodes)
        own = [{*computed_for(each.start), each.start, *each.after} for each in last]
        needs = {
            node: frozenset(number for number, needed in enumerate(own) if node in needed)
            for node in nodes[begin:]
        }
        return _End(len(last), needs, {node: (0, number) for node, number in index.items()})

    def keys(self, order: Order) -> dict[Node, Key]:
        """Keys that put each node before the first reduction of `order` that needs it."""
        place = {number: index for index, number in enumerate(order, 1)}
        own = {
            node: (min((place[each] for each in needs), default=len(order) + 1),)
            for node, needs in self.needs.items()
        }
        return {node: (*own.get(node, (0,)), key[1]) for node, key in self.as_it_was.items()}


def _may_move(step: Node) -> bool:
    """Whether a step only computes a value from its operands, tensors or sizes."""
    if is_collective(step) or is_wait(step) or is_random(step):
        return False
    return writes(step) is False or is_view(step) or _is_size(step.meta.get("val"))


def _is_size(value: object) -> bool:
    """Whether a value is a number, perhaps symbolic: some ranks alone may compute it."""
    return isinstance(value, (int, float, torch.SymInt, torch.SymFloat, torch.SymBool))
