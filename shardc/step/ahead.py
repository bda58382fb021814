"""Gathers for the next call of a step, which run behind the updates of this one.

The first call of a step runs as usual, and `Watched` hears its gathers. The forward waits for the
first one before it computes. The buckets of the first gather stay gathered from then on. Each call
ends with gathers of their new values; in the graph of a step, a gather starts as soon as its bucket
is updated. The next forward and backward take the buckets as they are.

Ranks agree on the buckets once. After a write to a parameter between two calls, the next call
gathers its bucket first, so every rank writes, as with `unshard()`.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from shardc.passes.estimate.cost import gather_seconds
from shardc.passes.estimate.hardware import current_profile
from shardc.runtime.checks.words import plural
from shardc.runtime.unit.bucket import Bucket
from shardc.runtime.unit.bucket_spec import can_stay_gathered
from shardc.runtime.unit.unit import Unit
from shardc.step.accumulation import Accumulation, NotArranged, Watched, agreed, units_inside
from shardc.step.room import Room, gathered_bytes, waiting_bytes


@dataclass(frozen=True)
class Ahead:
    """The buckets that stay gathered from call to call.

    Attributes:
        names: the labels of the buckets, in the order in which they are gathered.
        nbytes: their bytes, gathered.
        seconds: the time of their gathers in a call, on the wire of the profile.
        left_out: the buckets that do not fit a memory budget, in words; "" if all fit.
    """

    names: tuple[str, ...]
    nbytes: int
    seconds: float
    _buckets: tuple[Bucket, ...] = field(repr=False)
    left_out: str = ""

    def gather(self) -> None:
        """Gather the buckets that are not held, or that were written since. Every rank calls it."""
        for bucket in self._buckets:
            bucket.gathered.stays = True
            bucket.gathered.hold()
            bucket.gathered.renew()

    def note_gathered(self) -> None:
        """Note that the graph of a step has gathered the buckets after its updates."""
        for bucket in self._buckets:
            bucket.gathered.note_renewed()

    def note_lost(self) -> None:
        """Note that a call stopped in between: the next one gathers the buckets anew."""
        for bucket in self._buckets:
            bucket.gathered.drop()


def plan_ahead(watched: Watched, accumulation: Accumulation | None = None) -> Ahead:
    """Choose the buckets of the first gather. All ranks call it, and agree.

    They are gathered in the order of their reductions, which is the order of their updates. The
    gathers of later buckets run behind the forward, and need no other place. Models that were
    compiled within a memory budget stay within it.

    Args:
        accumulation: the plan for micro-batches, which keeps buckets gathered, too.

    Raises:
        NotArranged: none can stay gathered.
    """
    kept = [] if accumulation is None else accumulation.buckets
    reduce_once = accumulation is not None and accumulation.reduce_once
    roots = list(watched.backwards)
    if not roots:
        raise NotArranged("it has no backward of a model given to fully_shard")
    every = _buckets_inside(roots)
    last = {name: place for place, name in enumerate(watched.reduced)}
    first = [b for b in every if b.label in watched.first and can_stay_gathered(b)]
    first.sort(key=lambda bucket: last.get(bucket.label, -1))
    several = [root for root, count in watched.backwards.items() if count > 1]
    waiting = waiting_bytes(_buckets_inside(several), reduce_once)
    room = Room.beside(every, waiting)
    fitting = _fitting(first, room, kept)
    facts = [plural(len(every), "bucket")]
    subject, left = "gathers for the next step", room.left(kept)
    chosen, left = agreed(subject, facts, every, fitting, every[0], left)
    out = {} if left is None else {b.label: [b] for b in first if b not in chosen}
    left_out = room.words(left or 0, out, chosen, ahead=True) if out else ""
    if not chosen:
        raise NotArranged(
            left_out
            or "the buckets that it gathers first cannot stay gathered (one rank, parameters on "
            "the host, tensors with their own all-gather, an all-gather or memory of the user's "
            "own)"
        )
    profile = current_profile(every[0].device.type)
    return Ahead(
        tuple(bucket.label for bucket in chosen),
        sum(map(gathered_bytes, chosen)),
        sum(gather_seconds(bucket.key.code, profile) for bucket in chosen),
        chosen,
        left_out,
    )


def _buckets_inside(roots: Iterable[Unit]) -> list[Bucket]:
    return [bucket for root in roots for unit in units_inside(root) for bucket in unit.buckets]


def _fitting(wanted: Iterable[Bucket], room: Room, kept: Sequence[Bucket]) -> list[Bucket]:
    """The buckets among `wanted` that fit beside graphs and the buckets that are `kept` anyway."""
    fitting: list[Bucket] = []
    for bucket in wanted:
        more = [*fitting, bucket]
        if room.has(dict.fromkeys([*kept, *more]), more):
            fitting = more
    return fitting
