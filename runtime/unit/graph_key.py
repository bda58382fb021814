"""The key of graphs that read a bucket: the signature of the code, and the inputs of the code.

Dynamo guards on the signature. So the key is renewed when a fact changes on which the code depends,
never by a read: Dynamo traces a read, and would guard on all of these facts.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from torch import Tensor

from shardc.runtime.layout.spec import UnshardSpec, intern_spec, spec_of
from shardc.runtime.unit.bucket_spec import BucketGroups, groups_for, spec_for

if TYPE_CHECKING:
    from shardc.runtime.unit.bucket import Bucket


Reading = tuple[str, list[Tensor]]
"""The signature of the code that a read needs, and the inputs of the code."""


class GraphKey:
    """The key of the graphs that read one bucket.

    Attributes:
        groups: the groups that the settings ask for.
        code: the spec of the code that unshards the bucket now, while its unit trains.
    """

    groups: BucketGroups
    code: UnshardSpec
    _train: Reading
    _eval: Reading | None

    def __init__(self, bucket: "Bucket") -> None:
        self.bucket = bucket
        self._again: list[Reading | None] = []

    def follow_settings(self) -> None:
        """Make the groups that changed settings ask for, and refresh the key."""
        self.groups = groups_for(self.bucket)
        self.refresh()

    def refresh(self) -> None:
        """Set the code that the bucket needs now; a change recompiles the bucket's graphs."""
        bucket = self.bucket
        self.code = spec_for(bucket, self.groups)
        if not self.code.reduction.sync:
            _, reduced = bucket.settings.dtypes(bucket.segment.dtype, evaluating=False)
            bucket.gradients.waiting.make_sink(bucket.layout.numel, reduced, bucket.device)
        self._train, self._eval = self._reading(self.code), None
        if bucket.settings.precision.full_precision_in_eval:
            self._eval = self._reading(spec_for(bucket, self.groups, evaluating=True))
        if self._again and (reading := self._again[0]) is not None:
            if self._eval is None or bucket.owner.training:
                self._train = reading
            else:
                self._eval = reading

    def _reading(self, code: UnshardSpec) -> Reading:
        held, waiting = self.bucket.gathered.held, self.bucket.gradients.waiting
        extras = [held if name == "full" else getattr(waiting, name) for name in code.extras]
        return intern_spec(code), extras  # type: ignore[return-value]

    def reading(self) -> Reading:
        """The signature and the inputs of the code that reads the bucket now."""
        if self._eval is None:
            return self._train
        return self._train if self.bucket.owner.training else self._eval

    def to_read_again(self) -> Reading | None:
        """The `reading` to give to `read_again`; None where it would keep full parameters alive."""
        return None if "full" in self.reading_code().extras else self.reading()

    def read_again(self, readings: Sequence[Reading | None]) -> list[Reading | None]:
        """Answer the next reads with `readings`, in order; None: as the bucket needs at that time.

        Each read uses up one entry (`been_read`).

        Returns:
            The entries that were in force before this call.
        """
        before, again = self._again, list(readings)
        now = self.reading()
        plain = None if now[1] else now  # the code of a plain reading has no inputs
        if before or any(reading != plain for reading in again):
            self._again = again
            self.refresh()
        return before

    def been_read(self) -> None:
        """Use up the first entry of `read_again`: a graph reads the bucket."""
        if self._again:
            self.read_again(self._again[1:])

    def reading_code(self) -> UnshardSpec:
        """The spec of the code that a read needs now."""
        return spec_of(self.reading()[0])
