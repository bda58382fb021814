"""Forward and backward graphs: send neighbouring buckets in one message where it costs nothing.

    before:  ag0 = all_gather(s0)    ag1 = all_gather(s1)
    after:   ag = all_gather_coalesced([s0, s1]); ag0, ag1 = ag

Units are split into several buckets so that the first matmul waits for a small one and the last
reduction is short; everywhere else a message for each would only add latency. Neighbours (in the
order of need) are merged greedily as long as the simulated step does not get longer: a message that
would delay a matmul stays apart. Coalesced ops leave every bucket in a tensor of its own, without a
copy. All-to-alls have no such op. Their messages are rows of a `cat`, so one `cat` writes both:

    before:  a2a0 = all_to_all(cat(a, b))    a2a1 = all_to_all(cat(c, d))
    after:   rows = all_to_all(cat(a, b, c, d));  a2a0, a2a1 = rows[:, :n], rows[:, n:]
"""

import operator
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch.fx import GraphModule, Node
from torch.fx.node import map_arg

from shardc.passes.context import PassContext
from shardc.passes.contract import contract
from shardc.passes.nodes import c10d, is_collective, kind_of, moved_by, ranks_in, set_moved
from shardc.passes.schedule.events import Events, Moving, read_events, read_problem
from shardc.passes.schedule.reorder import reorder
from shardc.passes.schedule.timeline import Problem, Transfer, plan_timeline, simulate

aten = torch.ops.aten

_COALESCED = {
    c10d.all_gather_into_tensor.default: c10d.all_gather_into_tensor_coalesced.default,
    c10d.reduce_scatter_tensor.default: c10d.reduce_scatter_tensor_coalesced.default,
}
SPEEDS = (0.7, 1.0, 1.4, 2.0)
"""A merge must not cost anything at any of these speeds of compute, as shares of the modelled one:
models are off by tens of per cent, and may hide a message that is exposed."""
_TOLERANCE = 1e-6
"""Seconds that a merged step may be longer: less than the model can tell."""


@contract(needs="one_wait movable")
def coalesce(gm: GraphModule, ctx: PassContext) -> GraphModule:
    """Merge collectives of `gm` into coalesced ones."""
    if ctx.options is None or not ctx.options.coalesce:
        return gm
    events = read_events(gm)
    if len(events.transfers) < 2:
        return gm
    problem = read_problem(gm, ctx, events)
    for group in plan_groups(problem, kinds_of(events)):
        if len(group) > 1:
            starts = [events.transfers[index].start for index in group]
            merge = _merge_rows if kind_of(starts[0]) == "all_to_all" else _merge
            merge(gm, starts)
    calls = gm.graph.nodes
    reorder(gm, {n: (i,) for i, n in enumerate(calls) if n.op == "call_function"})
    return gm


def kinds_of(events: Events) -> list[Any]:
    """The kinds of the transfers of a graph, for `plan_groups`."""
    return list(map(_kind, events.transfers))


def _kind(moving: Moving) -> Any:
    """The op, dtype and group of a collective: it may be merged with others that equal it in them.

    Any other transfer has a kind of its own.
    """
    start = moving.start
    if kind_of(start) == "all_to_all" and _has_rows(start):
        return start.target, start.meta["val"].dtype, start.args[-1]
    waits_first = moving.kind == "gather" and any(map(is_collective, moving.before))
    if start.target not in _COALESCED or waits_first:
        return object()
    return start.target, start.meta["val"].dtype, start.args[1:]  # the group is the last


# -- deciding ------------------------------------------------------------------------------------


def plan_groups(problem: Problem, kinds: Sequence[Any]) -> list[list[int]]:
    """Group the transfers of a problem, by their places: each group travels together.

    Only neighbours of equal `kinds` are merged, which has one entry a transfer.
    """
    transfers = problem.transfers
    groups = [[place] for place in range(len(transfers))]

    def fits(group: list[int]) -> bool:
        limit = problem.in_flight[transfers[group[0]].kind]
        return sum(transfers[place].nbytes for place in group) <= limit // 2

    best, number = seconds_of(problem, groups), 0
    while number + 1 < len(groups):
        left, right = groups[number : number + 2]
        both = [*left, *right]
        if kinds[left[0]] == kinds[right[0]] and fits(both):
            groups[number : number + 2] = [both]
            trial = seconds_of(problem, groups)
            if all(new <= old + _TOLERANCE for new, old in zip(trial, best, strict=True)):
                best = list(map(min, trial, best))
                continue
            groups[number : number + 1] = [left, right]
        number += 1
    return groups


def seconds_of(problem: Problem, groups: Sequence[Sequence[int]]) -> list[float]:
    """Seconds of a graph whose transfers travel in `groups`, at each of `SPEEDS`."""
    merged = (_merged([problem.transfers[place] for place in group]) for group in groups)
    trial = replace(problem, transfers=tuple(merged))
    timeline = plan_timeline(trial)
    return [simulate(trial, timeline, speed) for speed in SPEEDS]


def _merged(members: Sequence[Transfer]) -> Transfer:
    """The transfer of one message in the place of several, which pays its fixed part once."""
    events = [member.event for member in members]
    saved = sum(member.fixed for member in members[1:])
    return replace(
        members[0],
        event=min(events) if members[0].brings else max(events),
        nbytes=sum(member.nbytes for member in members),
        seconds=sum(member.seconds for member in members) - saved,
    )


# -- editing -------------------------------------------------------------------------------------


def _merge(gm: GraphModule, starts: list[Node]) -> None:
    """One coalesced op in place of the last of `starts`."""
    last = max(starts)
    target = _COALESCED[last.target]  # type: ignore[index]
    with gm.graph.inserting_after(last):
        inputs = [start.args[0] for start in starts]
        together = gm.graph.call_function(target, (inputs, *last.args[1:]))
    together.meta = {**last.meta, "val": [start.meta["val"] for start in starts]}
    set_moved(together, [moved for start in starts for moved in moved_by(start)])
    after = together
    for index, start in enumerate(starts):
        with gm.graph.inserting_after(after):
            after = gm.graph.call_function(operator.getitem, (together, index))
        after.meta = {k: v for k, v in start.meta.items() if k != "custom"}
        start.replace_all_uses_with(after)
        gm.graph.erase_node(start)


def _has_rows(start: Node) -> bool:
    """Whether an all-to-all sends the rows of a `cat`, one a rank, and is read as rows.

    All-to-alls among copies of the model follow other reductions, each at its own time.
    """
    message, (wait,) = start.all_input_nodes[0], start.users
    joined = message.all_input_nodes[0] if message.target == aten.view.default else None
    rows = [ranks_in(start), -1]
    return bool(
        joined is not None
        and joined.target == aten.cat.default
        and joined.args[1] == 1
        and all(user.target == aten.view.default and user.args[1] == rows for user in wait.users)
        and not any(moved.spec.reduction.replicas for moved in moved_by(start))
    )


def _merge_rows(gm: GraphModule, starts: list[Node]) -> None:
    """One all-to-all of longer rows in place of the last of `starts`."""
    last, ranks = max(starts), ranks_in(starts[0])
    joins = [start.all_input_nodes[0].all_input_nodes[0] for start in starts]
    moved = [moved for start in starts for moved in moved_by(start)]
    place = last

    def call(target: Any, *args: Any, like: Node) -> Node:
        nonlocal place
        with gm.graph.inserting_after(place):
            place = gm.graph.call_function(target, args)
        place.meta = {k: v for k, v in like.meta.items() if k != "custom"}
        place.meta["val"] = target(*map_arg(args, lambda node: node.meta["val"]))
        return place

    parts = [part for join in joins for part in join.args[0]]  # type: ignore[union-attr]
    joined = call(aten.cat.default, parts, 1, like=joins[-1])
    message = call(aten.view.default, joined, [-1], like=joins[-1])
    sizes = [joined.meta["val"].shape[1]] * ranks
    together = call(last.target, message, sizes, sizes, last.args[-1], like=last)
    wait = call(c10d.wait_tensor.default, together, like=next(iter(last.users)))
    for node in (together, wait):
        set_moved(node, moved)
    rows = call(aten.view.default, wait, [ranks, -1], like=wait)
    end = 0
    for start, join in zip(starts, joins, strict=True):
        begin, end = end, end + join.meta["val"].shape[1]
        (old_wait,) = start.users
        own = call(aten.slice.Tensor, rows, 1, begin, end, like=rows)
        for view in list(old_wait.users):
            view.replace_all_uses_with(own)
            gm.graph.erase_node(view)
        for node in (old_wait, start, start.all_input_nodes[0], join):
            gm.graph.erase_node(node)
