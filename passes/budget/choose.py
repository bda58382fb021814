"""Joint graph: a memory budget chooses buckets to keep, values to compute again, host copies.

A trial with every open unit resharded shows the least that stays saved, for a number of units that
may be gathered ahead. Beside it lie the choices (`tradeoff`): values that the backward computes
again free memory and cost compute, copies to the host free memory and cost its link, buckets that
stay gathered hold memory and save the wire. The choice with the shortest step that fits is tried.
If it holds more than its estimate, the next one is tried, and last the one that holds least. This
is done for each number of units ahead, until the estimate of none is shorter.

Ranks follow the one with the least room. When sizes grow, they keep to its choice, and compute more
values again. Without a budget nothing is decided: the user's settings say which units reshard, the
partitioner which values are saved.
"""

import functools
import logging
import math
import operator
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Any, TypeVar

from torch.fx import GraphModule

from shardc.passes.budget.growth import bound_sizes, dynamic_sizes
from shardc.passes.budget.offloadable import Offload
from shardc.passes.budget.recomputable import Recompute
from shardc.passes.budget.tradeoff import Choice, Tradeoff
from shardc.passes.budget.trial import Trial, run_trial
from shardc.passes.context import UNITS_IN_FLIGHT, Budget, Kept, NotAgreed, PassContext
from shardc.passes.nodes import is_all_gather, our_collectives
from shardc.runtime.checks.words import plural

log = logging.getLogger("shardc")

_TRIALS = 5
"""A budget tries so many choices, each chosen with the error of the last trial added."""
_SPARE = 0.02
"""A larger choice follows one that holds less than its estimate, by this share of the room."""
_WORTH = 0.01
"""Another number of units ahead must be faster by this share: trials are no more exact."""


class BudgetTooSmall(RuntimeError):
    """A memory budget is less than a graph needs.

    Attributes:
        least: the smallest that would do, in bytes.
    """

    def __init__(self, text: str, least: int) -> None:
        super().__init__(text)
        self.least = least


def choose_kept(gm: GraphModule, ctx: PassContext) -> Kept:
    """Choose within `ctx.budget`; the choice of all ranks.

    Raises:
        BudgetTooSmall: the budget is less than the graph needs with everything resharded,
            everything computed again that may be, and nothing gathered ahead; or less than it
            needs with the choice that ranks agreed on for other sizes.
    """
    budget = ctx.budget
    if budget is None or ctx.options is None:
        return Kept()
    room = budget.room
    tradeoff = tradeoff_of(gm, ctx, UNITS_IN_FLIGHT)
    first, estimates = tradeoff.fastest(room), [(0.0, tradeoff)]
    if first is None or first.recomputed or first.offloaded or first.states:
        # It may be faster to gather fewer units ahead.
        tradeoffs = [tradeoff, *(tradeoff_of(gm, ctx, ahead) for ahead in range(UNITS_IN_FLIGHT))]
        estimates = [(each.least_seconds(room), each) for each in tradeoffs]
        estimates.sort(key=operator.itemgetter(0))
    found: Trial | None = None
    lean: list[Trial] = []
    for seconds, each in estimates:
        wanted = math.inf if found is None else found.seconds * (1 - _WORTH)
        if found is not None and seconds >= wanted:
            break  # so are the estimates of those that follow
        trial = _fitting(gm, ctx, each, room)
        if trial.peak > room:
            lean.append(trial)
        elif trial.seconds < wanted:
            tradeoff, found = each, trial
    if found is None:
        fewest = min((each for _, each in estimates), key=lambda each: each.trial.kept.ahead)
        least = min(lean, key=lambda each: each.kept.ahead)
        raise BudgetTooSmall(
            _too_small(budget, least) + _beside_the_host(budget, fewest), budget.needed(least.peak)
        )
    own = found.kept
    agreed = own if ctx.agree_on_choice is None else _agree(gm, ctx, tradeoff, own)
    if agreed != own:
        agreed = _as_agreed(gm, ctx, agreed, budget)
    if dynamic_sizes(gm):
        bound_sizes(run_trial(gm, ctx, agreed), room)
    return agreed


def _as_agreed(gm: GraphModule, ctx: PassContext, agreed: Kept, budget: Budget) -> Kept:
    """The choice that ranks agreed on, with more values computed again if sizes have grown. Raises
    BudgetTooSmall."""
    trial = run_trial(gm, ctx, agreed)
    if trial.peak > budget.room:
        more = _recompute_more(gm, ctx, agreed, budget.room)
        if more is None:
            said = "memory_budget: a graph may hold %s with the choices of all ranks, not %s"
            log.warning(said, budget.shown(trial.peak + budget.static), budget)
        elif more.peak > budget.room:
            raise BudgetTooSmall(_grown(budget, more), budget.needed(more.peak))
        else:
            return more.kept
    return agreed


def _recompute_more(gm: GraphModule, ctx: PassContext, agreed: Kept, room: int) -> Trial | None:
    """Add kinds of values that are computed again to `agreed`, until it holds `room` bytes at most.

    Ranks agreed on the choice when they compiled the graph first. A rank that compiles it anew for
    larger sizes may be alone, so it leaves out a kind with which it would send other collectives.

    Returns:
        The trial that fits, or the one that holds least; None where ranks agreed on nothing yet.
    """

    def tried(kept: Kept) -> Trial | None:
        try:
            return run_trial(gm, ctx, kept, ctx.recall)
        except NotAgreed:
            return None

    tradeoff = tradeoff_of(gm, ctx, agreed.ahead)
    values = _staying(tradeoff, agreed.offloaded)
    best = tried(agreed)
    for kind, number in _kinds(values).items():
        if best is None or best.peak <= room:
            break
        counts = Counter(best.kept.recomputes) | Counter({kind: number})
        trial = tried(replace(best.kept, **_recomputing(values, counts)))
        if trial is not None and trial.peak <= best.peak:
            best = trial
    return best


def tradeoff_of(gm: GraphModule, ctx: PassContext, ahead: int) -> Tradeoff:
    """The choices with so many units gathered ahead."""
    return Tradeoff.of(run_trial(gm, ctx, Kept(ctx.open_positions, ahead=ahead)))


def _fitting(gm: GraphModule, ctx: PassContext, tradeoff: Tradeoff, room: int) -> Trial:
    """The trial of the fastest choice that fits; the one that holds least if none fits."""
    base, tight, found = tradeoff.trial, room, None
    for _ in range(_TRIALS):
        choice = tradeoff.fastest(tight)
        if choice is None:
            break
        trial = run_trial(gm, ctx, _kept(tradeoff, choice)) if choice != Choice() else base
        estimate = tradeoff.peak(choice)
        if trial.peak > room:
            if found is not None:
                break
            tight = _tighter(room, base.peak, estimate, trial.peak)
        else:
            if found is not None and found.seconds <= trial.seconds:
                break
            found, roomier = trial, room + estimate - trial.peak
            if roomier - tight < _SPARE * room:
                break
            tight = roomier
    if found is not None or base.peak <= room:
        return found or base
    lean = tradeoff.leanest - {Choice()}  # of nothing: `base`
    tried = [run_trial(gm, ctx, _kept(tradeoff, choice)) for choice in lean]
    return min([*tried, base], key=lambda each: each.peak)


def _tighter(room: int, base: int, estimate: int, found: int) -> int:
    """The room for the next choice, where the last one holds more (`found`) than its estimate.

    `base` has the bytes that the choice of nothing holds.
    """
    if base <= room and base < estimate:  # each byte that is added counts for more
        tight = base + int((room - base) * (estimate - base) / (found - base))
    else:  # each byte that is freed counts for less
        tight = room - (found - estimate)
    return min(tight, estimate - 1)


def _kept(tradeoff: Tradeoff, choice: Choice) -> Kept:
    """A choice in the form that passes are given."""
    copies, again = tradeoff.copies[: choice.offloaded], tradeoff.computed_again(choice)
    kept = replace(
        tradeoff.trial.kept,
        positions=frozenset(b.position for b in tradeoff.buckets[: choice.gathered]),
        states=frozenset(position for position, _ in tradeoff.states[: choice.states]),
    )
    return _moving(kept, tradeoff, _kinds(copies), _kinds(again))


def _agree(gm: GraphModule, ctx: PassContext, tradeoff: Tradeoff, own: Kept) -> Kept:
    """The choice of all ranks.

    A bucket stays gathered if it does by the choice of every rank. A value is computed again or
    saved on the host, and a state waits there, if it does by the choice of any.
    """
    choice = [own.ahead, sorted(own.positions), sorted(own.states), own.recomputes, own.offloads]
    gathers = filter(is_all_gather, our_collectives(gm))
    choices = ctx.choices("what a memory budget has room for", ctx.budget, gathers, choice)
    aheads, positions, states, again, copies = zip(*choices, strict=True)
    kept = replace(
        own,
        ahead=min(aheads),
        positions=frozenset.intersection(*map(frozenset, positions)),
        states=frozenset().union(*states),
    )
    return _moving(kept, tradeoff, _most(copies), _most(again))


Counts = Mapping[str, int]
"""The number of values of each kind."""


def _kinds(values: Iterable[Recompute] | Iterable[Offload]) -> Counts:
    return Counter(value.saved.kind for value in values)


def _most(counts: Iterable[Counts]) -> Counts:
    return functools.reduce(operator.or_, map(Counter, counts))


def _moving(kept: Kept, tradeoff: Tradeoff, copies: Counts, again: Counts) -> Kept:
    """`kept`, with so many values of each kind saved on the host, the first ones, and so many of
    the others computed again."""
    offloaded: dict[str, str] = {}
    for copy in _first(tradeoff.copies, copies):
        offloaded |= copy.names
    offloads = dict(sorted(copies.items()))
    staying = _staying(tradeoff, offloaded)
    return replace(kept, offloaded=offloaded, offloads=offloads, **_recomputing(staying, again))


def _staying(tradeoff: Tradeoff, offloaded: Collection[str]) -> list[Recompute]:
    """The values that may be computed again, because they are not saved on the host."""
    return [v for v in tradeoff.values if not any(n.name in offloaded for n in v.saved.nodes)]


def _recomputing(values: Iterable[Recompute], counts: Counts) -> dict[str, Any]:
    """The fields of `Kept` for so many values of each kind that are computed again."""
    names = {name for value in _first(values, counts) for name in value.names}
    return {"recomputed": frozenset(names), "recomputes": dict(sorted(counts.items()))}


_Value = TypeVar("_Value", Recompute, Offload)


def _first(values: Iterable[_Value], counts: Counts) -> Iterator[_Value]:
    """The first values of each kind, as many as `counts` has."""
    left = Counter(counts)
    for value in values:
        if left[value.saved.kind] > 0:
            left[value.saved.kind] -= 1
            yield value


def _grown(budget: Budget, trial: Trial) -> str:
    kept = plural(len(trial.kept.positions), "bucket")
    return (
        f"memory_budget of {budget} is too small for sizes that have grown: a step needs at least "
        f"{budget.shown(budget.needed(trial.peak))} with the choices that ranks agreed on when "
        f"they compiled for smaller ones (kept gathered: {kept}; gathered ahead: "
        f"{plural(trial.kept.ahead, 'unit')}), and computed again what can be; compile for the "
        "largest sizes first (`shardc.warmup`), or use smaller ones"
    )


def _too_small(budget: Budget, trial: Trial) -> str:
    before, after = trial.forward.liveness, trial.backward.liveness
    margin = f", and {budget.margin:.0%} of that" if budget.margin else ""
    worst, phase = (before, "forward") if before.peak > after.peak else (after, "backward")
    return (
        f"memory_budget of {budget} is too small: with every unit resharded, nothing gathered "
        "ahead, and computed again what can be, a step needs at least "
        f"{budget.shown(budget.needed(worst.peak))}: {budget.shown(budget.static)} for segments, "
        f"optimizer state and workspaces, {budget.shown(worst.inputs)} for tensors saved for the "
        f"backward, {budget.shown(worst.peak - worst.inputs)} for values, gradients and gathered "
        f"buckets at the peak of the {phase}{margin}; use more ranks, smaller units or a smaller "
        "batch"
    )


def _beside_the_host(budget: Budget, tradeoff: Tradeoff) -> str:
    wanted = sum(copy.nbytes for copy in tradeoff.copies) + sum(n for _, n in tradeoff.states)
    if wanted <= tradeoff.host_room:
        return ""
    return (
        f", or more of the host's memory: of {budget.shown(wanted)} that may wait there, it has "
        f"room for {budget.shown(int(tradeoff.host_room))} (option 'host_memory')"
    )
