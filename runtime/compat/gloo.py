"""Gloo's groups: works that their threads can finish side by side."""

import torch
from torch import Tensor

from shardc.runtime.compat.groups import backend_for, resolve_group

_ops = torch.ops._c10d_functional
_cpu = torch.library.Library("_c10d_functional", "IMPL", "CPU")
_SINGLE = "all_gather_into_tensor"
_COALESCED = "all_gather_into_tensor_coalesced"


def gather_under_short_names() -> None:
    """Run functional all-gathers of CPU tensors as works named "ALLGATHER" (2.11 to 2.15).

    A gloo group has two threads. Each writes the name of the work that it has finished into one
    string of the group, without a lock (`ProcessGroupGloo::runLoop`, `lastCompletedWorkName`; seen
    in 2.13). A name of more than 15 characters is on the heap, so that two threads may free one
    string twice: "malloc(): unaligned tcache chunk detected", or SIGSEGV, in whatever allocates
    next. The two gathers that return their result are "ALLGATHER_COALESCED"; waiting for each
    before the next begins does not help, because the name is written after the waiter has woken.
    The gather into a given tensor sends the same, and all other functional collectives on tensors
    one by one have short names too. `benchmarks/gloo_race.py` shows it with torch alone.
    """
    _cpu.impl(_SINGLE, _all_gather)
    _cpu.impl(_COALESCED, _all_gather_coalesced)


def _all_gather(segment: Tensor, group_size: int, group_name: str) -> Tensor:
    """One gather; so is each of a coalesced one on gloo, which has no message for several."""
    part = torch.view_as_real(segment) if segment.is_complex() else segment
    part = part if part.dim() else part.reshape(1)
    with torch._C._AutoDispatchBelowAutograd():
        full = _room_for(part, group_size)
        _ops.all_gather_into_tensor_out(part, group_size, group_name, out=full)
    return torch.view_as_complex(full) if segment.is_complex() else full


def _all_gather_coalesced(segments: list[Tensor], group_size: int, group_name: str) -> list[Tensor]:
    group = resolve_group(group_name)
    if backend_for(group, "cpu") == "gloo":
        return [_all_gather(segment, group_size, group_name) for segment in segments]
    with torch._C._AutoDispatchBelowAutograd():
        full = [_room_for(segment, group_size) for segment in segments]
        work = group.allgather_into_tensor_coalesced(full, segments)
        for tensor in full:
            torch._C._distributed_c10d._register_work(tensor, work)
    return full


def _room_for(part: Tensor, group_size: int) -> Tensor:
    return part.new_empty((group_size * part.shape[0], *part.shape[1:]))
