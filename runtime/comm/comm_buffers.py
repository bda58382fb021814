"""Collectives with a choice of memory: for a segment on the host, or for buffers of the group.

These ops start a collective, and are waited for like torch's functional collectives; in a graph the
passes move both alike. The gather is in place: the segment is copied, from the host or the device,
to its part of the result. `memory` names the source of buffers: "group", the process group's own
allocator (NCCL: registered memory, for transfers without copies); "symmetric", torch's symmetric
memory; None, the device's allocator. In a group of one rank the ops copy, without a message.

A gather in steps goes across nodes first, then inside each node, both in place (`hierarchy`). The
second step starts when the first is done, on a stream of its own, so compute waits for neither;
where the host runs collectives (gloo), the wait starts the second step.
"""

from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor

from shardc.runtime import compat
from shardc.runtime.comm import collectives
from shardc.runtime.comm.host_copies import copy_in, stream_of
from shardc.runtime.comm.ops import define_op
from shardc.runtime.groups.backends import backend_of


def _allocate(
    numel: int, dtype: torch.dtype, device: torch.device, group: str, memory: str | None
) -> Tensor:
    """A buffer for a collective over `group`: `(numel,)`."""
    if memory == "group":
        return compat.allocate_from_group(numel, dtype, device, group)
    if memory == "symmetric":
        return compat.allocate_symmetric(numel, dtype, device, group)
    return torch.empty(numel, dtype=dtype, device=device)


def _fill(part: Tensor, segment: Tensor) -> AbstractContextManager[object]:
    """Start to copy `segment` to its part of a buffer; work queued inside follows the copy."""
    if segment.device.type != part.device.type:
        return copy_in(segment, part)
    part.copy_(segment)
    return nullcontext()


def _all_gather(
    segment: Tensor,
    dtype: torch.dtype,
    device: torch.device,
    ranks: int,
    group: str,
    memory: str | None,
) -> Tensor:
    """Gather `segment: (S,)`, as `dtype`, on `device`: `(ranks * S,)`."""
    size, rank = segment.numel(), compat.resolve_group(group).rank()
    full = _allocate(ranks * size, dtype, device, group, memory)
    part = full.narrow(0, rank * size, size)
    behind = _fill(part, segment)
    if ranks > 1:
        with behind:
            collectives.start_all_gather_into(full, part, ranks, group)
    return full


def _all_gather_in_steps(
    segment: Tensor,
    dtype: torch.dtype,
    device: torch.device,
    nodes: int,
    across: str,
    local: int,
    inside: str,
) -> Tensor:
    """Gather `segment: (S,)`, as `dtype`, on `device`: `(local * nodes * S,)`."""
    size = segment.numel()
    full = torch.empty(local * nodes * size, dtype=dtype, device=device)
    column = full.view(local, -1)[compat.resolve_group(inside).rank()]
    part = column.view(nodes, -1)[compat.resolve_group(across).rank()]
    with _fill(part, segment):
        collectives.start_all_gather_into(column, part, nodes, across)

    def follow() -> None:
        collectives.ops.wait_tensor(column)
        collectives.start_all_gather_into(full, column, local, inside)

    if device.type == "cpu" or backend_of(across, device.type).on_host:

        def follow_and_wait() -> None:
            follow()
            collectives.ops.wait_tensor(full)

        compat.call_when_waited_for(full, follow_and_wait)
    else:
        with stream_of(device, "steps"):
            follow()
    return full


def _reduce_scatter(flat: Tensor, op: str, ranks: int, group: str, memory: str | None) -> Tensor:
    """Reduce `flat: (ranks * S,)` over the ranks to this rank's part, `(S,)`."""
    if ranks == 1:
        return flat.clone()
    given = _allocate(flat.numel(), flat.dtype, flat.device, group, memory)
    part = _allocate(flat.numel() // ranks, flat.dtype, flat.device, group, memory)
    given.copy_(flat)
    collectives.start_reduce_scatter_into(part, given, op, ranks, group)
    return part


define_op(
    "all_gather(Tensor segment, ScalarType dtype, Device device, int ranks, str group, "
    "str? memory) -> Tensor",
    _all_gather,
    lambda segment, dtype, device, ranks, *_: segment.new_empty(
        ranks * segment.numel(), dtype=dtype, device=device
    ),
)
define_op(
    "all_gather_in_steps(Tensor segment, ScalarType dtype, Device device, int nodes, str across, "
    "int local, str inside) -> Tensor",
    _all_gather_in_steps,
    lambda segment, dtype, device, nodes, across, local, inside: segment.new_empty(
        local * nodes * segment.numel(), dtype=dtype, device=device
    ),
)
define_op(
    "reduce_scatter(Tensor flat, str op, int ranks, str group, str? memory) -> Tensor",
    _reduce_scatter,
    lambda flat, op, ranks, *_: flat.new_empty(flat.numel() // ranks),
)
