"""Plans for the calls of a step, made after its first call: micro-batches, gathers ahead."""

import contextlib
from collections.abc import Mapping
from typing import Any

from shardc.runtime.checks.arguments import check_value
from shardc.runtime.checks.telling import warn_once
from shardc.step.accumulation import (
    Accumulate,
    Accumulation,
    Arranged,
    NotArranged,
    Watched,
    plan_accumulation,
)
from shardc.step.ahead import Ahead, plan_ahead


class Plans:
    """The plans of one step.

    Attributes:
        accumulation: the plan for its micro-batches, once there is one.
        ahead: the buckets that stay gathered from call to call, once they are chosen.
        reasons: why the step has no plan of a kind that was asked for, or a smaller one.
    """

    def __init__(self, accumulate: Accumulate | None, gather_ahead: bool) -> None:
        self._accumulate, self._gather_ahead = accumulate, gather_ahead
        self.accumulation: Accumulation | None = None
        self.ahead: Ahead | None = None
        self.reasons: list[str] = []
        self.is_due = accumulate is not None or gather_ahead

    @staticmethod
    def parse(accumulate: Mapping[str, Any] | None, gather_ahead: bool) -> "Plans":
        """Check a user's wishes.

        Raises:
            TypeError, ValueError: a key or value is none that there can be.
        """
        check_value("gather_ahead", gather_ahead, bool)
        asked = None if accumulate is None else Accumulate.parse(accumulate)
        return Plans(asked, gather_ahead)

    def anew(self) -> "Plans":
        """The same wishes, for another step or a copy of it."""
        return Plans(self._accumulate, self._gather_ahead)

    def make(self, watched: Watched, name: str) -> bool:
        """Make the plans of a step from its first call. Every rank calls it.

        Returns:
            Whether later calls run other graphs.
        """
        self.is_due = False
        if self._accumulate is not None:
            try:
                self.accumulation = plan_accumulation(self._accumulate, watched)
                self._tell(self.accumulation.left_out, name)
            except NotArranged as error:
                self._tell(f"its micro-batches run as they are: {error}", name)
        if self._gather_ahead:
            try:
                self.ahead = plan_ahead(watched, self.accumulation)
                self._tell(self.ahead.left_out, name)
            except NotArranged as error:
                self._tell(f"nothing is gathered ahead: {error}", name)
        return self.accumulation is not None or self.ahead is not None

    def _tell(self, reason: str, name: str) -> None:
        if reason:
            self.reasons.append(reason)
            warn_once(f"step: {reason}", f"{name}: {reason}")

    def arranged(self) -> contextlib.AbstractContextManager[object]:
        """A context around a call that runs the Python of the step."""
        plan = self.accumulation
        return contextlib.nullcontext() if plan is None else Arranged(plan)

    def gather(self) -> None:
        """Gather the buckets that stay gathered, where a call has not done so. All ranks call it.

        A call begins and ends with it.
        """
        if self.ahead is not None:
            self.ahead.gather()
