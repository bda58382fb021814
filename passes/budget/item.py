"""An entry of the lists that a memory budget takes from: memory during a part of a step, for time.

Three lists hold items: saved values that may be computed again (`recomputable`), those that may
wait on the host (`offloadable`), and buckets that may stay gathered (`gatherable`). A choice takes
the first items of each. Optimizer state that waits on the host is an item once a choice says of how
many buckets: the part of the step in which it is away depends on that.
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class Item:
    """Memory during a part of a step, for time.

    Attributes:
        nbytes: freed; of a bucket that stays gathered, held.
        first, end: from which place on, and before which. The places of the backward follow those
            of the forward.
        seconds: added to the compute, or to the link in each direction; of a bucket that stays
            gathered, taken off the wire.
    """

    nbytes: int
    first: int
    end: int
    seconds: float
