"""An entry of the lists that a memory budget takes from: memory during a part of a step, for time.

Saved values that may be computed again (`recomputable`), those that may wait on the host
(`offloadable`), buckets that may stay gathered (`gatherable`), and the optimizer's state that may
wait on the host are all of this form. A choice takes the first few of each list.
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
