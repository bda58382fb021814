"""Collectives as plain tensor functions, the same under tracing and eagerly.

Each function issues torch's functional collective and waits for it; in a group of one rank it
copies. In a compiled graph the two steps are two nodes, which passes move apart; the eager runtime
runs the two steps apart itself. Groups are given by name, because a graph can carry only a name.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from shardc.runtime import compat
from shardc.runtime.watch.entering import entering, naming
from shardc.runtime.watch.progress import AwaitedCall

ops = torch.ops._c10d_functional
compat.gather_under_short_names()

_CARRIED_AS_IS = {
    torch.float64, torch.float32, torch.float16, torch.bfloat16,
    torch.int64, torch.int32, torch.int8, torch.uint8,
}  # fmt: skip


def _same(tensor: Tensor) -> Tensor:
    return tensor


@dataclass(frozen=True)
class Started:
    """A collective under way, or one that was waited for already.

    Attributes:
        raw: the tensor that the collective fills.
        then: makes the result from `raw`; by views only, where `early` is read.
        done: whether `raw` is filled.
    """

    raw: Tensor
    then: Callable[[Tensor], Tensor] = _same
    done: bool = False

    def wait(self) -> Tensor:
        """Wait for the result."""
        return self.then(self.raw if self.done else ops.wait_tensor(self.raw))

    @property
    def early(self) -> Tensor:
        """The result before it has its values; not for graphs."""
        return self.then(self.raw)


def start_all_gather(segment: Tensor, world_size: int, group: str) -> Started:
    """Start to concatenate the segments of all ranks: `(S,)` -> `(world_size * S,)`."""
    if world_size == 1:
        return Started(segment.clone(), done=True)
    sent, _, back = _carried(segment)
    return Started(ops.all_gather_into_tensor(sent, world_size, group), back)


def start_reduce_scatter(flat: Tensor, op: str, world_size: int, group: str) -> Started:
    """Start to reduce over ranks, and keep this rank's part: `(world_size * S,)` -> `(S,)`."""
    if world_size == 1:
        return Started(flat.clone(), done=True)
    if flat.is_complex():
        started = start_reduce_scatter(torch.view_as_real(flat).flatten(), op, world_size, group)
        return Started(started.raw, lambda raw: _as_complex(started.then(raw)))
    return Started(ops.reduce_scatter_tensor(flat, op, world_size, group))


def start_all_to_all(flat: Tensor, world_size: int, group: str) -> Started:
    """Start to send each rank its equal part of `flat`: `(world_size * M,)` -> the same size."""
    sizes = [flat.numel() // world_size] * world_size
    return Started(ops.all_to_all_single(flat, sizes, sizes, group))


def start_all_gather_into(full: Tensor, part: Tensor, world_size: int, group: str) -> None:
    """Start to gather in place: `part: (S,)` is this rank's part of `full: (world_size * S,)`."""
    full, part = (_carried(value)[0] for value in (full, part))
    ops.all_gather_into_tensor_out(part, world_size, group, out=full)


def start_reduce_scatter_into(
    part: Tensor, flat: Tensor, op: str, world_size: int, group: str
) -> None:
    """Start to reduce `flat: (world_size * S,)`, which the backend holds, into `part: (S,)`."""
    if flat.is_complex():
        flat, part = (torch.view_as_real(value).flatten() for value in (flat, part))
    ops.reduce_scatter_tensor_out(flat, op, world_size, group, out=part)


def start_all_reduce(value: Tensor, op: str, group: str) -> Started:
    """Start to reduce `value` over ranks; the input does not change."""
    return Started(ops.all_reduce(value, op, group))


def _carried(flat: Tensor) -> tuple[Tensor, int, Callable[[Tensor], Tensor]]:
    """A flat tensor of a dtype that all backends carry, for a `flat` that is not summed.

    Returns:
        The tensor to send, the number of its elements for one of `flat`, and the way back.
    """
    dtype = flat.dtype
    if flat.is_complex():
        return torch.view_as_real(flat).flatten(), 2, _as_complex
    if dtype not in _CARRIED_AS_IS:
        return flat.view(torch.uint8), flat.element_size(), lambda raw: raw.view(dtype)
    return flat, 1, _same


def _as_complex(real: Tensor) -> Tensor:
    return torch.view_as_complex(real.view(-1, 2))


def _amount(value: Tensor) -> str:
    return f"{value.numel()} {str(value.dtype).removeprefix('torch.')}"


def all_gather(segment: Tensor, world_size: int, group: str) -> Tensor:
    """Concatenate the segments of all ranks: `(S,)` -> `(world_size * S,)`."""
    with entering(f"an all-gather of {_amount(segment)}", group, segment):
        return start_all_gather(segment, world_size, group).wait()


def reduce_scatter(flat: Tensor, op: str, world_size: int, group: str) -> Tensor:
    """Reduce over ranks, and keep this rank's part: `(world_size * S,)` -> `(S,)`."""
    return start_reduce_scatter(flat, op, world_size, group).wait()


def all_reduce(value: Tensor, op: str, group: str) -> Tensor:
    """Reduce `value` over ranks; the input does not change."""
    with entering(f"an all-reduce of {_amount(value)}", group, value):
        return start_all_reduce(value, op, group).wait()


@dataclass(frozen=True)
class CallStarted:
    """A started collective for a call of the user, which waits for it later."""

    started: Started
    call: AwaitedCall
    group: str

    def wait(self) -> Tensor:
        """Wait for the result; an error names the call."""
        with naming(self.group), self.call.waiting():
            return self.started.wait()


def start_exchange(
    flat: Tensor, out_sizes: list[int], in_sizes: list[int], group: str, what: str
) -> CallStarted:
    """Start to send each rank its piece of `flat`: `(sum(in_sizes),)` -> `(sum(out_sizes),)`.

    The last argument names the values that are sent, in the same words on all ranks.

    Args:
        out_sizes, in_sizes: elements from each rank, and for each rank.
    """
    with naming(group), AwaitedCall(f"an all-to-all of {what}") as call:
        return CallStarted(_start_exchange(flat, out_sizes, in_sizes, group), call, group)


def _start_exchange(flat: Tensor, out_sizes: list[int], in_sizes: list[int], group: str) -> Started:
    if len(in_sizes) == 1:
        return Started(flat.clone(), done=True)
    sent, each, back = _carried(flat)
    out, into = ([each * size for size in sizes] for sizes in (out_sizes, in_sizes))
    return Started(ops.all_to_all_single(sent, out, into, group), back)
