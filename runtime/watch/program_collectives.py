"""Ranks in a long wait show each other, in the store, their last entries and where they are.

A rank that waits looks at the rank before it in the group. If both ranks wait, their histories tell
whether they parted. The rank before may also be in a collective of the program's own, such as
`dist.barrier()`, which no history holds. torch numbers all collectives of a group in its flight
record: by these numbers two ranks find out that neither can come to the collective of the other.
Other cases (a rank that reads data, or writes a file) are left to the timeout.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field

import torch.distributed as dist

from shardc.runtime import compat
from shardc.runtime.checks.call_sites import own_collective_of, place_of_thread
from shardc.runtime.compat import Recorded
from shardc.runtime.watch.history import Entry, History, say_parted
from shardc.runtime.watch.progress import progress

_MEET = ("barrier", "all_reduce", "allreduce", "all_gather", "allgather", "reduce_scatter",
         "all_to_all", "alltoall")  # fmt: skip
"""Collectives that no rank leaves before all ranks have entered them, by a part of the name."""


@dataclass(frozen=True)
class Shown:
    """The state that one rank shows.

    Attributes:
        rank: the rank, as a number of the whole job.
        entries: the last entries of its history.
        at: where it is ("at train.py:12"), if it waits for no collective of shardc.
        own: the collective of the program's own that it is in ("barrier at train.py:12"), or "".
        records: by group, the collectives that the backend was given last; only with `own`.
    """

    rank: int
    entries: Sequence[Entry]
    at: str = ""
    own: str = ""
    records: Mapping[str, Sequence[Recorded]] = field(default_factory=dict)

    def to_json(self) -> str:
        return json.dumps(asdict(self))


def from_json(text: str | bytes) -> Shown:
    """The state that `to_json` wrote."""
    read = json.loads(text)
    read["entries"] = [Entry(*entry) for entry in read["entries"]]
    read["records"] = {
        group: [Recorded(*record) for record in records]
        for group, records in read["records"].items()
    }
    return Shown(**read)


def this_rank(history: History) -> Shown:
    """The state that this rank shows."""
    entries = list(history.entries)
    if progress.inside is not None:
        return Shown(history.rank, entries)
    own, place = own_collective_of(progress.main_thread), place_of_thread(progress.main_thread)
    at = f"in {own}" if own else f"at {place}" if place else "busy"
    return Shown(history.rank, entries, at, own, compat.recorded_collectives() if own else {})


def parted_from(history: History, group: str, theirs: Shown, waits_for_last: bool) -> str | None:
    """The message that this rank, in a wait for a collective over `group`, parted from another.

    None if the two ranks have not parted.

    Args:
        theirs: the state that the other rank shows. The state may be old: the message stays true as
            long as this rank waits.
        waits_for_last: whether this rank waits for the collective that it entered last, and not for
            an earlier one.
    """
    differs = history.differs_from(theirs.rank, theirs.entries)
    if differs is not None or not theirs.own or not theirs.entries:
        return differs
    common, mine = theirs.entries[-1].place, compat.recorded_collectives()
    ahead = next((entry for entry in history.entries if entry.place > common), None)
    if ahead is None:
        return None
    if _are_others(mine, theirs.records) or (
        _waits_for_me(mine, theirs)
        and (waits_for_last or _is_not_in(mine.get(group, ()), theirs.records.get(group, ())))
    ):
        own = f"{theirs.own}, a collective of the program's own"
        return say_parted(common + 1, {history.rank: ahead.text, theirs.rank: own})
    return None


def _are_others(
    mine: Mapping[str, Sequence[Recorded]], theirs: Mapping[str, Sequence[Recorded]]
) -> bool:
    """Whether two ranks entered different collectives of a group at the same number."""
    for group in mine.keys() & theirs.keys():
        names = {record.number: record.name for record in mine[group]}
        if any(names.get(r.number, r.name) != r.name for r in theirs[group]):
            return True
    return False


def _waits_for_me(mine: Mapping[str, Sequence[Recorded]], theirs: Shown) -> bool:
    """Whether the other rank is in a collective that it cannot leave before this rank enters it."""
    for group, records in theirs.records.items():
        last = records[-1]
        if last.is_done or not any(kind in last.name for kind in _MEET):
            continue
        if theirs.rank in compat.ranks_of(group) and last.number > _last(mine.get(group, ())):
            return dist.get_rank() in compat.ranks_of(group)
    return False


def _is_not_in(mine: Sequence[Recorded], theirs: Sequence[Recorded]) -> bool:
    """Whether the other rank has entered none of the collectives that this rank may wait for."""
    waits = [record.number for record in mine if not record.is_done]
    return bool(waits) and _last(theirs) < waits[0]


def _last(records: Sequence[Recorded]) -> int:
    return records[-1].number if records else 0
