"""Joint graph: which buckets stay gathered from forward to backward, within a memory budget.

A trial partition with every open unit resharded shows how many units ahead gathers may run, and
the least memory the graph can run in. Room above that is spent on buckets that stay gathered: those
first whose gather takes longest per byte, and of equal ones those used last in the forward, because
they are held for the shortest time. Ranks keep what the tightest of them can.

Without a budget nothing is decided here: units reshard as they were told to.
"""

import copy
import logging
from collections.abc import Sequence
from dataclasses import dataclass, replace

from torch.fx import GraphModule, Node

from shardc.passes import pipeline
from shardc.passes.context import (
    UNITS_IN_FLIGHT,
    Budget,
    Kept,
    PassContext,
    describe,
    is_all_gather,
    is_view,
    moved_by,
    our_collectives,
    reach,
    waits_for,
)
from shardc.passes.cost import collective_seconds, evaluate, symbol_hints, tensor_bytes
from shardc.passes.events import read_events
from shardc.passes.memory import Liveness, measure_liveness
from shardc.passes.runner import run_passes
from shardc.runtime import compat
from shardc.runtime.layout.spec import Moved

log = logging.getLogger("shardc")


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


def choose_kept(gm: GraphModule, ctx: PassContext) -> Kept:
    """What `ctx.budget` has room for.

    Raises:
        RuntimeError: the budget is less than the graph needs with everything resharded and
            nothing gathered ahead.
    """
    budget = ctx.budget
    if budget is None or ctx.options is None:
        return Kept()
    room = budget.nbytes - budget.static

    def facts(by_number: bool) -> list[str]:
        gathers = filter(is_all_gather, our_collectives(gm))
        return [str(budget), *(describe(node, by_number) for node in gathers)]

    for ahead in range(UNITS_IN_FLIGHT, -1, -1):
        kept = Kept(ctx.open_positions, ahead=ahead)
        trial = _try(gm, ctx, kept)
        if trial.peak <= room:
            break
    else:
        raise RuntimeError(_too_small(budget, trial))
    own_ahead = ahead
    if ctx.agree_on_count is not None and (ahead := ctx.agree_on_count(facts, ahead)) != own_ahead:
        kept = replace(kept, ahead=ahead)
        trial = _try(gm, ctx, kept)
    candidates = sorted(
        _candidates(trial, ctx), key=lambda c: (-c.seconds / max(c.nbytes, 1), -c.forward[0])
    )
    count = choose_candidates(trial.before.live, trial.after.live, candidates, room)
    # What is kept moves other gathers, too: try it.
    while count and _try(gm, ctx, _with_first(candidates, count, kept)).peak > room:
        count -= 1
    own_count = count
    if ctx.agree_on_count is not None:
        positions = [str(candidate.position) for candidate in candidates]
        count = ctx.agree_on_count(lambda by_number: [*facts(by_number), *positions], count)
    kept = _with_first(candidates, count, kept)
    if ahead > own_ahead or count > own_count:
        log.warning(
            "memory_budget: a graph may hold %d bytes, its budget is %d: ranks have agreed on what "
            "stays gathered when they compiled for other sizes",
            _try(gm, ctx, kept).peak + budget.static,
            budget.nbytes,
        )
    return kept


def _with_first(candidates: Sequence[Candidate], count: int, kept: Kept) -> Kept:
    """`kept` with the first `count` of `candidates`."""
    return replace(kept, positions=frozenset(c.position for c in candidates[:count]))


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


def _try(gm: GraphModule, ctx: PassContext, kept: Kept) -> Trial:
    """Partition and schedule a copy of `gm`; ranks do not agree on what it is planned with."""
    assert ctx.budget is not None
    joint = replace(ctx, kept=kept, number=None, agree_on_seconds=None, agree_on_count=None)
    tagged = run_passes(GraphModule(gm, copy.deepcopy(gm.graph)), joint, pipeline.JOINT_PASSES)
    forward, backward = compat.min_cut_partition(tagged, None, num_fwd_outputs=ctx.results)
    for phase, graph in (("forward", forward), ("backward", backward)):
        run_passes(graph, replace(joint, phase=phase), pipeline.GRAPH_PASSES)
    fused, clones = ctx.budget.fused, ctx.budget.clones
    return Trial(
        forward,
        backward,
        measure_liveness(forward, owns_inputs=False, fused=fused),
        measure_liveness(backward, owns_inputs=True, fused=fused, clones=clones),
    )


def _candidates(trial: Trial, ctx: PassContext) -> list[Candidate]:
    """The buckets of open units that the backward gathers again."""
    assert ctx.options is not None
    hints = symbol_hints(trial.forward)
    again = {moved: last for moved, _, last in _gathered(trial.backward, ctx)}
    found = []
    end = len(trial.forward.graph.nodes)
    for moved, wait, last in _gathered(trial.forward, ctx):
        if moved in again:
            nbytes = int(evaluate(tensor_bytes(wait.meta["val"]), hints))
            seconds = collective_seconds(nbytes, moved.spec.world_size, ctx.options.profile)
            held = ((last + 1, end), (0, again[moved]))
            found.append(Candidate(moved.position, nbytes, seconds, *held))
    return found


def _gathered(gm: GraphModule, ctx: PassContext) -> list[tuple[Moved, Node, int]]:
    """Every gathered bucket of an open unit: its wait, and its last reader's index."""
    order = _index(gm)
    found = []
    for transfer in read_events(gm).gathers:
        waits = waits_for(transfer.start)
        for moved, wait in zip(moved_by(transfer.start), waits, strict=True):
            if moved.position in ctx.open_positions:
                views = reach(lambda n: [u for u in n.users if is_view(u)], wait)
                readers = [order[u] for view in views for u in view.users if u in order]
                found.append((moved, wait, max(readers, default=0)))
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
        f"{budget.static:,} for segments, optimizer state and workspaces, {worst.inputs:,} for "
        f"tensors saved for the backward, {worst.peak - worst.inputs:,} for values, gradients and "
        f"gathered buckets at '{worst.peak_node}' of the {phase}. Use more ranks, smaller units, "
        "a smaller batch or activation checkpointing"
    )
