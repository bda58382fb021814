"""Choices of a memory budget: the memory and the time of each, estimated from one trial.

A choice takes items: values to compute again, buckets to keep gathered, values to save on the host,
and optimizer state to wait there. Of each list, best first, it takes a prefix, so a choice is four
counts. The trial gives the curve of memory and the line of events without any item. The changes by
a choice are added here, so that thousands of choices are compared in a second. Left out: the
partitioner may save other values, kernels may fuse otherwise, gathers may move. A trial of the
choice shows that.
"""

import bisect
import math
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import accumulate

import numpy as np
import numpy.typing as npt

from shardc.passes.budget.gatherable import KeepGathered, gatherable
from shardc.passes.budget.offloadable import Offload, offloadable
from shardc.passes.budget.recomputable import Recompute, recomputable
from shardc.passes.budget.saved import SavedValues
from shardc.passes.budget.trial import Item, Phase, Trial
from shardc.passes.estimate.cost import host_seconds
from shardc.passes.nodes import moved_by
from shardc.passes.rewrite.offload_state import segments_of
from shardc.passes.schedule.timeline import Kind, Problem, Transfer, plan_timeline, simulate

Bytes = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Choice:
    """The number of items that are taken of `values`, `buckets`, `copies` and `states`.

    A value that is saved on the host is not computed again.
    """

    recomputed: int = 0
    gathered: int = 0
    offloaded: int = 0
    states: int = 0


@dataclass(frozen=True, eq=False)
class Tradeoff:
    """The choices beside a trial.

    Attributes:
        trial: of the choice that takes nothing.
        values: those that may be computed again, cheapest first.
        buckets: those that may stay gathered, best first.
        copies: values that may be saved on the host, best first.
        states: inputs that are segments of buckets whose optimizer state may wait on the host, each
            with its bytes.
        host_room: the most bytes that may be on the host.
    """

    trial: Trial
    values: Sequence[Recompute]
    buckets: Sequence[KeepGathered]
    copies: Sequence[Offload] = ()
    states: Sequence[tuple[int, int]] = ()
    host_room: float = math.inf
    _known: dict[Choice, float] = field(default_factory=dict, init=False, repr=False)
    _forwards: dict[tuple[int, int], float] = field(default_factory=dict, init=False, repr=False)

    @classmethod
    def of(cls, trial: Trial) -> "Tradeoff":
        """All choices beside a trial."""
        options, saved = trial.forward.ctx.planned, SavedValues(trial)
        values = recomputable(trial, saved)
        copies = offloadable(trial, saved, values) if options.saves_on_host else ()
        segments = segments_of(trial.forward.gm)
        states = [(each, options.states[each]) for each in segments if each in options.states]
        return cls(trial, values, gatherable(trial), copies, states, options.host_room)

    @property
    def leanest(self) -> set[Choice]:
        """The choices of which one holds least.

        Computing values again may hold more, where few are saved: it brings gathers forward.
        """
        values, states = len(self.values), self._most_states
        beside, alone = self._most_copies(states), self._most_copies(0)
        copies = {(0, states), (beside, states), (alone, states if alone == beside else 0)}
        return {Choice(again, 0, *each) for again in (0, values) for each in copies}

    def computed_again(self, choice: Choice) -> list[Recompute]:
        """The values that the backward computes again by a choice."""
        gone = {copy.saved.nodes for copy in self.copies[: choice.offloaded]}
        return [v for v in self.values[: choice.recomputed] if v.saved.nodes not in gone]

    def fastest(self, room: int) -> Choice | None:
        """The choice with the shortest step among those that hold `room` bytes at most, if any."""
        best: tuple[float, Choice] | None = None
        shortest = self.seconds(Choice(0, len(self.buckets)))
        for states in _counts(self._most_states, _COUNTS_OF_STATES):
            if best is not None and best[0] <= shortest * (1 + _WORTH):
                break  # nothing is gained by more room
            for choice in self._fullest(room, states):
                wanted = math.inf if best is None else best[0] * (1 - _worth(choice, best[1]))
                if (seconds := self.seconds(choice, wanted)) < wanted:
                    best = seconds, choice
        return None if best is None else best[1]

    def least_seconds(self, room: int) -> float:
        """The seconds of the fastest choice; infinite if none holds so little."""
        choice = self.fastest(room)
        return math.inf if choice is None else self.seconds(choice)

    def peak(self, choice: Choice) -> int:
        """The most bytes that forward or backward hold by a choice."""
        return int((self._live - self._freed(choice) + self._held[choice.gathered]).max())

    def seconds(self, choice: Choice, wanted: float = math.inf) -> float:
        """The seconds of forward and backward by a choice.

        If a lower bound of them is not less than `wanted`, that bound: no step is simulated.
        """
        if choice not in self._known:
            before, again = self._forward_seconds(choice), self.computed_again(choice)
            least = before + self._compute + sum(value.seconds for value in again)
            if least >= wanted:
                return least
            problem = self._backward(choice, again)
            if (least := before + problem.wire_seconds) >= wanted:
                return least
            self._known[choice] = before + simulate(problem, plan_timeline(problem))
        return self._known[choice]

    # -- the search ----------------------------------------------------------------------------

    def _fullest(self, room: int, states: int) -> Iterator[Choice]:
        """The choices that keep as many buckets gathered as fit, for some counts of copies and for
        each count of values that makes room for another bucket."""
        both = np.empty_like(self._live)  # taken once: the arrays are large
        for offloaded in _counts(self._most_copies(states), _COUNTS_OF_COPIES):
            copies = self.copies[:offloaded]
            count, live = -1, self._live - self._freed(Choice(0, 0, offloaded, states))
            gone = {copy.saved.nodes for copy in copies}
            for recomputed in range(len(self.values) + 1):
                if recomputed and (value := self.values[recomputed - 1]).saved.nodes not in gone:
                    live[value.first : value.end] -= value.nbytes
                before = count
                while count < len(self.buckets):
                    if np.add(live, self._held[count + 1], out=both).max() > room:
                        break
                    count += 1
                if count > before:
                    yield Choice(recomputed, count, offloaded, states)

    @cached_property
    def _most_states(self) -> int:
        """The number of buckets whose optimizer state the host has room for."""
        return _how_many([nbytes for _, nbytes in self.states], self.host_room)

    def _most_copies(self, states: int) -> int:
        """The number of copies that the host has room for beside the state of so many buckets."""
        left = self.host_room - sum(nbytes for _, nbytes in self.states[:states])
        return _how_many([copy.nbytes for copy in self.copies], left)

    # -- memory --------------------------------------------------------------------------------

    @cached_property
    def _live(self) -> Bytes:
        """Bytes held after each node of the forward, then of the backward, if nothing is taken."""
        phases = (self.trial.forward, self.trial.backward)
        return np.concatenate([np.array(p.liveness.live, np.int64) for p in phases])

    def _freed(self, choice: Choice) -> Bytes:
        """Bytes that a choice frees after each node."""
        freed = np.zeros_like(self._live)
        copies = self.copies[: choice.offloaded]
        for item in (*self.computed_again(choice), *copies, *self._away(choice.states)):
            freed[item.first : item.end] += item.nbytes
        return freed

    def _away(self, count: int) -> Iterator[Item]:
        """The optimizer's state of so many buckets, while it is not on the device."""
        left, back = self.trial.forward, self.trial.backward
        leaving, returning = self._copies["leave"][:count], self._copies["return"][:count]
        waits = plan_timeline(replace(left.problem, transfers=leaving)).waits
        starts = plan_timeline(replace(back.problem, transfers=returning)).starts
        for copy, wait, start in zip(leaving, waits, starts, strict=True):
            end = self.trial.border + _place(back, start)
            yield Item(copy.nbytes, _place(left, wait), end, copy.seconds)

    @cached_property
    def _held(self) -> list[Bytes]:
        """Bytes that the first 0, 1, ... buckets hold after each node, if they stay gathered."""
        held = [np.zeros_like(self._live)]
        for bucket in self.buckets:
            more = held[-1].copy()
            more[bucket.first : bucket.end] += bucket.nbytes
            held.append(more)
        return held

    # -- time ----------------------------------------------------------------------------------

    @cached_property
    def _compute(self) -> float:
        """Seconds of compute of the backward, if nothing is computed again."""
        return sum(self.trial.backward.problem.seconds)

    def _backward(self, choice: Choice, again: Sequence[Recompute]) -> Problem:
        problem = self.trial.backward.problem
        seconds = list(problem.seconds)
        for more in again:
            seconds[self._read_at(more)] += more.seconds
        stay = {bucket.position for bucket in self.buckets[: choice.gathered]}
        gathers = (gather for gather, brought in self._gathers if not brought <= stay)
        transfers = (*gathers, *problem.of("reduce"))
        problem = replace(problem, seconds=tuple(seconds), transfers=transfers)
        return self._copying(problem, choice, "load", "return")

    @cached_property
    def _gathers(self) -> list[tuple[Transfer, frozenset[int]]]:
        """The gathers of the backward, and the inputs that each gathers."""
        backward = self.trial.backward
        moved = (moved_by(moving.start) for moving in backward.events.of("gather"))
        brought = [frozenset(each.position for each in several) for several in moved]
        return list(zip(backward.problem.of("gather"), brought, strict=True))

    def _forward_seconds(self, choice: Choice) -> float:
        key = choice.offloaded, choice.states
        if key not in self._forwards:
            problem = self._copying(self.trial.forward.problem, choice, "save", "leave")
            self._forwards[key] = simulate(problem, plan_timeline(problem))
        return self._forwards[key]

    def _copying(self, problem: Problem, choice: Choice, values: Kind, states: Kind) -> Problem:
        """A problem with the copies of a choice: of values of one kind, of states of another."""
        copies = sorted(self._copies[values][: choice.offloaded], key=lambda copy: copy.event)
        units = Counter[str]()
        for copy in self.copies[: choice.offloaded]:
            units[copy.saved.unit] += copy.nbytes
        most = self.trial.kept.ahead * max(units.values(), default=0)
        return replace(
            problem,
            transfers=(*problem.transfers, *copies, *self._copies[states][: choice.states]),
            in_flight={**problem.in_flight, values: most},
        )

    @cached_property
    def _copies(self) -> dict[Kind, tuple[Transfer, ...]]:
        """The copies to the host and from there of all that may wait on it."""
        options, end = self.trial.forward.ctx.planned, len(self.trial.backward.problem.seconds)
        states = [(n, float(host_seconds(n, options.profile))) for _, n in self.states]
        copies = self.copies
        saves = tuple(Transfer("save", self._made_at(c), c.nbytes, c.seconds) for c in copies)
        loads = tuple(Transfer("load", self._read_at(c), c.nbytes, c.seconds) for c in copies)
        leaves = tuple(Transfer("leave", 0, *state) for state in states)
        returns = tuple(Transfer("return", end, *state) for state in states)
        return {"save": saves, "load": loads, "leave": leaves, "return": returns}

    def _made_at(self, copy: Offload) -> int:
        """The event of the forward at which a value is made."""
        forward = self.trial.forward
        step = bisect.bisect_left(forward.step_places, copy.made)
        return bisect.bisect_left(forward.events.positions, step + 1)

    def _read_at(self, item: Item) -> int:
        """The event of the backward before which a value is read first; the last for place 0."""
        backward, place = self.trial.backward, item.end - self.trial.border
        step = bisect.bisect_left(backward.step_places, place or math.inf)
        return max(0, bisect.bisect_right(backward.events.positions, step) - 1)


def _worth(choice: Choice, best: Choice) -> float:
    """The share by which a choice must be faster than the best so far."""
    copies = choice.offloaded > best.offloaded or choice.states > best.states
    return _WORTH_COPIES if copies else _WORTH


def _place(phase: Phase, event: int) -> int:
    """The place of the first step behind an event."""
    return phase.step_places[[*phase.events.positions, -1][event]]


def _how_many(sizes: Sequence[int], room: float) -> int:
    """The number of the first `sizes` that fit into `room` together."""
    return bisect.bisect_right(list(accumulate(sizes)), room)


def _counts(most: int, steps: int) -> list[int]:
    """0, `most`, and counts between them at equal distances."""
    return sorted({most * step // steps for step in range(steps + 1)})


_WORTH = 1e-4
"""A choice that computes more again must be faster by this share: else rounding would choose."""
_WORTH_COPIES = 5e-3
"""A choice that copies more to the host, by this one: links are shared, and hosts busy."""
_COUNTS_OF_COPIES, _COUNTS_OF_STATES = 8, 2
"""The search tries so many counts of copies, and of buckets whose state waits, beside 0."""
