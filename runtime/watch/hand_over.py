"""Hand-overs: one rank makes bytes for others of its group, which wait and are never stuck.

The maker says in the group's store, every few seconds, that it is alive. A rank that hears nothing
for a while, or is told that there is nothing to take, goes on alone.
"""

import contextlib
import hashlib
import itertools
import logging
import threading
import time
from collections.abc import Collection

import torch.distributed as dist

from shardc.runtime import compat
from shardc.runtime.groups.communicators import kept_with
from shardc.runtime.groups.store import look, pauses, store_of

log = logging.getLogger("shardc")

_BEAT, _DEAD = 2.0, 30.0
"""Seconds between the maker's signs of life, and of the silence after which it counts as dead."""
_SHARE = 4
"""The group's timeout is divided by this for a rank that may be the only one to come."""
_CHUNK = 1 << 20
"""Bytes that travel as one value of the store."""
_SAID_AFTER, _SAID_EVERY = 5.0, 30.0
"""Seconds after which a wait is logged, and between the later lines of the log."""


class HandOver:
    """Bytes that one rank of a group hands over to the others, once.

    Args:
        group: the ranks.
        key: the name of the bytes, equal on all ranks that need them.
        together: whether all ranks come, in one order for all hand-overs; the maker then follows
            from the key. Else any rank may come, and the first to come is the maker.
    """

    def __init__(self, group: dist.ProcessGroup, key: str, together: bool = True) -> None:
        self._maker: int | None = None
        place = key
        if together:
            place = str(next(kept_with(group, HandOver, itertools.count)))
            self._maker = int(hashlib.sha256(key.encode()).hexdigest(), 16) % group.size()
        self._store = dist.PrefixStore(f"shardc/made/{place}", store_of(group))
        self._world = group.size()
        self._timeout = compat.group_timeout(group).total_seconds()
        if not together:  # the maker's device may wait for a collective not started here
            self._timeout /= _SHARE
        self._folders = 0
        self._given = False
        self._done = threading.Event()
        self.leads = group.rank() == self._maker if together else self._store.add("come", 1) == 1

    def begin(self, folders: Collection[str]) -> None:
        """Begin to make the bytes here; ranks that keep files in other `folders` need them sent."""
        self._folders = len(folders)
        self._store.set("beat", str(0))
        threading.Thread(target=self._beat, name="shardc compiles", daemon=True).start()

    def give(self, content: bytes | None) -> None:
        """Hand over the bytes, once; None tells each rank to make them itself."""
        if self._given or not self.leads:
            return
        self._given = True
        self._done.set()
        pieces = 0
        if content is not None and self.sends:
            pieces = -(-len(content) // _CHUNK)
            for index in range(pieces):
                part = content[index * _CHUNK : (index + 1) * _CHUNK]
                self._store.set(f"piece{index}", part)  # type: ignore[arg-type]
        state = "nothing" if content is None else str(pieces)
        with contextlib.suppress(dist.DistError):  # the others are gone, and the store with them
            self._store.set("state", state)

    def take(self) -> bytes | None:
        """Wait for the maker's bytes; None if it gives none, is silent, or left them on disk."""
        with contextlib.suppress(dist.DistError):  # the store is gone; a collective will say more
            state = self._wait()
            if state not in ("", "nothing", "0"):
                return b"".join(self._store.get(f"piece{index}") for index in range(int(state)))
        return None

    @property
    def sends(self) -> bool:
        """Whether the bytes travel through the store; else the other ranks find them on disk."""
        return self._folders > 0

    @property
    def _who(self) -> str:
        return "another rank" if self._maker is None else f"rank {self._maker} of the group"

    def _beat(self) -> None:
        beats = 0
        with contextlib.suppress(dist.DistError):
            while not self._done.wait(_BEAT):
                beats += 1
                self._store.set("beat", str(beats))

    def _wait(self) -> str:
        """Wait for the maker's last state; "" where the maker is dead or takes too long."""
        began = heard = listened = time.monotonic()
        said, pause, beat = began + _SAID_AFTER - _SAID_EVERY, pauses(self._world), ""
        while (state := look(self._store, "state")) is None:
            now = time.monotonic()
            if now - listened > _BEAT:
                latest, listened = look(self._store, "beat") or "", now
                beat, heard = latest, now if latest != beat else heard
            if now - heard > _DEAD or now - began > self._timeout:
                log.warning(
                    "%s compiles the same, but %s: this rank compiles the graph itself",
                    self._who,
                    f"is silent for {now - heard:.0f} s" if now - heard > _DEAD else "takes long",
                )
                return ""
            if now - said > _SAID_EVERY:
                said = now
                log.info("waiting for %s, which compiles the same", self._who)
            time.sleep(next(pause))
        return state
