"""A step as if its parameters and gradients travelled in int8: bytes and seconds.

The step is played through once more: the wire carries fewer bytes, and messages have to be made and
read.
"""

from dataclasses import dataclass

import torch

from shardc.passes.estimate.cost import among_copies, collective_seconds, exchange_seconds
from shardc.passes.estimate.hardware import Profile
from shardc.reports.record import ROW_KINDS, CollectiveRow, Record
from shardc.reports.replay import Carried, replay
from shardc.runtime.layout.wire_format import WireFormat
from shardc.runtime.unit.precision import MixedPrecisionPolicy

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

    None where nothing would change: all that could travels in fewer bits, or in two steps, of which
    nothing is known here.
    """
    extended = {bucket.name for bucket in record.buckets if bucket.extended}
    shares = {
        row: _share(row, record.copies)
        if (reduced or row.kind == "all_gather") and extended.isdisjoint(row.buckets)
        else 1.0
        for row in record.collectives
    }
    if all(share == 1 for share in shares.values()) or any(row.in_steps for row in shares):
        return None
    computed_in = {bucket.name: bucket.gathered_dtype for bucket in record.buckets}

    def carried(row: CollectiveRow) -> Carried:
        if shares[row] == 1:
            return Carried(row.seconds)
        traffic = _traffic(row, _itemsize(computed_in.get(row.buckets[0], row.dtype)))
        made = traffic / (profile.memory_bandwidth * profile.memory_efficiency)
        return Carried(_seconds(row, shares[row], record, profile), computed=made)

    sent = sum(row.sent_bytes * share for row, share in shares.items())
    return Quantised(sent, replay(record, carried))


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
