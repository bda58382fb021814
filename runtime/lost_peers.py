"""What a failed collective says: which one, of which unit, and which ranks are missing.

A rank whose collective fails adds a line to a list in the group's store: what it waited for, and
how many collectives it has started. Ranks that still wait see the list and add their own; a thread
looks for it, which does nothing while waits are short. After a grace the list is read. Who has no
line never came to the collective: it died, or is busy elsewhere.

None of it can hang: the store is asked on a thread that is left behind where it does not answer.
Waits on CUDA do not block the host: there NCCL's own watchdog ends the process, and what is known
is what its flight recorder wrote.
"""

import atexit
import json
import logging
import os
import threading
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from shardc.runtime import compat
from shardc.runtime.progress import progress

log = logging.getLogger("shardc")

_KEY = "shardc/failed"
_GRACE = timedelta(seconds=3)
"""How long a failed rank waits for the lines of others, or a fifth of the timeout if that is less:
ranks that wait for the same fail within moments, or answer."""
_TICK, _LONG = 0.25, 0.5
"""Seconds: how often waits are looked at, and from when on one is long enough to look further."""
_WARN = 0.1
"""The share of the timeout after which a wait is logged."""


def explain(group: str, error: Exception) -> str:
    """The message for `error`, which a collective over `group` raised on this rank."""
    members = compat.resolve_group(group)
    timeout = compat.group_timeout(members, torch.device("cpu"))
    grace = min(_GRACE, timeout / 5).total_seconds()
    line = _line(members)
    lines = _within(grace + 1, lambda: _exchange(members, line, grace))
    others = _store_is_gone() if lines is None else compare(line, lines, _ranks(members))
    return " ".join(
        [
            f"a collective of shardc failed on rank {line['rank']} of {dist.get_world_size()}, at "
            f"{line['at']}: a peer died or did not take part in time (the group's timeout is "
            f"{timeout}).",
            others,
            *_flight_record(members),
            f"The backend says: {error}",
        ]
    )


def _line(members: dist.ProcessGroup) -> dict[str, Any]:
    """What this rank tells the others."""
    label = progress.inside
    if label is not None:
        label = label.renamed()
        at = f"the wait for {label}" if label.waits else f"the start of {label}"
    else:
        at = f"what follows {progress.last}" if progress.last else "the first"
    return {"rank": _ranks(members)[members.rank()], "at": at, "started": progress.started}


def _ranks(members: dist.ProcessGroup) -> list[int]:
    return dist.get_process_group_ranks(members)


def _exchange(members: dist.ProcessGroup, line: dict[str, Any], grace: float) -> list[Any]:
    """Add a line, and read those of all others that came in time."""
    store, deadline, pause = compat.group_store(members), time.monotonic() + grace, 0.05
    store.append(_KEY, json.dumps(line) + "\n")  # type: ignore[attr-defined]
    while True:
        lines = {line["rank"]: line for line in map(json.loads, store.get(_KEY).splitlines())}
        left = deadline - time.monotonic()
        if len(lines) >= members.size() or left <= 0:
            return list(lines.values())
        time.sleep(min(pause, left))
        pause *= 2


def _within(seconds: float, call: Callable[[], Any]) -> Any:
    """What `call` gives; None if it fails or takes longer."""
    results: list[Any] = []

    def run() -> None:
        with suppress(RuntimeError):  # errors of stores are all of this kind
            results.append(call())

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(seconds)
    return results[0] if results else None


def compare(mine: dict[str, Any], lines: Iterable[dict[str, Any]], ranks: list[int]) -> str:
    """In words, what the other `ranks` do, given the lines of those that answered."""
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
            place = f"at {line['at']}"
            if line["started"] != mine["started"]:
                place += f", having started {line['started']} collectives ({mine['started']} here)"
            elsewhere.setdefault(place, []).append(rank)
    silent = [rank for rank in others if rank not in by_rank]
    said = [f"{_named(there)} elsewhere: {place}." for place, there in elsewhere.items()]
    if silent:
        said.insert(
            0, f"{_named(silent)} silent and never came to it: died, or busy with something else."
        )
    if same:
        said.append(f"{_named(same)} at the same collective.")
    if not silent and not elsewhere:
        said.append("So no rank is missing: look at the network between them.")
    return " ".join(said)


def _named(ranks: list[int]) -> str:
    shown = ", ".join(map(str, ranks[:16])) + (f" and {len(ranks) - 16} more" * (len(ranks) > 16))
    return f"Rank {shown} is" if len(ranks) == 1 else f"Ranks {shown} are"


def _store_is_gone() -> str:
    launcher = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    holder = "the launcher" if launcher else "rank 0"
    return (
        f"Other ranks cannot be asked, because the group's store does not answer: {holder}, which "
        "holds it, died or ended."
    )


def _flight_record(members: dist.ProcessGroup) -> list[str]:
    path = compat.flight_record(members)
    return [f"What it had under way is in {path} (read it with torchfrtrace)."] if path else []


# -- while others wait -----------------------------------------------------------------------------


def watch(group: str) -> None:
    """From now on, say so where a wait takes long, and answer ranks whose collective failed."""
    if group not in _watched:
        if not _watched:
            thread = threading.Thread(target=_watch, name="shardc watch", daemon=True)
            thread.start()
            atexit.register(_stop, thread)
        _watched.append(group)


_watched: list[str] = []
_ended = threading.Event()


def _watch() -> None:
    """Look at the wait that goes on, if one does, until the process ends."""
    told: dict[str, float] = {}
    answered: dict[str, float] = {}
    while not _ended.wait(_TICK):
        label, since = progress.inside, progress.since
        seconds = time.monotonic() - since
        if label is None or not label.waits or seconds < _LONG:
            continue
        for group in _watched:
            with suppress(RuntimeError, ValueError):  # the group is gone, or its store
                members = compat.resolve_group(group)
                if members.size() == 1 or compat.is_fake_group(members):
                    continue
                timeout = compat.group_timeout(members, torch.device("cpu"))
                store = compat.group_store(members)
                if seconds > _WARN * timeout.total_seconds() and told.get(group) != since:
                    told[group] = since
                    log.warning(
                        "rank %d has waited %.0f s for %s; the timeout is %s",
                        dist.get_rank(), seconds, label.renamed(), timeout,
                    )  # fmt: skip
                if answered.get(group) != since and store.check([_KEY]):
                    answered[group] = since
                    store.append(_KEY, json.dumps(_line(members)) + "\n")  # type: ignore[attr-defined]


def _stop(thread: threading.Thread) -> None:
    _ended.set()
    thread.join(2 * _TICK)
