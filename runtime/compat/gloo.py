"""Gloo's groups: all-gathers that two threads can finish side by side, ends of waits, records."""

from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import AllgatherOptions

from shardc.runtime.compat.groups import flight_record_path, group_backends, resolve_group

_ops = torch.ops._c10d_functional
_cpu = torch.library.Library("_c10d_functional", "IMPL", "CPU")
_SINGLE = "all_gather_into_tensor"
_COALESCED = "all_gather_into_tensor_coalesced"


def gather_under_short_names() -> None:
    """Run gloo's functional all-gathers of CPU tensors as works named "ALLGATHER".

    A gloo group has two threads. Each writes the name of the work that it has finished into one
    string of the group, without a lock (`ProcessGroupGloo::runLoop`, `lastCompletedWorkName`; seen
    in 2.13). A name of more than 15 characters is on the heap, so that two threads may free one
    string twice: "malloc(): unaligned tcache chunk detected", or SIGSEGV, at a later allocation.
    The two gathers that return their result are named "ALLGATHER_COALESCED". A wait for each gather
    before the next begins does not help, because a thread writes the name after the waiter has
    woken. The gather into a given tensor sends the same data under a short name. All other
    functional collectives on single tensors have short names, too. `benchmarks/gloo_race.py` shows
    the race with torch alone.
    Other backends get the call that torch itself makes; a group written in Python has no other.
    """
    _cpu.impl(_SINGLE, _all_gather)
    _cpu.impl(_COALESCED, _all_gather_coalesced)


def _is_gloo(group_name: str) -> bool:
    return group_backends(resolve_group(group_name)).get("cpu") == "gloo"


def _all_gather(segment: Tensor, group_size: int, group_name: str) -> Tensor:
    """Gather one segment; gloo gathers coalesced segments one by one, without a joint message."""
    part = torch.view_as_real(segment) if segment.is_complex() else segment
    part = part if part.dim() else part.reshape(1)
    if not _is_gloo(group_name):
        (full,) = _all_gather_coalesced([part], group_size, group_name)
    else:
        with torch._C._AutoDispatchBelowAutograd():
            full = _room_for(part, group_size)
            _ops.all_gather_into_tensor_out(part, group_size, group_name, out=full)
    return torch.view_as_complex(full) if segment.is_complex() else full


def _all_gather_coalesced(segments: list[Tensor], group_size: int, group_name: str) -> list[Tensor]:
    if _is_gloo(group_name):
        return [_all_gather(segment, group_size, group_name) for segment in segments]
    with torch._C._AutoDispatchBelowAutograd():
        full, options = [_room_for(s, group_size) for s in segments], AllgatherOptions()
        work = resolve_group(group_name).allgather_into_tensor_coalesced(full, segments, options)
        for tensor in full:
            torch._C._distributed_c10d._register_work(tensor, work)
    return full


def _room_for(part: Tensor, group_size: int) -> Tensor:
    return part.new_empty((group_size * part.shape[0], *part.shape[1:]))


def end_gloo_waits(group: dist.ProcessGroup) -> None:
    """Fail every wait on a gloo group, here and on the peers.

    Gloo has no abort (`abort()` does nothing), but closes its connections when a wait times out.
    """
    with suppress(RuntimeError):
        waiting = group.recv([torch.empty(1)], (group.rank() + 1) % group.size(), 0x5AD)
        waiting.wait(timedelta(milliseconds=1))


def gloo_flight_record() -> str | None:
    """The file with the last collectives, written now, if the user named a file."""
    path = flight_record_path()
    try:
        if path is not None:
            c10d: Any = torch._C._distributed_c10d  # the stubs lack it
            Path(path).write_bytes(c10d._dump_fr_trace(includeStackTraces=False))
    except OSError as error:
        return f"{path} (which could not be written: {error})"
    return path
