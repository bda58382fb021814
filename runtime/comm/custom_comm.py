"""Ops that call objects of users: communication objects with FSDP2's interface, and hooks.

A graph names the object by key (`intern_object`). The passes cannot see into the call, so the op
runs at its place in the graph and waits at once.
"""

import torch
import torch.distributed as dist
from torch import Tensor

from shardc.runtime import compat
from shardc.runtime.comm.ops import define_op
from shardc.runtime.layout.spec import name_of_object, object_of


def _custom_all_gather(segment: Tensor, ranks: int, group: str, key: str) -> Tensor:
    """An all-gather by an object with FSDP2's interface (`torch.distributed.fsdp` AllGather)."""
    comm = object_of(key)
    numel = ranks * segment.numel()
    full = comm.allocate([numel], dtype=segment.dtype, device=segment.device)
    check_result(full, numel, segment, "set_custom_all_gather", key, "allocate()")
    _wait(comm(full, segment.contiguous(), compat.resolve_group(group), async_op=False))
    return full


def _custom_reduce_scatter(flat: Tensor, op: str, ranks: int, group: str, key: str) -> Tensor:
    """A reduce-scatter by an object with FSDP2's interface (ReduceScatter)."""
    comm = object_of(key)
    numel = flat.numel() // ranks
    part = comm.allocate([numel], dtype=flat.dtype, device=flat.device)
    check_result(part, numel, flat, "set_custom_reduce_scatter", key, "allocate()")
    reduce_op = {"sum": dist.ReduceOp.SUM, "avg": dist.ReduceOp.AVG}[op]
    _wait(comm(part, flat, compat.resolve_group(group), reduce_op, async_op=False))
    return part


def _call_hook(part: Tensor, key: str) -> Tensor:
    """Let the user's hook change a reduced gradient, `(S,)`, in place."""
    changed = part.clone()
    returned = object_of(key)(changed)
    if isinstance(returned, Tensor) and returned is not changed:
        raise RuntimeError(
            f"the hook of set_all_reduce_hook, {name_of_object(key)}, returned a tensor, which "
            "nothing reads: it must change the gradient that it is given in place"
        )
    check_result(changed, part.numel(), part, "set_all_reduce_hook", key, "the gradient it changed")
    return changed


def check_result(
    given: object, numel: int, like: Tensor, setter: str, key: str, what: str = "its result"
) -> None:
    """Raise RuntimeError unless an object of the user gave a tensor `(numel,)`, else like `like`.

    The last argument names `given` in the error.

    Args:
        given: the value that the object gave.
        numel: the number of elements that `given` must have.
        like: a tensor with the dtype and the device that `given` must have.
        setter: the method with which the object was set.
        key: the key of the object.
    """
    wanted = f"a tensor of shape ({numel},), {like.dtype}, on {like.device}"
    if not isinstance(given, Tensor):
        found = f"{type(given).__name__}"
    elif given.shape == (numel,) and (given.dtype, given.device) == (like.dtype, like.device):
        return
    else:
        found = f"a tensor of shape {tuple(given.shape)}, {given.dtype}, on {given.device}"
    raise RuntimeError(f"{setter}: {what} of {name_of_object(key)} is {found}; it must be {wanted}")


def _wait(work: dist.Work | None) -> None:
    if work is not None:
        work.wait()


define_op(
    "custom_all_gather(Tensor segment, int ranks, str group, str key) -> Tensor",
    _custom_all_gather,
    lambda segment, ranks, *_: segment.new_empty(ranks * segment.numel()),
)
define_op(
    "custom_reduce_scatter(Tensor flat, str op, int ranks, str group, str key) -> Tensor",
    _custom_reduce_scatter,
    lambda flat, op, ranks, *_: flat.new_empty(flat.numel() // ranks),
)
define_op(
    "call_hook(Tensor part, str key) -> Tensor", _call_hook, lambda part, _: torch.empty_like(part)
)
