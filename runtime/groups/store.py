"""A group's store, asked with few operations a rank: it serves the ranks of a job one by one."""

import hashlib
from collections.abc import Iterator

import torch.distributed as dist

from shardc.runtime import compat
from shardc.runtime.groups.communicators import kept_with

_BLOCK = 62
"""Ranks that are counted in one number of the store, which has 63 bits."""
_MISSING = "-"
"""The value that `look` reads where a key has none."""
_FIRST, _LONGEST, _GROWTH = 0.0005, 0.2, 1.5
"""Seconds between looks at the store in a small group, at first and at most; growth factor."""
_AT_FIRST, _LATER = 50_000, 10_000
"""Looks a second by all ranks of a large group together."""


def store_of(group: dist.ProcessGroup) -> dist.Store:
    """The store of a group, without keys that an earlier group of its name has left there.

    Under torchrun all groups that a process makes one after another share a store. Each rank counts
    the groups of a name that shardc has used: the count is equal on all ranks that run one program.

    Raises:
        ValueError: the group has been destroyed.
        RuntimeError: the store is gone.
    """
    store = compat.group_store(group)
    before = kept_with(group, store_of, lambda: store.add(f"shardc/groups/{group.rank()}", 1) - 1)
    return dist.PrefixStore(f"after {before}", store) if before else store


def look(store: dist.Store, key: str) -> str | None:
    """The value of a key, or None, in one operation. The value must not be "-"."""
    found = store.compare_set(key, _MISSING, _MISSING).decode()
    return None if found == _MISSING else found


def pauses(world: int) -> Iterator[float]:
    """Seconds between the looks of each of `world` ranks that wait for the same key."""
    pause, longest = max(_FIRST, world / _AT_FIRST), max(_LONGEST, world / _LATER)
    while True:
        yield pause
        pause = min(_GROWTH * pause, longest)


def digest(*texts: str) -> str:
    """A short name for texts."""
    return hashlib.sha256("\n".join(texts).encode()).hexdigest()


class Attendance:
    """The ranks, of `world`, that have come with the same text, in the store.

    Each rank has a bit in the number of its block of ranks: one operation tells a rank whether its
    block is complete. The last rank of the last complete block knows that all ranks have come.
    """

    def __init__(self, store: dist.Store, text: str, world: int) -> None:
        self._store, self._world = store, world
        self._name = digest(text)
        self._blocks = -(-world // _BLOCK)

    def come(self, rank: int) -> tuple[bool, bool]:
        """Note that `rank` has come.

        Returns:
            Whether it is the first of its block with this text, and whether it is the last of all
            ranks.
        """
        block, place = divmod(rank, _BLOCK)
        here = self._store.add(f"{self._name}/{block}", 1 << place)
        is_first = here == 1 << place
        if is_first:
            self._store.append("texts", f"{self._name}\n")  # type: ignore[attr-defined]
        size = min(_BLOCK, self._world - block * _BLOCK)
        is_full = here == (1 << size) - 1
        is_last = is_full and self._store.add(f"{self._name}/blocks", 1) == self._blocks
        return is_first, is_last

    def missing(self) -> list[int]:
        """Ranks that have not come, with any text."""
        texts = {self._name, *(look(self._store, "texts") or "").split()}
        here = [
            {self._store.add(f"{text}/{block}", 0) for text in texts}
            for block in range(self._blocks)
        ]
        return [
            rank
            for rank in range(self._world)
            if not any(bits >> rank % _BLOCK & 1 for bits in here[rank // _BLOCK])
        ]
