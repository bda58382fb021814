"""The history of a group: its ranks' entries in order, by which ranks that part are found at once.

Each rank counts the collectives it enters and chains their hashes. Before it hands a collective to
the backend, the rank writes count and hash to memory that the ranks of its host share, and reads
the hashes of the others at that count. The rank that comes second finds the difference: no message,
no wait, and two different collectives never meet in the backend (gloo would mix their bytes, or
abort).

Ranks on other hosts do not see this memory: they compare when a wait is long
(`program_collectives`).
"""

import weakref
import zlib
from collections import deque
from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

import torch.distributed as dist

from shardc.runtime import compat
from shardc.runtime.checks.words import plural
from shardc.runtime.watch.entry_board import RING, board_of, word_of


class Entry(NamedTuple):
    """The entry at a place of a history; `word` stands for all entries up to this one."""

    place: int
    word: int
    text: str


class Failed(RuntimeError):
    """A collective of shardc failed, or cannot be entered; the message names ranks and places."""


class Parted(Failed):
    """Ranks of a group have entered different collectives; `told`: the other ranks know."""

    told = False


class History:
    """The entries of one group, on this rank.

    Attributes:
        name: the name of the group.
        ranks: the ranks of the group, as numbers of the whole job.
        rank: this rank, as a number of the whole job.
        entries: the last `RING` entries.
        count: the number of all entries.
        parted: the message on ranks that parted; None while this rank knows of none.
        is_over: whether a collective of the group failed here, or its waits were ended.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = weakref.ref(group)
        self.name = compat.group_name(group)
        self.ranks = dist.get_process_group_ranks(group)
        self.rank = self.ranks[group.rank()]
        self.entries: deque[Entry] = deque(maxlen=RING)
        self.parted: str | None = None
        self.is_over = False
        self.count = self._chain = 0
        self._board = board_of(group)

    def is_of(self, group: dist.ProcessGroup) -> bool:
        """Whether the history is of this very group, and not of an earlier group of its name."""
        return self._group() is group

    @property
    def is_gone(self) -> bool:
        """Whether the group does not exist any more."""
        return self._group() is None

    def enter(self, digest: int, text: str) -> None:
        """Note the collective that this rank is about to enter; all ranks give the same `digest`.

        Raises:
            Parted: a rank of this host entered another collective at this place.
        """
        self.count += 1
        self._chain = hash((self._chain, digest))  # numbers hash the same in every process
        entry = Entry(self.count, word_of(self.count, self._chain), text)
        self.entries.append(entry)
        if self._board is not None and self._board.post(*entry[:2], text.encode()):
            self.parted = self._difference(self.count)
            raise Parted(self.parted)

    def leave(self, why: str) -> None:
        """Tell ranks of this host that an exception took this rank out of its program."""
        if self._board is not None:
            self._board.leave(self.count, why)

    def left_here(self) -> dict[int, tuple[int, str]]:
        """By rank of this host that left, the number of its entries and the reason."""
        left = self._board.left() if self._board is not None else {}
        return {self.ranks[rank]: why for rank, why in left.items()}

    def differs_here(self) -> str | None:
        """The message on the place where ranks of this host have parted; None if they have not."""
        counts = [entry.place for entry in self.entries] if self._board is not None else []
        return next(filter(None, map(self._difference, counts)), None)

    def _difference(self, count: int) -> str | None:
        assert self._board is not None
        if len(self._board.words_at(count)) < 2:
            return None
        found = self._board.at(count)
        return say_parted(count, {self.ranks[rank]: text for rank, (_, text) in found.items()})

    def differs_from(self, rank: int, theirs: Sequence[Entry]) -> str | None:
        """The message on the place where this rank and `rank` parted; None if they have not."""
        by_count = {entry.place: entry for entry in theirs}
        for mine in self.entries:
            other = by_count.get(mine.place)
            if other is not None and other.word != mine.word:
                return say_parted(mine.place, {self.rank: mine.text, rank: other.text})
        return None


def say_parted(count: int, texts: dict[int, str]) -> str:
    """The message that ranks entered different collectives, `texts`, at place `count`."""
    by_text: dict[str, list[int]] = {}
    for rank, text in sorted(texts.items()):
        by_text.setdefault(text, []).append(rank)
    ways = "; ".join(
        f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))} entered {text}"
        for text, ranks in by_text.items()
    )
    return (
        f"ranks have parted after {plural(count - 1, 'collective')} in common: {ways}. All ranks "
        "must enter the same ones in the same order: look for a branch, a call or a setting "
        "(no_sync, requires_grad, ...) that not all of them have"
    )


@lru_cache(4096)
def digest_of(*facts: object) -> int:
    """A hash of facts, the same in every process."""
    return zlib.crc32(repr(facts).encode())


_histories: dict[str, History | None] = {}
_world: object = None


def histories() -> list[tuple[str, History]]:
    """The histories of all groups that have one, each with a name."""
    names = {history: name for name, history in _histories.items() if history is not None}
    return [(name, history) for history, name in names.items()]


def history_of(name: str) -> History | None:
    """The history of the group of that name; None for a group without peers."""
    global _world
    if dist.group.WORLD is not _world:  # groups were made anew
        _histories.clear()
        _world = dist.group.WORLD
    known = _histories.get(name)
    if name not in _histories or (known is not None and known.is_gone):
        group = compat.resolve_group(name)
        own_name = compat.group_name(group)
        if own_name != name:
            _histories[name] = history_of(own_name)
        else:
            _histories[name] = History(group) if compat.has_others(group) else None
    return _histories[name]
