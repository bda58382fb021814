"""A trial: which buckets may stay gathered from the forward to the backward.

Those of open units may that the backward would gather again.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from torch.fx import Node

from shardc.passes.budget.trial import Item, Phase, Trial
from shardc.passes.estimate.cost import collective_seconds, evaluate, symbol_hints, tensor_bytes
from shardc.passes.nodes import is_all_gather, is_view, moved_by, reach, waits_for
from shardc.runtime.layout.spec import Moved


@dataclass(frozen=True)
class KeepGathered(Item):
    """A bucket that may stay gathered.

    Attributes:
        position: of its input.
    """

    position: int


def gatherable(trial: Trial) -> list[KeepGathered]:
    """Buckets that may stay gathered, best first.

    First those whose gather takes longest per byte, of equal ones those used last in the forward,
    because they are held for the shortest time.
    """
    ctx = trial.forward.ctx
    hints = symbol_hints(trial.forward.gm)
    again = {moved: start for moved, start, _, _ in _gathered(trial.backward)}
    found = []
    for moved, _, wait, last in _gathered(trial.forward):
        if moved in again:
            nbytes = int(evaluate(tensor_bytes(wait.meta["val"]), hints))
            seconds = collective_seconds(nbytes, moved.spec.world_size, ctx.planned.profile)
            end = trial.border + again[moved]
            found.append(KeepGathered(nbytes, last + 1, end, seconds, moved.position))
    return sorted(
        found, key=lambda bucket: (-bucket.seconds / max(bucket.nbytes, 1), -bucket.first)
    )


def _gathered(phase: Phase) -> Iterator[tuple[Moved, int, Node, int]]:
    """Every gather of an open unit's bucket: the place of its start, its wait, its last reader."""
    for transfer in phase.events.of("gather"):
        if not is_all_gather(transfer.start):
            continue  # rows of a table
        waits = waits_for(transfer.start)
        for moved, wait in zip(moved_by(transfer.start), waits, strict=True):
            if moved.position in phase.ctx.open_positions:
                views = reach(lambda n: [u for u in n.users if is_view(u)], wait)
                places = phase.places
                readers = [places[u] for view in views for u in view.users if u in places]
                yield moved, places[transfer.start], wait, max(readers, default=0)
