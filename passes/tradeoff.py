"""What a step holds and how long it takes by two choices: how much is computed again, and how many
buckets stay gathered.

Both are prefixes of a list, best first, so a choice is two counts. A trial gives the curves of
memory and the line of events without either; what a choice changes of them is added here, so that
thousands of choices are looked at in a second. What is left out (the partitioner saves something
else, kernels fuse otherwise, gathers move) shows in a trial of what was chosen.
"""

import bisect
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
import numpy.typing as npt

from shardc.passes.context import moved_by
from shardc.passes.recomputable import Recompute, recomputable
from shardc.passes.timeline import plan_timeline, simulate
from shardc.passes.trial import Gathered, Trial, gathered_again

Bytes = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Choice:
    """How many of the values that may be are computed again, and of the buckets stay gathered."""

    recomputed: int = 0
    gathered: int = 0


@dataclass(frozen=True, eq=False)
class Tradeoff:
    """The choices beside a trial of the one in which nothing is computed again or stays gathered.

    Attributes:
        trial: of that.
        values: what may be computed again, cheapest first.
        buckets: what may stay gathered, best first.
    """

    trial: Trial
    values: Sequence[Recompute]
    buckets: Sequence[Gathered]

    @classmethod
    def of(cls, trial: Trial) -> "Tradeoff":
        """All choices beside a trial."""
        return cls(trial, recomputable(trial), gathered_again(trial))

    def fastest(self, room: int) -> Choice | None:
        """The choice with the shortest step that holds `room` bytes at most; None if none does."""
        best: tuple[float, Choice] | None = None
        for choice in self._fullest(room):
            seconds = self.seconds(choice)
            if best is None or seconds < best[0] * (1 - _WORTH):
                best = seconds, choice
        return None if best is None else best[1]

    def least_seconds(self, room: int) -> float:
        """How long the step of that choice takes; infinitely if none holds so little."""
        choice = self.fastest(room)
        return math.inf if choice is None else self.seconds(choice)

    def peak(self, choice: Choice) -> int:
        """The most bytes that forward or backward hold."""
        return int((self._live - self._freed(choice) + self._held[choice.gathered]).max())

    def seconds(self, choice: Choice) -> float:
        """How long forward and backward take."""
        if choice not in self._known:
            self._known[choice] = self._simulate(choice)
        return self._known[choice]

    # -- what it is made of --------------------------------------------------------------------

    def _fullest(self, room: int) -> Iterator[Choice]:
        """For every count of values the most buckets that fit, where that changes something."""
        count, live = -1, self._live.copy()
        for recomputed in range(len(self.values) + 1):
            if recomputed:
                self._add(live, -self.values[recomputed - 1].saved.nbytes, recomputed - 1)
            before = count
            while count < len(self.buckets) and (live + self._held[count + 1]).max() <= room:
                count += 1
            if count > before:
                yield Choice(recomputed, count)

    @cached_property
    def _live(self) -> Bytes:
        """Bytes after each node of the forward, then of the backward."""
        phases = (self.trial.forward, self.trial.backward)
        return np.concatenate([np.array(p.liveness.live, np.int64) for p in phases])

    def _freed(self, choice: Choice) -> Bytes:
        freed = np.zeros_like(self._live)
        for index in range(choice.recomputed):
            self._add(freed, self.values[index].saved.nbytes, index)
        return freed

    def _add(self, live: Bytes, nbytes: int, index: int) -> None:
        saved, start = self.values[index].saved, len(self.trial.forward.liveness.live)
        live[saved.forward[0] : start] += nbytes
        live[start : start + saved.backward[1] + 1] += nbytes

    @cached_property
    def _held(self) -> list[Bytes]:
        """What is held more where the first 0, 1, ... buckets stay gathered."""
        held, start = [np.zeros_like(self._live)], len(self.trial.forward.liveness.live)
        for bucket in self.buckets:
            more = held[-1].copy()
            more[bucket.forward[0] : start] += bucket.nbytes
            more[start : start + bucket.backward[1] + 1] += bucket.nbytes
            held.append(more)
        return held

    @cached_property
    def _known(self) -> dict[Choice, float]:
        return {}

    def _simulate(self, choice: Choice) -> float:
        backward = self.trial.backward
        problem = backward.problem
        seconds = list(problem.seconds)
        for event, more in zip(
            self._events[: choice.recomputed], self.values[: choice.recomputed], strict=True
        ):
            seconds[event] += more.seconds
        stay = {bucket.position for bucket in self.buckets[: choice.gathered]}
        gathers = tuple(
            gather
            for transfer, gather in zip(backward.events.gathers, problem.gathers, strict=True)
            if not all(moved.position in stay for moved in moved_by(transfer.start))
        )
        changed = replace(problem, seconds=tuple(seconds), gathers=gathers)
        return self.trial.forward.seconds + simulate(changed, plan_timeline(changed))

    @cached_property
    def _events(self) -> list[int]:
        """At which event of the backward each value is computed again: before its first reader."""
        backward = self.trial.backward
        events, order = backward.events, list(backward.places)
        step_of = {step: number for number, step in enumerate(events.steps)}
        found = []
        for value in self.values:
            first = value.saved.backward[1] + 1
            step = next((step_of[n] for n in order[first:] if n in step_of), len(events.steps))
            found.append(max(0, bisect.bisect_right(events.positions, step) - 1))
        return found


_WORTH = 1e-4
"""A choice that computes more again must be faster by this share: else rounding would choose."""
