"""Collectives as plain tensor functions, the same under tracing and eagerly.

Each issues torch's functional collective and waits for it. In a compiled graph the pair shows as
two nodes, which passes move apart; eagerly the wait follows at once. Groups go by name, because a
name is all that a graph can carry.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from shardc.runtime import compat

ops = torch.ops._c10d_functional
compat.let_backend_threads_finish()

_CARRIED_AS_IS = {
    torch.float64, torch.float32, torch.float16, torch.bfloat16,
    torch.int64, torch.int32, torch.int8, torch.uint8,
}  # fmt: skip


def all_gather(segment: Tensor, world_size: int, group: str) -> Tensor:
    """Concatenate the segments of all ranks: `(S,)` -> `(world_size * S,)`."""
    if segment.is_complex():
        flat = torch.view_as_real(segment).flatten()
        return torch.view_as_complex(all_gather(flat, world_size, group).view(-1, 2))
    if segment.dtype not in _CARRIED_AS_IS:
        return all_gather(segment.view(torch.uint8), world_size, group).view(segment.dtype)
    return ops.wait_tensor(ops.all_gather_into_tensor(segment, world_size, group))


def reduce_scatter(flat: Tensor, op: str, world_size: int, group: str) -> Tensor:
    """Reduce over ranks, keep this rank's part: `(world_size * S,)` -> `(S,)`."""
    if flat.is_complex():
        real = torch.view_as_real(flat).flatten()
        return torch.view_as_complex(reduce_scatter(real, op, world_size, group).view(-1, 2))
    return ops.wait_tensor(ops.reduce_scatter_tensor(flat, op, world_size, group))


def all_reduce(value: Tensor, op: str, group: str) -> Tensor:
    """Reduce `value` over ranks; the input is left alone."""
    return ops.wait_tensor(ops.all_reduce(value, op, group))


def naming_failures(call: Callable[[list[Any]], Any], group: str) -> Callable[[list[Any]], Any]:
    """`call`, a boxed graph with collectives over `group`, saying what a lost peer means."""

    def run(inputs: list[Any]) -> Any:
        try:
            return call(inputs)
        except RuntimeError as error:
            if not _is_from_backend(error):
                raise
            members = compat.resolve_group(group)
            timeout = compat.group_timeout(members, torch.device("cpu"))
            raise RuntimeError(
                f"a collective of shardc failed on rank {members.rank()} of {members.size()}: a "
                f"peer died or did not take part in time (the group's timeout is {timeout}). The "
                f"backend says: {error}"
            ) from error

    run._boxed_call = True  # type: ignore[attr-defined]
    return run


def _is_from_backend(error: RuntimeError) -> bool:
    text = str(error).lower()
    known = (
        "gloo",
        "nccl",
        "pair closure",
        "connection closed by peer",
        "connection reset by peer",
    )
    return isinstance(error, dist.DistError) or any(word in text for word in known)
