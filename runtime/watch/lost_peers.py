"""Errors of failed collectives: they name the collective, its unit and the missing ranks.

Ranks that part from each other find out as they enter a collective (`history`), or in a long wait
(`long_waits`). A rank that finds out raises, and the waits of the others end.

A rank whose collective fails adds a line to a list in the group's store: its wait, and the number
of collectives it has started. Ranks that still wait see the list and add their own line: a thread
of each polls the store, only during long waits. After a grace the failed rank reads the list. A
rank without a line died, or cannot answer; a rank that is busy elsewhere says where.

Nothing here can hang: a thread asks the store, and is left behind where the store does not answer.
Waits on CUDA do not block the host: there NCCL's own watchdog ends the process, and only the file
of its flight recorder tells more.
"""

import json
import logging
import os
import re
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from datetime import timedelta
from functools import partial
from types import MappingProxyType
from typing import TypedDict, TypeVar

import torch.distributed as dist

from shardc.runtime import compat
from shardc.runtime.checks.call_sites import own_collective_of, place_of_thread
from shardc.runtime.checks.words import plural, some
from shardc.runtime.groups.backends import BACKENDS, end_waits, flight_record
from shardc.runtime.groups.store import store_of
from shardc.runtime.watch.entry_board import RING
from shardc.runtime.watch.history import Failed, Parted, histories, history_of
from shardc.runtime.watch.progress import AwaitedCall, Label, progress

log = logging.getLogger("shardc")

FAILED, _LEFT = "shardc/failed", "shardc/left"
_ASKED = 64
"""Ranks that are asked, at most, why they left."""
_GRACE = timedelta(seconds=3)
"""The time that a failed rank waits for the lines of others, or a fifth of the timeout if that is
less: ranks that wait for the same collective fail within moments, or answer."""


_ADVICE = re.compile(r"\s*(This is typically caused by|Check the logs|GLHF)")
"""The start of gloo's advice: our error has said it."""

T = TypeVar("T")

Line = TypedDict(
    "Line", {"rank": int, "at": str, "started": int, "from": str, "parted": str | None}
)
"""The line of a rank: where it is, how many collectives it has started, the place in the program
that called, and the message on ranks that parted if it knows of any."""


def is_from_backend(error: BaseException) -> bool:
    """Whether torch's backend of collectives raised `error`."""
    if isinstance(error, Failed) or not isinstance(error, RuntimeError):
        return False
    text, words = str(error).lower(), (w for known in BACKENDS.values() for w in known.errors)
    return isinstance(error, dist.DistError) or any(word in text for word in words)


def explain_failure(group: str, error: Exception) -> str:
    """The message for `error`, which a collective over `group` raised on this rank."""
    members = compat.resolve_group(group)
    timeout = compat.group_timeout(members)
    line, lines = _tell(members)
    where = (
        f"a collective of shardc failed on rank {line['rank']} of {dist.get_world_size()}, at "
        f"{line['at']}{_called_from(line)}"
    )
    parted = parted_where(members, lines or [])
    if parted is not None:
        return f"{where} ({_quoted(error)}): {parted}"
    left = _within(1.0, lambda: _left(members)) or {}
    if lines is None and not left:
        others = f"Other ranks cannot be asked: the group's store does not answer. {store_holder()}"
    else:
        ranks = dist.get_process_group_ranks(members)
        others = compare_lines(line, lines or [], ranks, left)
    return " ".join(
        [
            f"{where}: a peer died or did not take part in time (the group's timeout is "
            f"{timeout}; {_quoted(error)}).",
            *_flight_record(members),
            others,
        ]
    )


def tell(group: str, error: Parted) -> None:
    """Tell the other ranks that this rank has parted from them, and end their waits."""
    if not error.told:
        members = compat.resolve_group(group)
        error.told = True
        line, _ = _tell(members, ends_waits=True)
        error.args = (f"on rank {line['rank']} of {dist.get_world_size()}: {error}",)


def parted_where(members: dist.ProcessGroup, lines: Iterable[Line]) -> str | None:
    """The message on ranks that parted: this rank's, that of others, or that of this host."""
    history = history_of(compat.group_name(members))
    if history is None:
        return None
    said = (line["parted"] for line in lines if line["parted"])
    return history.parted or next(said, None) or history.differs_here()


def said_parted(members: dist.ProcessGroup) -> str | None:
    """The message on ranks that parted, from the lines of failed ranks."""
    store = store_of(members)
    lines = store.get(FAILED).splitlines() if store.check([FAILED]) else []
    return parted_where(members, map(json.loads, lines))


def note_parting(members: dist.ProcessGroup) -> None:
    """Log that other ranks found this rank to have parted from them.

    This rank waits for no collective of shardc: the collective that it is in will fail with an
    error of the backend.
    """
    history = history_of(compat.group_name(members))
    assert history is not None
    if history.parted is None:
        history.parted = said_parted(members)
        if history.parted is not None:
            history.is_over = True
            log.error("on rank %d of %d: %s", history.rank, dist.get_world_size(), history.parted)


def _tell(members: dist.ProcessGroup, ends_waits: bool = False) -> tuple[Line, list[Line] | None]:
    """Tell the other ranks this rank's line.

    Returns:
        This rank's line, and the lines of the ranks that answer in time; None in their place where
        the store does not answer.
    """
    timeout = compat.group_timeout(members)
    grace = min(_GRACE, timeout / 5).total_seconds()
    line = line_of(members)
    _within(grace, lambda: append(members, line))
    history = history_of(compat.group_name(members))
    assert history is not None
    history.is_over = True
    if ends_waits:
        _within(grace, lambda: end_waits(members))
    return line, _within(grace + 1, lambda: _lines(members, grace))


def leave(error: BaseException) -> None:
    """Note the exception that takes this rank out of its program: peers may ask why it is late."""
    if isinstance(error, Failed):
        return
    why = f"{type(error).__name__}: {' '.join(str(error).split())[:150]}"
    for group, history in histories():
        with suppress(RuntimeError, ValueError):  # the group is gone, or its store
            history.leave(why)
            members = compat.resolve_group(group)
            if is_from_backend(error):
                _within(1.0, partial(note_parting, members))
            store_of(members).set(f"{_LEFT}/{history.rank}", json.dumps([history.count, why]))


def _left(members: dist.ProcessGroup) -> dict[int, str]:
    """By rank that left less than `RING` entries ago, the reason."""
    history = history_of(compat.group_name(members))
    assert history is not None
    left = history.left_here()
    with suppress(RuntimeError):
        store = store_of(members)
        for rank in [rank for rank in history.ranks if rank not in left][:_ASKED]:
            if store.check([f"{_LEFT}/{rank}"]):
                left[rank] = tuple(json.loads(store.get(f"{_LEFT}/{rank}")))
    left.pop(history.rank, None)
    return {rank: why for rank, (count, why) in left.items() if history.count - count < RING}


def line_of(members: dist.ProcessGroup) -> Line:
    """The line that this rank tells the others."""
    label = progress.inside
    own = own_collective_of(progress.main_thread)
    if label is not None:
        label = label.renamed()
        at = f"the wait for {label}" if label.waits else f"the start of {label}"
    else:
        at = f"the work after {progress.last}" if progress.last else "the first work"
        at = f"{own}, a collective of the program's own" if own else at
    return {
        "rank": dist.get_process_group_ranks(members)[members.rank()],
        "at": at,
        "started": progress.started,
        "from": "" if own else _place_of(label),
        "parted": parted_where(members, ()),
    }


def called_from(label: Label) -> str:
    """The line of the user's program that a wait of this process belongs to, in brackets.

    The result is "" where the line is unknown, or the label names it.
    """
    place = _place_of(label)
    return f" (called from {place})" if place else ""


def _place_of(label: Label | None) -> str:
    return "" if isinstance(label, AwaitedCall) else place_of_thread(progress.main_thread)


def _called_from(line: Line) -> str:
    return f" (called from {line['from']})" if line.get("from") else ""


def append(members: dist.ProcessGroup, line: Line) -> None:
    store = store_of(members)
    store.append(FAILED, json.dumps(line) + "\n")  # type: ignore[attr-defined]


def _lines(members: dist.ProcessGroup, grace: float) -> list[Line]:
    """The lines of this rank and of all others that come in time."""
    store, deadline, pause = store_of(members), time.monotonic() + grace, 0.05
    while True:
        lines = {line["rank"]: line for line in map(json.loads, store.get(FAILED).splitlines())}
        left = deadline - time.monotonic()
        if len(lines) >= members.size() or left <= 0:
            return list(lines.values())
        time.sleep(min(pause, left))
        pause *= 2


def _within(seconds: float, call: Callable[[], T]) -> T | None:
    """The result of `call`; None if the call fails or takes longer than `seconds`."""
    results: list[T] = []

    def run() -> None:
        with suppress(RuntimeError):  # errors of stores are all of this kind
            results.append(call())

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(seconds)
    return results[0] if results else None


def compare_lines(
    mine: Line,
    lines: Iterable[Line],
    ranks: list[int],
    left: Mapping[int, str] = MappingProxyType({}),
) -> str:
    """Say where the other `ranks` are.

    Args:
        mine: the line of this rank.
        lines: the lines of the ranks that answered.
        ranks: all ranks of the group.
        left: by rank that left, the reason.
    """
    by_rank = {line["rank"]: line for line in lines}
    others = [rank for rank in ranks if rank != mine["rank"]]
    same: list[int] = []
    elsewhere: dict[str, list[int]] = {}
    for rank in others:
        line = by_rank.get(rank)
        if line is None:
            continue
        if (line["at"], line["started"]) == (mine["at"], mine["started"]):
            same.append(rank)
        else:
            place = f"at {line['at']}{_called_from(line)}"
            if line["started"] != mine["started"]:
                started = plural(line["started"], "collective")
                place += f", having started {started} ({mine['started']} here)"
            elsewhere.setdefault(place, []).append(rank)
    silent = [rank for rank in others if rank not in by_rank and rank not in left]
    said = [f"Rank {rank} left with {why}." for rank, why in sorted(left.items())[:16]]
    said += [f"{_named(there)} elsewhere: {place}." for place, there in elsewhere.items()]
    if silent:
        said.insert(0, f"{_named(silent)} silent and never came to it: died, or cannot answer.")
    if same:
        said.append(f"{_named(same)} at the same collective.")
    if not silent and not elsewhere and not left:
        said.append("So no rank is missing: look at the network between them.")
    return " ".join(said)


def _named(ranks: list[int]) -> str:
    return f"Rank {ranks[0]} is" if len(ranks) == 1 else f"Ranks {some(ranks, 16)} are"


def store_holder() -> str:
    """The process that may have died where the group's store does not answer, in words."""
    launcher = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    return f"{'The launcher' if launcher else 'Rank 0'}, which holds it, died or ended."


def _quoted(error: Exception) -> str:
    """The words of a backend's error, without its advice and the place in its source."""
    text = " ".join(str(error).split())
    text = _ADVICE.split(re.sub(r"\[(enforce fail at )?\S+:\d+\] ", "", text))[0]
    return f"the backend says: {text.rstrip('. ')}"


def _flight_record(members: dist.ProcessGroup) -> list[str]:
    path = flight_record(members)
    return [f"Its collectives under way are in {path} (read it with torchfrtrace)."] if path else []
