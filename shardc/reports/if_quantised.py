"""What a step would send and take if its parameters and gradients travelled in int8.

The step is played through once more: what computes keeps its order and its time, every collective
starts and is waited for between the same ops, the wire carries fewer bytes, and messages have to be
made and read. What a schedule could make of the shorter times is left out.
"""

import bisect
import itertools
from dataclasses import dataclass

import torch

from shardc.passes.cost import among_copies, collective_seconds, exchange_seconds
from shardc.passes.hardware import Profile
from shardc.passes.timeline import Clock
from shardc.reports.record import ROW_KINDS, CollectiveRow, Record
from shardc.runtime.eager.precision import MixedPrecisionPolicy
from shardc.runtime.layout.wire_format import WireFormat

FORM = WireFormat(torch.int8, MixedPrecisionPolicy.wire_block)
"""How all that can would travel."""
_BYTES = FORM.row_bytes(16 * FORM.block) / (16 * FORM.block)
"""Of an element on the wire, with its part of a block's scale."""


@dataclass(frozen=True)
class Quantised:
    """The step in int8: bytes that a rank sends, and how long it takes."""

    sent_bytes: float
    step_seconds: float


def if_quantised(record: Record, profile: Profile, reduced: bool = True) -> Quantised | None:
    """The step with gathers in int8, and reductions too if they are `reduced` so.

    None where nothing would change: all that could travels in fewer bits.
    """
    shares = {
        row: _share(row, record.copies) if reduced or row.kind == "all_gather" else 1.0
        for row in record.collectives
    }
    if all(share == 1 for share in shares.values()):
        return None
    ops = sorted((op.start, op.seconds) for op in record.ops)
    starts = [start for start, _ in ops]
    sums = [0.0, *itertools.accumulate(seconds for _, seconds in ops)]

    def computed(moment: float) -> float:
        """Seconds of compute that were done by then: ops do not overlap."""
        last = bisect.bisect_left(starts, moment) - 1
        if last < 0:
            return 0.0
        return sums[last] + min(ops[last][1], moment - starts[last])

    computed_in = {bucket.name: bucket.gathered_dtype for bucket in record.buckets}
    events = [(row.issued, 0, number) for number, row in enumerate(record.collectives)]
    events += [(row.waited, 1, number) for number, row in enumerate(record.collectives)]
    clock, done = Clock(), 0.0
    for moment, waits, number in sorted(events):
        until = computed(moment)
        clock.now += until - done
        done = until
        row = record.collectives[number]
        more = 0.0
        if shares[row] < 1:
            traffic = _traffic(row, _itemsize(computed_in.get(row.buckets[0], row.dtype)))
            more = traffic / (profile.memory_bandwidth * profile.memory_efficiency)
        if waits:
            clock.wait(number)
            clock.now += more if row.brings_parameters else 0.0
        else:
            clock.now += 0.0 if row.brings_parameters else more
            clock.start(number, _seconds(row, shares[row], record, profile))
    clock.now += record.compute_seconds - done
    sent = sum(row.sent_bytes * share for row, share in shares.items())
    return Quantised(sent, clock.end)


def _traffic(row: CollectiveRow, computed: int) -> float:
    """Bytes of memory that making and reading messages costs, parts of one rank left out.

    What is gathered is read, and written as `computed`. Gradients are read twice, as they are
    computed instead of as they are reduced, and written; so is what arrives.
    """
    elements, itemsize = row.nbytes / _itemsize(row.dtype), _itemsize(row.dtype)
    if row.kind == "all_gather":
        return elements * (1 + computed)
    return elements * (2 * computed + 2 - (itemsize - computed))


def _itemsize(dtype: str) -> int:
    return int(getattr(torch, dtype).itemsize)


def _share(row: CollectiveRow, copies: int) -> float:
    """Bytes in int8, as a share of those that it sends."""
    dtype = getattr(torch, row.dtype, None)
    if row.kind in ROW_KINDS:  # fewer than what int8 would leave of the table
        return 1.0
    if not isinstance(dtype, torch.dtype) or not dtype.is_floating_point or dtype.itemsize < 2:
        return 1.0
    if copies > 1 and row.kind != "all_reduce":  # inside of a node
        return 1.0
    return _BYTES / dtype.itemsize


def _seconds(row: CollectiveRow, share: float, record: Record, profile: Profile) -> float:
    if share == 1:
        return row.seconds
    size, ranks = row.nbytes, row.ranks
    if row.kind == "all_reduce":
        profile = among_copies(profile, record.world_size)
        before = collective_seconds(size, ranks, profile, rounds=2)
        after = 2 * exchange_seconds(size * share, ranks, profile)
    elif row.kind == "all_gather":
        before, after = (collective_seconds(n, ranks, profile) for n in (size, size * share))
    else:
        before = collective_seconds(size, ranks, profile)
        after = exchange_seconds(size * share, ranks, profile)
    return max(0.0, row.seconds - before + after)
