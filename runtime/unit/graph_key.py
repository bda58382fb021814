"""The key of graphs that read a bucket: the signature of the code they were compiled for, and its
inputs.

Dynamo guards on the signature, so the key is renewed where something changes on which the code
depends, never when it is read: a read is traced, and would be guarded on all of that.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from torch import Tensor

from shardc.runtime.layout.spec import UnshardSpec, intern_spec, spec_of
from shardc.runtime.unit.bucket_spec import Groups, groups_for, spec_for

if TYPE_CHECKING:
    from shardc.runtime.unit.bucket import Bucket


Reading = tuple[str, list[Tensor]]
"""What a read needs: the signature of its code, and what that is given."""


class GraphKey:
    """The key of one bucket.

    Attributes:
        groups: those that the settings ask for.
        code: the spec of the code that unshards the bucket now, while its unit trains.
    """

    groups: Groups
    code: UnshardSpec
    _train: Reading
    _eval: Reading | None

    def __init__(self, bucket: "Bucket") -> None:
        self.bucket = bucket
        self._again: list[Reading | None] = []

    def follow_settings(self) -> None:
        """The settings have changed: make the groups that they ask for, and refresh the key."""
        self.groups = groups_for(self.bucket)
        self.refresh()

    def refresh(self) -> None:
        """Name the code that the bucket needs now; a change recompiles the graphs that use it."""
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
        """The signature and the inputs of code that reads the bucket now."""
        if self._eval is None:
            return self._train
        return self._train if self.bucket.owner.training else self._eval

    def to_read_again(self) -> Reading | None:
        """`reading`, for `read_again`; None where it would keep full parameters."""
        return None if "full" in self.reading_code().extras else self.reading()

    def read_again(self, readings: Sequence[Reading | None]) -> list[Reading | None]:
        """Answer the next reads with `readings`, in order; None: with the signature and inputs of
        now.

        Holds for as many reads as there are entries, which `been_read` counts.

        Returns:
            What the next reads were to need before this call.
        """
        before, again = self._again, list(readings)
        if before or any(reading != self._plain for reading in again):
            self._again = again
            self.refresh()
        return before

    @property
    def _plain(self) -> Reading | None:
        """The signature of a read now, if its code is given no inputs; else None."""
        signature, extras = self.reading()
        return None if extras else (signature, [])

    def been_read(self) -> None:
        """A graph is given what it needs."""
        if self._again:
            self.read_again(self._again[1:])

    def reading_code(self) -> UnshardSpec:
        """The spec of the code that a read needs now."""
        return spec_of(self.reading()[0])
