"""Looks at waits while they last: says that one is long, and ends it where ranks have parted.

A thread does it, which does nothing while waits are short. It answers ranks whose collective failed
(`lost_peers`), and compares this rank's history with that of one other, through the store: ranks on
different hosts, which share no memory, find out so that they have parted.
"""

import atexit
import json
import logging
import sys
import threading
import time
from contextlib import suppress
from types import TracebackType

import torch
import torch.distributed as dist

from shardc.runtime import compat
from shardc.runtime.history import Entry, History, history_of
from shardc.runtime.lost_peers import FAILED, append, leave, line_of, parted_where
from shardc.runtime.progress import Label, progress

log = logging.getLogger("shardc")

_WAITS = "shardc/waits"
_TICK, _LONG = 0.25, 0.5
"""Seconds: how often waits are looked at, and from when on one is long enough to look further."""
_WARN = 0.1
"""The share of the timeout after which a wait is logged."""


def watch(group: str) -> History | None:
    """From now on, say so where a wait takes long, and answer ranks whose collective failed.

    Returns:
        The history of the group, which what is started from now on enters.
    """
    if group not in _watched:
        if not _watched:
            thread = threading.Thread(target=_watch, name="shardc watch", daemon=True)
            thread.start()
            atexit.register(_stop, thread)
            _tell_when_it_ends()
        _watched.append(group)
    return history_of(group)


_watched: list[str] = []
_ended = threading.Event()


def _tell_when_it_ends() -> None:
    """Have an exception that ends the program be told to others."""
    before = sys.excepthook

    def hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        leave(error)
        before(kind, error, trace)

    sys.excepthook = hook


def _watch() -> None:
    """Look at the wait that goes on, if one does, until the process ends."""
    looks: dict[str, _Look] = {}
    while not _ended.wait(_TICK):
        label, since = progress.inside, progress.since
        if label is None or not label.waits or time.monotonic() - since < _LONG:
            continue
        for group in _watched:
            with suppress(RuntimeError, ValueError):  # the group is gone, or its store
                members = compat.resolve_group(group)
                history = history_of(group)
                if history is not None:
                    look = looks.get(group)
                    if look is None or look.since != since:
                        look = looks[group] = _Look(members, history, since)
                    look.look(label)


class _Look:
    """What was done about one long wait, in view of one group."""

    def __init__(self, members: dist.ProcessGroup, history: History, since: float) -> None:
        self._members, self._history, self.since = members, history, since
        self._warned = self._answered = self._shown = False

    def look(self, label: Label) -> None:
        """Warn, answer those that failed, and find out whether ranks have parted."""
        members, history = self._members, self._history
        seconds = time.monotonic() - self.since
        timeout = compat.group_timeout(members, torch.device("cpu"))
        if not self._warned and seconds > _WARN * timeout.total_seconds():
            self._warned = True
            log.warning(
                "rank %d has waited %.0f s for %s; the timeout is %s",
                dist.get_rank(), seconds, label.renamed(), timeout,
            )  # fmt: skip
        if self._answered or history.is_over:
            return
        store = compat.group_store(members)
        if history.parted is None:
            history.parted = self._compared(store)
        said = store.check([FAILED])
        if said and history.parted is None:
            lines = map(json.loads, store.get(FAILED).splitlines())
            history.parted = parted_where(members, lines)
        if said or history.parted is not None:
            self._answered = True
            append(members, line_of(members))
        if history.parted is not None:
            history.is_over = True
            compat.break_connections(members)

    def _compared(self, store: dist.Store) -> str | None:
        """Where this rank and the one before it in the group have parted, if both wait.

        Around the group each rank is compared with one other, so that it costs as much for
        thousands of ranks as for two.
        """
        history, place = self._history, self._members.rank()
        if not self._shown:
            self._shown = True
            entries = list(history.entries)
            store.set(f"{_WAITS}/{place}", json.dumps([history.rank, entries]))
        before = f"{_WAITS}/{(place or self._members.size()) - 1}"
        if not store.check([before]):
            return None
        rank, entries = json.loads(store.get(before))
        return history.differs_from(rank, [Entry(*entry) for entry in entries])


def _stop(thread: threading.Thread) -> None:
    _ended.set()
    thread.join(2 * _TICK)
