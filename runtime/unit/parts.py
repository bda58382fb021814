"""The gradient of a bucket in one backward, in the parts that are reduced one by one.

A backward reduces one part for all graphs that read the bucket, and one for each eager read: of a
module that is called twice, or of a weight that units share. Parameters get the sum of the parts
after the last reduction, as the gradient of an unsharded parameter is whole when its hooks see it.
A hook may then write to the parameter: no gather of this backward needs the old value.
"""

from dataclasses import dataclass, field

from torch import Tensor


@dataclass
class Parts:
    """The parts of the gradient of one bucket in one backward.

    Attributes:
        under_way: the number of parts whose reduction has begun and has not been added.
        is_last: whether autograd gives no further part.
        is_eager: whether an eager read gave a part.
        total: the sum of the reduced parts, `(S,)`; None if there is none that parameters lack.
        used, elsewhere: slots with a gradient in the parts, here, and on other ranks only.
    """

    under_way: int = 0
    is_last: bool = False
    is_eager: bool = False
    total: Tensor | None = None
    used: set[int] = field(default_factory=set)
    elsewhere: set[int] = field(default_factory=set)

    def add(self, part: Tensor, used: set[int], elsewhere: set[int]) -> None:
        """Add a reduced part, `(S,)`; the memory of the first one becomes the sum."""
        self.total = part if self.total is None else self.total.add_(part)
        self.used |= used
        self.elsewhere |= elsewhere

    def take(self) -> tuple[Tensor, set[int], set[int]] | None:
        """Take the sum and its slots, (total, used, elsewhere); None while parts are missing."""
        if self.total is None or self.under_way or not self.is_last:
            return None
        taken = self.total, self.used, self.elsewhere
        self.total, self.used, self.elsewhere = None, set(), set()
        return taken
