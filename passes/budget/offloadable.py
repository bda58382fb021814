"""A trial: the saved values that may go to the host and back, in order.

Any value may that lies alone in its memory, but for those of the unit that runs last: its backward
begins at once. All cost the same, their bytes on the link. First go those that cannot be computed
again at all, then those that take longest to compute again; of a kind the first units, whose values
are held for longest. Parts that are small beside the rest of their value stay, and so do values
inside of a checkpoint of the user.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from torch.fx import Node

from shardc.passes.budget.recomputable import Recompute
from shardc.passes.budget.saved import Saved, SavedValues
from shardc.passes.budget.trial import Item, Trial
from shardc.passes.estimate.cost import evaluate, host_seconds, symbol_hints, tensor_bytes

_SMALL = 1 / 8
"""The share of a value that stays where it is: the mean and the variance of a norm, say."""


@dataclass(frozen=True)
class Offload(Item):
    """A saved value that may be saved on the host.

    Attributes:
        saved: the value.
        nodes: those of its nodes that go; the bytes are theirs.
        made: the place of the forward at which they are made.
    """

    saved: Saved
    nodes: tuple[Node, ...]
    made: int

    @property
    def names(self) -> dict[str, str]:
        """The names of its nodes, each with the name of the unit."""
        return {node.name: self.saved.unit for node in self.nodes}


def offloadable(
    trial: Trial, values: SavedValues, recomputes: Sequence[Recompute]
) -> list[Offload]:
    """The values that may be saved on the host, best first; `trial` has nothing there."""
    found = [each for saved in values if (each := _offload(saved, trial)) is not None]
    last = found[-1].saved.unit if found else ""
    price = {each.saved.kind: place for place, each in enumerate(recomputes)}
    found = [each for each in found if each.saved.unit != last]
    return sorted(found, key=lambda o: (-price.get(o.saved.kind, len(price)), o.saved.kind))


def _offload(saved: Saved, trial: Trial) -> Offload | None:
    """The item of a value; None if the value has to stay."""
    forward = trial.forward
    options, hints = forward.ctx.planned, symbol_hints(forward.gm)
    sizes = {n: int(evaluate(tensor_bytes(n.meta["val"]), hints)) for n in saved.nodes}
    nodes = tuple(n for n, size in sizes.items() if size > _SMALL * saved.nbytes)
    nbytes = sum(sizes[node] for node in nodes)
    seconds = host_seconds(nbytes, options.profile)
    # More: several values share memory. Less: it is a part of memory that is held all the same.
    alone = (1 - _SMALL) * saved.nbytes < nbytes <= saved.nbytes
    by_user = any("recompute" in node.meta for node in nodes)
    if not alone or by_user or seconds < options.profile.overhead:
        return None
    made = max(forward.places[node] for node in nodes)
    return Offload(nbytes, saved.first, saved.end, seconds, saved, nodes, made)
