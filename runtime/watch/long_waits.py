"""A thread looks at waits while they last: it logs a long one, and ends it where ranks have parted.

The thread does nothing while waits are short and collectives are entered. It answers ranks whose
collective failed (`lost_peers`), and compares this rank with the one before it in the group,
through the store (`program_collectives`): in this way ranks that share no memory find out that they
have parted. A rank that has entered nothing for a while looks, once a second, whether others wait;
then it shows where it is.
"""

import atexit
import logging
import sys
import threading
import time
from types import TracebackType

import torch.distributed as dist

from shardc.runtime import compat
from shardc.runtime.groups.backends import end_waits
from shardc.runtime.groups.store import store_of
from shardc.runtime.watch.history import History, history_of
from shardc.runtime.watch.lost_peers import (
    FAILED,
    append,
    called_from,
    leave,
    line_of,
    note_parting,
    said_parted,
)
from shardc.runtime.watch.program_collectives import Shown, from_json, parted_from, this_rank
from shardc.runtime.watch.progress import AwaitedCall, Label, progress

log = logging.getLogger("shardc")

_ASKED, _SHOWN = "shardc/asked", "shardc/shown"
_TICK, _LONG = 0.25, 0.5
"""Seconds between two looks at waits, and from which on a wait is long enough to look further."""
_STILL, _PACE = 2.0, 1.0
"""Seconds without an entry after which others may wait for a rank, and between its looks."""
_NOTICE = 1.5
"""Seconds from a rank's line in the store to the end of its waits: others read the line first."""
_WARN = 0.1
"""The share of the timeout after which a wait is logged."""


def watch(group: str) -> History | None:
    """Watch the waits of `group` from now on: log long ones, and answer ranks that failed.

    Returns:
        The history of the group, for the collectives that are started from now on.
    """
    global _thread
    if _thread is None:
        _thread = threading.Thread(target=_watch, name="shardc watch", daemon=True)
        _thread.start()
        compat.let_backend_threads_finish()
        atexit.register(_stop, _thread)
        _tell_when_it_ends()
    history = history_of(group)
    if history is not None:
        _watched[group] = history
    return history


_watched: dict[str, History] = {}
"""By group, its history. The thread that enters the group makes it, not the watching thread."""
_thread: threading.Thread | None = None
_ended = threading.Event()


def _tell_when_it_ends() -> None:
    """Tell other ranks of an exception that ends the program."""
    before = sys.excepthook

    def hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        leave(error)
        before(kind, error, trace)

    sys.excepthook = hook


def _watch() -> None:
    """Look at this rank's wait, or at the waits of other ranks, until the process ends."""
    looks: dict[str, _Look | _Still] = {}
    while not _ended.wait(_TICK):
        label, since = progress.inside, progress.since
        if label is None or not label.waits:
            _look_at_groups(looks, None, since)
        elif time.monotonic() - since >= _LONG:
            _look_at_groups(looks, label, since)


def _look_at_groups(looks: "dict[str, _Look | _Still]", label: Label | None, since: float) -> None:
    """Look once, for each group, at the wait for `label`, or without one at the waits of others.

    A group that is gone, or whose store is gone, is left out until one of its collectives is
    entered: each question to a store that is gone would leave a trace on the screen.
    """
    for group, history in list(_watched.items()):
        try:
            members = _members_of(group, history)
            look = looks.get(group)
            if look is None or not look.goes_on(history, None if label is None else since):
                kind = _Still if label is None else _Look
                look = looks[group] = kind(members, history, since)
            look.look(label)
        except (RuntimeError, ValueError):
            _watched.pop(group, None)
            looks.pop(group, None)


def _members_of(group: str, history: History) -> dist.ProcessGroup:
    """The group of this history; raises if the group is gone, or another group has its name."""
    members = compat.resolve_group(group)
    if not history.is_of(members):
        raise ValueError(f"group '{group}' was made anew")
    return members


class _Look:
    """The steps taken about one long wait, for one group."""

    def __init__(self, members: dist.ProcessGroup, history: History, since: float) -> None:
        self._members, self._history, self._since = members, history, since
        self._timeout = compat.group_timeout(members)
        self._warned = self._named = self._shown = False
        self._answered: float | None = None
        self._asks = 0.0

    def goes_on(self, history: History, since: float | None) -> bool:
        """Whether the same wait still goes on."""
        return history is self._history and since == self._since

    def look(self, label: Label | None) -> None:
        """Warn, answer ranks that failed, and find out whether ranks have parted."""
        assert label is not None
        members, history = self._members, self._history
        waits_here = progress.history is history  # and not for a collective of another group
        if waits_here:
            self._warn(label)
        if history.is_over:
            return
        if self._answered is None:
            store = store_of(members)
            if history.parted is None and waits_here:
                history.parted = self._compared(store, label)
            said = store.check([FAILED])
            if said and history.parted is None:
                history.parted = said_parted(members)
            if said or history.parted is not None:
                self._answered = time.monotonic()
                append(members, line_of(members))
        elif history.parted is not None and time.monotonic() - self._answered > _NOTICE:
            history.is_over = True
            end_waits(members)

    def _warn(self, label: Label) -> None:
        seconds = time.monotonic() - self._since
        if not self._warned and seconds > _WARN * self._timeout.total_seconds():
            self._warned = True
            log.warning(
                "rank %d has waited %.0f s for %s%s; the timeout is %s", dist.get_rank(), seconds,
                label.renamed(), called_from(label), self._timeout,
            )  # fmt: skip

    def _compared(self, store: dist.Store, label: Label) -> str | None:
        """The message on the place where this rank and the one before it in the group have parted.

        None if they have not. Each rank is compared with one other rank, so a comparison costs as
        much for thousands of ranks as for two.
        """
        history, place = self._history, self._members.rank()
        before = (place or self._members.size()) - 1
        if not self._shown:
            self._shown = True
            store.set(f"{_SHOWN}/{place}", this_rank(history).to_json())
        if time.monotonic() > self._asks:
            self._asks = time.monotonic() + _STILL
            store.set(f"{_ASKED}/{before}", "")
        if not store.check([f"{_SHOWN}/{before}"]):
            return None
        theirs = from_json(store.get(f"{_SHOWN}/{before}"))
        self._name(theirs)
        return parted_from(
            history, compat.group_name(self._members), theirs, type(label) is AwaitedCall
        )

    def _name(self, theirs: Shown) -> None:
        if self._warned and not self._named and theirs.at:
            self._named = True
            log.warning("rank %d, for which it may wait, is %s", theirs.rank, theirs.at)


class _Still:
    """The answers of a rank that waits for no collective of shardc, to others of one group."""

    def __init__(self, members: dist.ProcessGroup, history: History, since: float) -> None:
        self._members, self._history, self._count = members, history, history.count
        self._next = time.monotonic() + _STILL
        self._pace = _PACE * max(1.0, members.size() / 1000)  # to spare the store
        self._answered = False

    def goes_on(self, history: History, since: float | None) -> bool:
        """Whether the rank has entered nothing since."""
        return history is self._history and since is None and history.count == self._count

    def look(self, label: Label | None) -> None:
        """Show where this rank is, if the next rank in the group or a failed rank asks."""
        members, place = self._members, self._members.rank()
        if self._history.is_over or time.monotonic() < self._next:
            return
        self._next = time.monotonic() + self._pace
        store = store_of(members)
        if store.check([f"{_ASKED}/{place}"]):
            store.delete_key(f"{_ASKED}/{place}")
            store.set(f"{_SHOWN}/{place}", this_rank(self._history).to_json())
        if store.check([FAILED]):
            note_parting(members)
            if not self._answered:
                self._answered = True
                append(members, line_of(members))


def _stop(thread: threading.Thread) -> None:
    _ended.set()
    thread.join(2 * _TICK)
