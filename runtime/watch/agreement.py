"""Ranks compare facts through the store, before a collective could hang on a difference.

Every rank states its facts as lines of text, and one verdict goes back to all. The store counts the
ranks by a digest of their text; a few of them compare the text itself with rank 0's. A comparison
costs two store operations a rank, three with a note, and looks while others are late. All ranks
raise an error that names a rank that differs or does not answer. Facts already agreed on are not
compared again, so a rank may recompile alone for its own shapes, as long as its sequence of
collectives stays the same.
"""

import difflib
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import timedelta

import torch.distributed as dist

from shardc.runtime import compat
from shardc.runtime.checks.call_sites import place_of_thread
from shardc.runtime.checks.words import plural
from shardc.runtime.groups.communicators import kept_with
from shardc.runtime.groups.store import Attendance, digest, look, pauses, store_of
from shardc.runtime.watch.entering import in_history
from shardc.runtime.watch.history import Failed, Parted
from shardc.runtime.watch.lost_peers import store_holder
from shardc.runtime.watch.progress import AwaitedCall, progress

_AGREED = "agreed\n"
"""The first line of a verdict where all ranks agree; the notes follow, one a line."""
_KEPT = 4096
"""Statements that a group remembers as agreed on. All ranks forget the same statements."""


@dataclass(frozen=True)
class Statement:
    """The statement of a rank; all ranks of its group must state the same facts.

    Attributes:
        facts: lines of text that must be equal on all ranks.
        note: a line of text that may differ from rank to rank; all ranks give one, or none does.
        first_note_stands: whether the notes of the first round on these facts hold for good; else a
            new note starts another round, which all ranks must enter.
        kept_as: lines to remember in place of the facts. Other facts with the same lines count as
            agreed on, too.
    """

    what: str
    """The name of the comparison, for the error."""
    facts: Sequence[str] = ()
    note: str = ""
    first_note_stands: bool = False
    kept_as: Sequence[str] | None = None

    @property
    def name(self) -> str:
        """The key under which the agreement is remembered."""
        return digest(self.what, *(self.facts if self.kept_as is None else self.kept_as))


@dataclass
class _History:
    """The agreements of one group.

    Attributes:
        rounds: the number of comparisons of its ranks.
        notes: by name of a statement, the notes of each round on it, oldest first.
    """

    rounds: int = 0
    notes: dict[str, list[frozenset[str]]] = field(default_factory=dict)

    def known(self, name: str, stated: Statement) -> frozenset[str]:
        """The notes of rounds in which a rank gave this note; of the first round if they stand."""
        rounds = self.notes.get(name, [])
        if stated.first_note_stands:
            return frozenset().union(*rounds[:1])
        return frozenset().union(*(given for given in rounds if stated.note in given))

    def keep(self, name: str, notes: frozenset[str]) -> None:
        self.notes.setdefault(name, []).append(notes)
        while len(self.notes) > _KEPT:
            del self.notes[next(iter(self.notes))]


def agree(
    group: dist.ProcessGroup,
    stated: Statement,
    timeout: timedelta | None = None,
    every_time: bool = False,
    before: Callable[[], None] | None = None,
) -> frozenset[str]:
    """Raise on every rank of `group` unless all state the same facts.

    Args:
        group: the ranks that compare.
        stated: the statement of this rank.
        timeout: the time to wait for the others (default: the group's timeout).
        every_time: compare even facts that were agreed on before; all ranks do so together.
        before: a function that is called before a comparison.

    Returns:
        The notes of all ranks, from the rounds in which a rank gave this rank's note; with
        `first_note_stands`, from the first round.

    Raises:
        RuntimeError: a rank states other facts, or does not answer in time.
    """
    if not compat.has_others(group):
        return frozenset([stated.note])
    history, name = kept_with(group, _History, _History), stated.name
    notes = frozenset[str]() if every_time else history.known(name, stated)
    if not notes:
        timeout = timeout or compat.group_timeout(group)
        if before is not None:
            before()
        store = _next_round(group)
        with in_history(compat.group_name(group)), _entry(stated.what, stated.facts):
            try:
                notes = _exchange(store, group.rank(), group.size(), stated, timeout)
            except dist.DistError as error:
                _raise_if_parted()
                raise Failed(
                    f"agreeing on {stated.what}{_called_from_here()}: the group's store does not "
                    f"answer. {store_holder()}"
                ) from error
        if not every_time:
            history.keep(name, notes)
    return notes


def known(group: dist.ProcessGroup, stated: Statement) -> frozenset[str]:
    """The notes that `agree` would return at once; empty if it would have to ask other ranks."""
    return kept_with(group, _History, _History).known(stated.name, stated)


def settle(group: dist.ProcessGroup, stated: Statement) -> frozenset[str]:
    """Remember facts that are known to be equal as agreed on; all ranks of `group` do the same."""
    history, name = kept_with(group, _History, _History), stated.name
    if not history.known(name, stated):
        history.keep(name, frozenset([stated.note]))
    return history.known(name, stated)


def rounds(group: dist.ProcessGroup) -> int:
    """The number of comparisons that the ranks of `group` have made."""
    return kept_with(group, _History, _History).rounds


def decline(group: dist.ProcessGroup, what: str, why: str) -> None:
    """Make the other ranks raise in their `agree`, because this rank cannot go on. Never waits.

    The call replaces this rank's call of `agree` with `every_time`; the second argument is the name
    of the statement.
    """
    if not compat.has_others(group):
        return
    store, rank = _next_round(group), group.rank()
    with suppress(Parted), in_history(compat.group_name(group)):
        _entry(what, [why]).__enter__()
    _rule(store, f"rank {rank} refuses {what}: {why}")


def _entry(what: str, facts: Sequence[str]) -> AwaitedCall:
    """The entry of a comparison in the group's history.

    The digest of the entry leaves out the facts, which are compared through the store.
    """
    first = f" ({facts[0][:100]})" if facts else ""
    return AwaitedCall("a comparison", f"the comparison of {what}{first}{_called_from_here()}")


def _called_from_here() -> str:
    place = place_of_thread(threading.get_ident())
    return f" at {place}" if place else ""


def _raise_if_parted() -> None:
    history = progress.history
    parted = history and (history.parted or history.differs_here())
    if parted:
        raise Parted(parted) from None


def _next_round(group: dist.ProcessGroup) -> dist.Store:
    history = kept_with(group, _History, _History)
    history.rounds += 1
    return dist.PrefixStore(f"shardc/{history.rounds}", store_of(group))


def _exchange(
    store: dist.Store, rank: int, world: int, stated: Statement, timeout: timedelta
) -> frozenset[str]:
    """Compare in one round: rank 0 gives the reference, and one rank gives the verdict.

    The verdict comes from the rank that comes last, that differs, or that gives up. The first
    verdict stands, so a rank that comes late learns that the others have given up. In each block of
    ranks, only the first rank with a text compares the text: the others stated the same.
    """
    what, note, text = stated.what, stated.note, "\n".join([stated.what, *stated.facts])
    if note and store.add(f"note {digest(note)}", 1) == 1:
        store.append("notes", f"{note}\n")  # type: ignore[attr-defined]
    if rank == 0:
        store.set("text", text)
    attendance = Attendance(store, text, world)
    compares, is_last = attendance.come(rank)
    if is_last:
        _rule(store, _AGREED + (look(store, "notes") or "\n"))
    began, pause = time.monotonic(), pauses(world)
    time.sleep(0 if is_last else next(pause))
    while (verdict := look(store, "verdict")) is None:  # no blocking wait: other threads ask, too
        if compares and (reference := look(store, "text")) is not None:
            compares = False
            if reference != text:
                _rule(store, _difference(what, rank, text.split("\n"), reference.split("\n")))
        elif time.monotonic() - began > timeout.total_seconds():
            missing = attendance.missing()
            _rule(
                store,
                f"agreeing on {what}: rank{'s' * (len(missing) != 1)} "
                f"{', '.join(map(str, missing))} did not answer rank {rank}, which waited"
                f"{_called_from_here()}, within {timeout} (the timeout of the process group, or "
                "agreement_timeout). They died, are still busy, or run another program",
            )
        else:
            _raise_if_parted()
            time.sleep(next(pause))
    if not verdict.startswith(_AGREED):
        raise RuntimeError(verdict)
    return frozenset(verdict.removeprefix(_AGREED).split("\n")[:-1])


def _rule(store: dist.Store, verdict: str) -> None:
    store.compare_set("verdict", "", verdict)


def _difference(what: str, rank: int, mine: list[str], reference: list[str]) -> str:
    """The verdict on two texts: it names the comparison and the first line that differs."""
    if mine[0] != reference[0]:
        return (
            f"ranks disagree on the next comparison: rank 0 compares {reference[0]}, "
            f"rank {rank} compares {mine[0]}"
        )
    for number, (own, other) in enumerate(zip(mine[1:], reference[1:], strict=False)):
        if own != other:
            return (
                f"ranks disagree on {what}, entry {number}: rank 0 has «{other}», "
                f"rank {rank} has «{own}»{_parting(other, own)}"
            )
    number = min(len(mine), len(reference)) - 1
    longer, more = (0, reference) if len(reference) > len(mine) else (rank, mine)
    return (
        f"ranks disagree on {what}: rank 0 has {plural(len(reference) - 1, 'entry', 'entries')}, "
        f"rank {rank} has {len(mine) - 1}. The entries that both have are the same; "
        f"rank {longer} goes on with «{more[number + 1]}»"
    )


def _parting(first: str, second: str) -> str:
    """The words in which two long lines differ, at up to four places; "" for short lines."""
    if max(len(first), len(second)) < 100:
        return ""
    a, b = first.split(" "), second.split(" ")
    changes = difflib.SequenceMatcher(None, a, b, autojunk=False).get_opcodes()
    places = [
        f"{' '.join(a[i:j]).strip(',:') or 'nothing'} against "
        f"{' '.join(b[k:n]).strip(',:') or 'nothing'}"
        for kind, i, j, k, n in changes
        if kind != "equal"
    ]
    return f". They differ in {'; '.join(places[:4])}"
