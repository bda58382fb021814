"""Memory that the ranks of a group on one host share: the last collectives of each rank.

All ranks map a file of fixed size. A rank writes its own ring only, so there are no locks, and it
writes the word of an entry last. The ranks agree on the name of the file by one operation of the
store. The file is removed once all ranks have it open, or at exit; ranks on another host have
another file.
"""

import atexit
import fcntl
import mmap
import os
import secrets
import tempfile
from contextlib import suppress

import torch.distributed as dist

from shardc.runtime.groups.store import store_of

RING = 128
"""Entries that a rank keeps: it is not compared with a rank that is further ahead."""
COUNT_BITS = 16
_ENTRY, _WORD = 256, 8
"""Bytes of an entry, and of the word that it begins with; its text follows."""
_RANK = (RING + 1) * _ENTRY
"""Bytes of a rank: its ring, and an entry for the reason why it left."""
_CHAIN_BITS = 8 * _WORD - COUNT_BITS


def word_of(count: int, chain: int) -> int:
    """The word of an entry, for ranks to compare: its place, and a hash of all entries up to it."""
    return (count % (1 << COUNT_BITS)) << _CHAIN_BITS | chain % (1 << _CHAIN_BITS)


def _is_at(word: int, count: int) -> bool:
    return word != 0 and word >> _CHAIN_BITS == count % (1 << COUNT_BITS)


class Board:
    """The entries of the ranks of this host; this rank is `rank` of `world`."""

    def __init__(self, path: str, rank: int, world: int) -> None:
        self._rank, self._world = rank, world
        # words: the count of ranks that have it open, these ranks; from a new page on, the rings
        self._start = -(-(1 + world) * _WORD // mmap.PAGESIZE) * mmap.PAGESIZE
        size = self._start + world * _RANK
        file = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
        try:
            fcntl.flock(file, fcntl.LOCK_EX)
            if os.fstat(file).st_size < size:
                os.ftruncate(file, size)  # pages that nobody writes to take no memory
            self._memory = mmap.mmap(file, size)
            self._words = memoryview(self._memory).cast("Q")
            self._sign_in(path)
        finally:
            fcntl.flock(file, fcntl.LOCK_UN)  # the mapping keeps the file open
            os.close(file)
        self._known = 0
        self._peers: list[int] = []

    def _sign_in(self, path: str) -> None:
        here = self._words[0] + 1
        self._words[here] = self._rank
        self._words[0] = here
        if here in (self._world, int(os.environ.get("LOCAL_WORLD_SIZE", "0"))):
            os.unlink(path)
        else:
            atexit.register(_remove, path)

    def post(self, count: int, word: int, text: bytes) -> bool:
        """Write an entry, and tell whether another rank has a different entry at its place."""
        place = count % RING * _ENTRY
        self._write(place, word, text)
        words = self._words
        if words[0] != self._known:
            self._look_who_is_here()
        for ring in self._peers:
            other = words[(ring + place) // _WORD]
            if other != word and other >> _CHAIN_BITS == word >> _CHAIN_BITS:
                return True
        return False

    def _write(self, place: int, word: int, text: bytes) -> None:
        start = self._start + self._rank * _RANK + place + _WORD
        text = text[: _ENTRY - _WORD - 1]
        self._memory[start : start + len(text) + 1] = text + b"\0"
        self._words[start // _WORD - 1] = word

    def leave(self, count: int, text: str) -> None:
        """Write the reason why this rank left after `count` entries."""
        self._write(RING * _ENTRY, count, text.encode())

    def left(self) -> dict[int, tuple[int, str]]:
        """By rank that left, the number of its entries and the reason."""
        found = {rank: self._read(rank, RING) for rank in self._here()}
        return {rank: entry for rank, entry in found.items() if entry[0]}

    def at(self, count: int) -> dict[int, tuple[int, str]]:
        """By rank with an entry at this place, the word and the text of the entry."""
        found = {rank: self._read(rank, count % RING) for rank in self._here()}
        return {rank: entry for rank, entry in found.items() if _is_at(entry[0], count)}

    def words_at(self, count: int) -> set[int]:
        """The words of all entries at this place: one where ranks have not parted."""
        first, words = self._start + count % RING * _ENTRY, self._words
        found = {words[(first + rank * _RANK) // _WORD] for rank in self._here()}
        return {word for word in found if _is_at(word, count)}

    def _here(self) -> memoryview:
        return self._words[1 : 1 + self._words[0]]

    def _read(self, rank: int, index: int) -> tuple[int, str]:
        start = self._start + rank * _RANK + index * _ENTRY
        word = self._words[start // _WORD]  # read before the text: writers write it last
        text = self._memory[start + _WORD : start + _ENTRY].split(b"\0")[0]
        return word, text.decode(errors="replace")

    def _look_who_is_here(self) -> None:
        self._known = self._words[0]
        ranks = [rank for rank in self._here() if rank != self._rank]
        self._peers = [self._start + rank * _RANK for rank in ranks]


def board_of(group: dist.ProcessGroup) -> Board | None:
    """The board of a group; None where the store or the file fails."""
    folder = "/dev/shm" if os.path.isdir("/dev/shm") else tempfile.gettempdir()
    with suppress(RuntimeError, OSError):  # the store fails, or the file
        store, mine = store_of(group), secrets.token_hex(16)
        token = store.compare_set("shardc/board", "", mine)
        return Board(f"{folder}/shardc-{token.decode()}", group.rank(), group.size())
    return None


def _remove(path: str) -> None:
    with suppress(FileNotFoundError):
        os.unlink(path)
