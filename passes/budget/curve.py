"""Joint graph: step time against memory, from the fastest step to the one that holds least.

Every point is a choice of `tradeoff`, with which a memory budget of that size would begin.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from torch.fx import GraphModule

from shardc.passes.budget.choose import tradeoff_of
from shardc.passes.budget.offloadable import Offload
from shardc.passes.budget.recomputable import Recompute
from shardc.passes.budget.tradeoff import Choice, Tradeoff
from shardc.passes.context import UNITS_IN_FLIGHT, PassContext

POINTS = 16
"""A curve has so many points at most for each number of units that are gathered ahead."""


@dataclass(frozen=True)
class KindsTaken:
    """The kinds of values that a point of the curve takes from a list.

    Attributes:
        kinds: their number.
        last: the last one.
        units: the number of units in which it is taken, and of all in which it could be.
    """

    kinds: int
    last: str
    units: tuple[int, int]


@dataclass(frozen=True)
class Point:
    """A choice, with the estimates of its memory and time.

    Attributes:
        setting: the name of a usual setting; "" for a point of the curve.
        nbytes: the most that forward or backward hold; segments and optimizer state are left out.
        seconds: of forward and backward.
        ahead: the number of units that may be gathered ahead.
        gathered: the number of buckets that stay gathered, and of all that could.
        recomputed: values that the backward computes again, cheapest first.
        offloaded: values that the forward saves on the host, best first.
        on_host: bytes of these.
        states_on_host: bytes of the optimizer's state that wait there.
    """

    setting: str
    nbytes: int
    seconds: float
    ahead: int
    gathered: tuple[int, int]
    recomputed: KindsTaken
    offloaded: KindsTaken
    on_host: int
    states_on_host: int


@dataclass(frozen=True)
class Curve:
    """Step time against memory.

    Attributes:
        points: from the least memory to the shortest step. No point is worse than another in both.
        settings: usual settings, for comparison.
        kinds: of the values that may be computed again, cheapest per byte first.
    """

    points: tuple[Point, ...]
    settings: tuple[Point, ...]
    kinds: tuple[str, ...]


def memory_curve(gm: GraphModule, ctx: PassContext) -> Curve:
    """The curve of a joint graph."""
    assert ctx.options is not None
    ctx = replace(ctx, options=replace(ctx.options, in_order=True))  # as with a budget
    tradeoffs = {ahead: tradeoff_of(gm, ctx, ahead) for ahead in range(UNITS_IN_FLIGHT, -1, -1)}
    found = [point for ahead, each in tradeoffs.items() for point in _points(each, ahead)]
    found.sort(key=lambda point: (point.nbytes, point.seconds))
    points: list[Point] = []
    for point in found:
        if not points or point.seconds < points[-1].seconds:
            points.append(point)
    roomy = tradeoffs[UNITS_IN_FLIGHT]
    return Curve(tuple(points), tuple(_settings(roomy)), _kinds(roomy))


def _points(tradeoff: Tradeoff, ahead: int) -> Iterator[Point]:
    least = min(map(tradeoff.peak, tradeoff.leanest))
    most = max(least, tradeoff.peak(Choice(0, len(tradeoff.buckets))))
    for number in range(POINTS):
        room = least + (most - least) * number // (POINTS - 1)
        choice = tradeoff.fastest(room)
        if choice is not None:
            yield _point("", tradeoff, choice, ahead)


def _settings(tradeoff: Tradeoff) -> Iterator[Point]:
    """The points of settings that people choose by hand: checkpointing, and resharding."""
    cheap = next(
        (n for n, value in enumerate(tradeoff.values) if value.is_heavy), len(tradeoff.values)
    )
    for gathered, ending in ((0, "resharded"), (len(tradeoff.buckets), "kept gathered")):
        for recomputed, name in (
            (0, "no checkpointing"),
            (cheap, "selective checkpointing"),
            (len(tradeoff.values), "full checkpointing"),
        ):
            choice = Choice(recomputed, gathered)
            yield _point(f"{name}, {ending}", tradeoff, choice, UNITS_IN_FLIGHT)


def _point(setting: str, tradeoff: Tradeoff, choice: Choice, ahead: int) -> Point:
    copies = tradeoff.copies[: choice.offloaded]
    return Point(
        setting=setting,
        nbytes=tradeoff.peak(choice),
        seconds=tradeoff.seconds(choice),
        ahead=ahead,
        gathered=(choice.gathered, len(tradeoff.buckets)),
        recomputed=_taken(tradeoff.computed_again(choice), tradeoff.values),
        offloaded=_taken(copies, tradeoff.copies),
        on_host=sum(copy.nbytes for copy in copies),
        states_on_host=sum(nbytes for _, nbytes in tradeoff.states[: choice.states]),
    )


def _taken(
    chosen: Sequence[Recompute] | Sequence[Offload], among: Sequence[Recompute] | Sequence[Offload]
) -> KindsTaken:
    kinds = [value.saved.kind for value in chosen]
    last = kinds[-1] if kinds else ""
    of = sum(value.saved.kind == last for value in among)
    return KindsTaken(len(set(kinds)), last, (kinds.count(last), of))


def _kinds(tradeoff: Tradeoff) -> tuple[str, ...]:
    return tuple(dict.fromkeys(value.saved.kind for value in tradeoff.values))
