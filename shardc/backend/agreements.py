"""Agreements of ranks while the graphs of one Dynamo graph compile, kept for a later load.

A rank that loads a graph states the same facts in the same order as a rank that compiles it. So
the other ranks see no difference.
"""

import json
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from datetime import timedelta

from torch.fx import GraphModule

from shardc.backend.stages import RANKS
from shardc.passes.context import Facts, NotAgreed
from shardc.passes.rewrite.verify import collective_sequence
from shardc.runtime import compat
from shardc.runtime.watch.agreement import Statement, agree, known, settle

Agreed = tuple[str, Statement, frozenset[str]]
"""One comparison: the name of its group, the statement of this rank, the notes of all ranks."""


class Agreements:
    """The comparisons of one compile, in order.

    Args:
        timeout: seconds to wait for other ranks (default: the group's).
        stage: a context around each wait for other ranks.

    Attributes:
        made: the comparisons so far that a load of the graph repeats.
        settled: whether all ranks are known to have the same graph. Their facts are then equal, and
            nothing is sent.
        before_comparing: called before this rank waits for others, which may wait for this rank.
    """

    def __init__(
        self,
        timeout: float | None = None,
        stage: Callable[[str], AbstractContextManager[object]] = nullcontext,
    ) -> None:
        self.made: list[Agreed] = []
        self.settled = False
        self.before_comparing: Callable[[], None] | None = None
        self._timeout = None if timeout is None else timedelta(seconds=timeout)
        self._stage = stage

    def agree(self, group: str, stated: Statement, every_time: bool = False) -> frozenset[str]:
        """Agree on a statement within the group of this name, with the timeout of the options."""
        members = compat.resolve_group(group)
        if self.settled:
            notes = settle(members, stated)
        else:
            with self._stage(RANKS):
                notes = agree(members, stated, self._timeout, every_time, self.before_comparing)
        if not every_time:
            self.made.append((group, stated, notes))
        return notes

    def again(self, made: tuple[Agreed, ...]) -> bool:
        """Repeat the comparisons of another compile; whether ranks gave the same notes again."""
        # stop at other notes: the facts after them differ, too
        return all(self.agree(group, stated) == notes for group, stated, notes in made)

    def seconds(self, group: str, phase: str, facts: Facts, seconds: list[float]) -> list[float]:
        """The compute times that all ranks plan with: the largest ones of the first compile."""
        return _slowest(self.agree(group, _unscheduled(phase, facts, json.dumps(seconds))))

    def choices(self, group: str, what: str, facts: Facts, choice: str) -> frozenset[str]:
        """The choices that all ranks made at the first compile."""
        return self.agree(group, _once(what, facts, choice))

    def collectives(self, gm: GraphModule, phase: str, groups: list[str]) -> None:
        """Raise unless all ranks of each group send the same collectives in the same order."""
        for group in groups:
            self.agree(group, _sequence(gm, phase))


class Recalled(Agreements):
    """The comparisons of an earlier compile. It asks no rank; all may raise NotAgreed."""

    def agree(self, group: str, stated: Statement, every_time: bool = False) -> frozenset[str]:
        """The notes of ranks that agreed on a statement before."""
        notes = known(compat.resolve_group(group), stated)
        if not notes:
            raise NotAgreed(stated.what)
        return notes


def _unscheduled(phase: str, facts: Facts, note: str) -> Statement:
    return _once(f"the collectives of a {phase} graph, before they are scheduled", facts, note)


def _once(what: str, facts: Facts, note: str) -> Statement:
    return Statement(what, facts(False), note, first_note_stands=True, kept_as=facts(True))


def _sequence(gm: GraphModule, phase: str) -> Statement:
    facts, kept_as = collective_sequence(gm), collective_sequence(gm, by_number=True)
    return Statement(f"the collectives of a {phase} graph", facts, kept_as=kept_as)


def _slowest(notes: frozenset[str]) -> list[float]:
    return [max(times) for times in zip(*map(json.loads, notes), strict=True)]
