"""The gathers of one pass, an eager forward or backward: agreed on, and started ahead of need.

The order of the gathers is kept for the next pass. While the next pass follows the order, a bucket
is gathered during the compute of the bucket before. Before a gather that is new at its position,
ranks compare the bucket: an error names a rank that gathers another bucket, before ranks meet in
different collectives.
"""

import hashlib
import itertools
import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor

from shardc.runtime import compat
from shardc.runtime.checks.telling import warn
from shardc.runtime.comm import collectives
from shardc.runtime.comm.unshard import start_gather
from shardc.runtime.layout.spec import UnshardSpec
from shardc.runtime.watch.agreement import Statement, agree
from shardc.runtime.watch.entering import naming
from shardc.runtime.watch.progress import Label

if TYPE_CHECKING:
    from shardc.runtime.unit.bucket import Bucket
    from shardc.runtime.unit.regather import Again
    from shardc.runtime.unit.unit import Unit

log = logging.getLogger("shardc")


@dataclass(frozen=True)
class _Gather:
    """A gather under way: its spec, the version of its bucket, and the collective."""

    code: UnshardSpec
    written: object
    started: collectives.Started


class Gathers:
    """The gathers of one pass.

    Attributes:
        phase: "forward" or "backward".
        done: the buckets that the pass has gathered, in order.
    """

    def __init__(self, phase: str) -> None:
        self.phase = phase
        self.done: list[Bucket] = []
        self._known: tuple[Bucket, ...] = ()
        self._ahead: dict[Bucket, _Gather] = {}
        self._path = hashlib.sha256(phase.encode())

    def gather(self, bucket: "Bucket", again: "Again | None" = None) -> Tensor:
        """Gather a bucket, `(W*S,)`, and start the next gathers. All ranks must call it.

        A backward gives `again`, the gather of its forward.
        """
        self._note(bucket)
        code = bucket.key.reading_code() if again is None else again.code
        gather = self._ahead.pop(bucket, None)
        if gather is None or (gather.code, gather.written) != (code, bucket.version):
            gather = _start(bucket, again, self.phase)
        with (
            naming(bucket.ranks.everyone),
            Label("all_gather", (bucket.label,), self.phase, waits=True),
        ):
            full = gather.started.wait()
        for following, later in self._following(bucket):
            if following not in self._ahead:
                self._ahead[following] = _start(following, later, self.phase)
        return full

    def close(self, raised: bool = False) -> None:
        """End the pass: drop gathers that nothing read, and keep the order.

        After an exception no gather is waited for: other ranks may never join.
        """
        while self._ahead:
            _, gather = self._ahead.popitem()
            if not raised:
                gather.started.wait()
        if self.done and self._known[: len(self.done)] != tuple(self.done):
            self.done[0].gathered.remember(self.phase, self.done)

    def _note(self, bucket: "Bucket") -> None:
        """Note the bucket of the next gather; ranks compare it if it is new at this position.

        Raises:
            RuntimeError: other ranks gather another bucket, or none.
        """
        place = len(self.done)
        self.done.append(bucket)
        if place == 0:
            self._known = bucket.gathered.remembered(self.phase)
        self._path.update(f"{bucket.serial} {bucket.label}\n".encode())
        if self._known[place : place + 1] == (bucket,):
            return
        if place < len(self._known):
            message = (
                f"the {self.phase} gathers {bucket.label} where the last one gathered "
                f"{self._known[place].label}: nothing is gathered ahead"
            )
            log.info(message)
            if dist.get_debug_level() != dist.DebugLevel.OFF:  # TORCH_DISTRIBUTED_DEBUG
                warn(message)
        self._known = ()
        facts = [f"gather {place}: {bucket}", f"after {self._path.hexdigest()}"]
        stated = Statement(f"the order in which an uncompiled {self.phase} gathers", facts)
        agree(compat.resolve_group(bucket.ranks.everyone), stated)

    def _following(self, bucket: "Bucket") -> Iterator[tuple["Bucket", "Again | None"]]:
        """Buckets to gather ahead now, each with the gather that its backward expects, or None."""
        unit, place = bucket.owner, len(self.done)
        wishes, in_backward = bucket.settings, self.phase == "backward"
        hints = wishes.backward_prefetch if in_backward else wishes.forward_prefetch
        if hints:
            following = [later for target in hints for later in target.buckets]
        else:
            following = _to_next_unit(unit, self._known[place:])
        for later in following:
            gathered = later.gathered
            if gathered.is_held or gathered.current is not None:
                continue
            again = gathered.next_again() if self.phase == "backward" else None
            if hints and self.phase == "backward" and again is None:
                continue  # its backward is done, or needs no gather
            yield later, again


def _to_next_unit(unit: "Unit", buckets: Sequence["Bucket"]) -> list["Bucket"]:
    """The prefix of `buckets` that belongs to `unit` and to the unit after it."""
    others = (bucket.owner for bucket in buckets if bucket.owner is not unit)
    wanted = (unit, next(others, unit))
    return list(itertools.takewhile(lambda bucket: bucket.owner in wanted, buckets))


def _start(bucket: "Bucket", again: "Again | None", phase: str) -> _Gather:
    log.debug("gather %s", bucket.label)
    bucket.owner.await_updates()
    code, part = (bucket.key.reading_code(), None) if again is None else (again.code, again.part)
    label = Label("all_gather", (bucket.label,), phase, dtype=code.compute_dtype)
    with torch.no_grad(), naming(bucket.ranks.everyone), label:
        started = start_gather(bucket.segment.detach(), code, part)
    return _Gather(code, bucket.version, started)
