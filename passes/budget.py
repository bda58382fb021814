"""Joint graph: which buckets stay gathered from forward to backward, within a memory budget.

A trial partition with every open unit resharded shows how many units ahead gathers may run, and
the least memory the graph can run in. Room above that is spent on buckets that stay gathered: those
first whose gather takes longest per byte, and of equal ones those used last in the forward, because
they are held for the shortest time. Ranks keep what the tightest of them can.

Without a budget nothing is decided here: units reshard as they were told to.
"""

import copy
from collections.abc import Sequence
from dataclasses import dataclass, replace

from torch.fx import GraphModule, Node

from shardc.passes.context import (
    UNITS_IN_FLIGHT,
    Budget,
    PassContext,
    describe,
    is_all_gather,
    is_view,
    is_wait,
    position_of,
    reach,
    specs_of,
)
from shardc.passes.cost import collective_seconds, evaluate, symbol_hints, tensor_bytes
from shardc.passes.events import read_events
from shardc.passes.memory import Liveness, measure_liveness, segment_inputs
from shardc.passes.reshard import tag_reshard
from shardc.passes.shaping import SHAPING_PASSES
from shardc.runtime import compat


@dataclass(frozen=True)
class Candidate:
    """A bucket that may stay gathered: its input's position and what that costs and saves.

    `forward` and `backward` are the node ranges (first, last) during which it is held more.
    """

    position: int
    nbytes: int
    seconds: float
    forward: tuple[int, int]
    backward: tuple[int, int]


def choose_kept(gm: GraphModule, ctx: PassContext) -> GraphModule:
    """Set `ctx.kept` and `ctx.units_in_flight` within `ctx.budget`.

    Raises:
        RuntimeError: the budget is less than the graph needs with everything resharded and
            nothing gathered ahead.
    """
    budget = ctx.budget
    if budget is None or ctx.options is None:
        return gm
    ctx.kept = frozenset()
    room = budget.nbytes - budget.static
    facts = [
        str(budget),
        *(describe(n) for n in gm.graph.nodes if is_all_gather(n) and specs_of(n)),
    ]
    for ahead in range(UNITS_IN_FLIGHT, -1, -1):
        trial = _try(gm, ctx, ahead)
        if trial.peak <= room:
            break
    else:
        raise RuntimeError(_too_small(budget, trial))
    if ctx.agree_on_count is not None and (agreed := ctx.agree_on_count(facts, ahead)) < ahead:
        ahead, trial = agreed, _try(gm, ctx, agreed)
    ctx.units_in_flight = ahead
    candidates = sorted(
        _candidates(trial, ctx), key=lambda c: (-c.seconds / max(c.nbytes, 1), -c.forward[0])
    )
    count = choose_candidates(trial.before.live, trial.after.live, candidates, room)
    while count:  # what is kept moves other gathers, too: try it
        ctx.kept = frozenset(candidate.position for candidate in candidates[:count])
        if _try(gm, ctx, ahead).peak <= room:
            break
        count -= 1
    if ctx.agree_on_count is not None:
        count = ctx.agree_on_count([*facts, *(str(c.position) for c in candidates)], count)
    ctx.kept = frozenset(candidate.position for candidate in candidates[:count])
    return gm


@dataclass(frozen=True)
class Trial:
    """Forward and backward as they would be with every open unit resharded."""

    forward: GraphModule
    backward: GraphModule
    before: Liveness
    after: Liveness

    @property
    def peak(self) -> int:
        """The most that either holds."""
        return max(self.before.peak, self.after.peak)


def choose_candidates(
    forward: Sequence[int], backward: Sequence[int], candidates: Sequence[Candidate], room: int
) -> int:
    """How many of `candidates`, from the first on, may be held so that no point exceeds `room`."""
    curves = [list(forward), list(backward)]
    for count, candidate in enumerate(candidates):
        for curve, (first, last) in zip(
            curves, (candidate.forward, candidate.backward), strict=True
        ):
            for index in range(first, min(last + 1, len(curve))):
                curve[index] += candidate.nbytes
                if curve[index] > room:
                    return count
    return len(candidates)


def _try(gm: GraphModule, ctx: PassContext, ahead: int) -> Trial:
    """Partition and schedule a copy of `gm`, with gathers at most `ahead` units ahead."""
    assert ctx.budget is not None
    joint = tag_reshard(GraphModule(gm, copy.deepcopy(gm.graph)), ctx)
    outputs = gm.graph.output_node().args[0]
    assert isinstance(outputs, (list, tuple))
    primals = [n for n in gm.graph.find_nodes(op="placeholder") if "tangents" not in n.name]
    forward, backward = compat.min_cut_partition(
        joint, None, num_fwd_outputs=len(outputs) - len(primals)
    )
    trial = ctx.for_trial("forward", ahead)
    for graph, context in ((forward, trial), (backward, replace(trial, phase="backward"))):
        for step in SHAPING_PASSES:
            step(graph, context)
    fused, clones = ctx.budget.fused, ctx.budget.clones
    segments = segment_inputs(backward, ctx.units)
    return Trial(
        forward,
        backward,
        measure_liveness(forward, owns_inputs=False, fused=fused),
        measure_liveness(backward, owns_inputs=True, fused=fused, clones=clones, ignored=segments),
    )


def _candidates(trial: Trial, ctx: PassContext) -> list[Candidate]:
    """The buckets of open units that the backward gathers again."""
    assert ctx.options is not None
    hints = symbol_hints(trial.forward)
    again = {position: last for position, _, last in _gathered(trial.backward, ctx)}
    found = []
    end = len(trial.forward.graph.nodes)
    for position, wait, last in _gathered(trial.forward, ctx):
        if position in again:
            nbytes = int(evaluate(tensor_bytes(wait.meta["val"]), hints))
            spec = next(
                spec for n in reach(wait, lambda n: n.all_input_nodes) for spec in specs_of(n)
            )
            seconds = collective_seconds(nbytes, spec.world_size, ctx.options.profile)
            found.append(
                Candidate(position, nbytes, seconds, (last + 1, end), (0, again[position]))
            )
    return found


def _gathered(gm: GraphModule, ctx: PassContext) -> list[tuple[int, Node, int]]:
    """Every gathered bucket of an open unit: its position, its wait, its last reader's index."""
    order = _index(gm)
    found = []
    for transfer in read_events(gm, ctx).gathers:
        for wait in filter(is_wait, transfer.after):
            position = position_of(wait, ctx.open_positions)
            if position is not None:
                views = reach(wait, lambda n: [u for u in n.users if is_view(u)])
                readers = [order[u] for view in views for u in view.users if u in order]
                found.append((position, wait, max(readers, default=0)))
    return found


def _index(gm: GraphModule) -> dict[Node, int]:
    nodes = [node for node in gm.graph.nodes if node.op in ("placeholder", "call_function")]
    return {node: index for index, node in enumerate(nodes)}


def _too_small(budget: Budget, trial: Trial) -> str:
    forward = trial.before.peak > trial.after.peak
    worst, phase = (trial.before, "forward") if forward else (trial.after, "backward")
    return (
        f"memory_budget of {budget.nbytes:,} bytes is too small: with every unit resharded and "
        f"nothing gathered ahead a step needs at least {budget.static + worst.peak:,} bytes: "
        f"{budget.static:,} for segments and optimizer state, {worst.inputs:,} for tensors saved "
        f"for the backward, {worst.peak - worst.inputs:,} for values, gradients and gathered "
        f"buckets at '{worst.peak_node}' of the {phase}. Use more ranks, smaller units, a smaller "
        "batch or activation checkpointing"
    )
