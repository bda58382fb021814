"""Bytes and seconds of a step if its parameters and gradients travelled in int8.

`replay` plays the step once more: the wire carries fewer bytes, and compute makes and reads the
messages.
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
"""The wire format of every collective that can travel in int8."""
_BYTES = FORM.row_bytes(16 * FORM.block) / (16 * FORM.block)
"""Bytes of an element on the wire, its part of the block's scale included."""


@dataclass(frozen=True)
class Quantised:
    """The step in int8: bytes that a rank sends, and seconds of the step."""

    sent_bytes: float
    step_seconds: float


def if_quantised(record: Record, profile: Profile, reduced: bool = True) -> Quantised | None:
    """The step with gathers in int8; with `reduced`, reductions travel in int8, too.

    None if no collective would send fewer bytes, or if a collective goes in two steps: this
    estimate covers one step only.
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
    """Bytes of memory traffic to make and read messages; the part of a single rank is left out.

    `computed` is the size of an element in the dtype of compute. A gather reads the message, and
    writes the values in that dtype. A reduction reads gradients twice, in that dtype and not in the
    wider dtype that is reduced; it writes its message, and reads the message that arrives.
    """
    elements, itemsize = row.nbytes / _itemsize(row.dtype), _itemsize(row.dtype)
    if row.kind == "all_gather":
        return elements * (1 + computed)
    return elements * (2 * computed + 2 - (itemsize - computed))


def _itemsize(dtype: str) -> int:
    return int(getattr(torch, dtype).itemsize)


def _share(row: CollectiveRow, copies: int) -> float:
    """Bytes of a collective in int8, as a share of the bytes that it sends now."""
    dtype = getattr(torch, row.dtype, None)
    if row.kind in ROW_KINDS:  # rows are fewer bytes than the table in int8
        return 1.0
    if not isinstance(dtype, torch.dtype) or not dtype.is_floating_point or dtype.itemsize < 2:
        return 1.0
    if copies > 1 and row.kind != "all_reduce":  # inside of a node, as the model has copies
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
