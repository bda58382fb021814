"""Operands of ops become local parts, and results become ShardTensors again.

An elementwise op may run on local parts only if all sharded operands hold the same interval of the
same shape. A plain operand that has this shape, or broadcasts to it, is cut to the interval. A
sharded operand with another cut is gathered first.
"""

from collections.abc import Callable, Iterable
from functools import cache

import torch
from torch import Tensor

from shardc.runtime import compat
from shardc.runtime.checks.refusal import is_called_by_autograd
from shardc.runtime.tensor.shard_gathers import gather_counts, gathered, plain, refuse
from shardc.runtime.tensor.shard_spec import part_of, whole_gradient
from shardc.runtime.tensor.sharded import Sharded

aten = torch.ops.aten
_TAKES_0_DIM = {
    aten.fill.Tensor, aten.fill_.Tensor, aten.masked_fill.Tensor, aten.masked_fill_.Tensor,
}  # fmt: skip
PLAIN_TARGET = (
    "a plain tensor cannot be updated with a part of a sharded one (if it is optimizer state that "
    "was made before fully_shard, build the optimizer after it)"
)


class NeedsWhole(Exception):
    """An elementwise op gives a result of another shape than its sharded operand."""


def local_part(func: compat.Op, operand: Tensor, like: Sharded) -> Tensor:
    """The part of `operand` for an elementwise op on the local part of `like`.

    Raises:
        NeedsWhole: `operand` does not broadcast to the shape of `like`.
        NotImplementedError: `strict` is on, and `operand` must be gathered or broadcast. (It has
            not the cut of `like`, nor is it plain with the shape of `like`, nor one element.)
    """
    if isinstance(operand, Sharded):
        if operand is like or _same_cut(operand, like):
            return operand._local
        why = f"operands are cut differently: {_cut(like)} and {_cut(operand)}"
        if not _broadcasts(operand, like):
            raise NeedsWhole(why)
        operand = gathered(func, operand, why)
    operand = plain(func, operand, like)
    if operand.dim() == 0:
        # The local part of a 0-dim parameter is 1-D. With a 0-dim operand, types would promote
        # in another way than between two 0-dim tensors.
        same_kind = like.dim() > 0 or operand.dtype == like.dtype or func in _TAKES_0_DIM
        return operand if same_kind else operand.reshape(1)
    if operand.shape == like.shape:
        if func is aten.add.Tensor and is_called_by_autograd():
            # One use of a parameter gave a part of the mean, another use a whole gradient.
            return whole_gradient(operand, like._shard_spec)
        return interval_like(operand, like)
    if operand.numel() == 1 and operand.dim() <= like.dim():
        return operand.reshape(1)
    why = f"{tuple(like.shape)} (sharded) with {tuple(operand.shape)} (plain) broadcasts"
    if gather_counts.strict:
        refuse(func, why)
    if not _broadcasts(operand, like):
        raise NeedsWhole(why)
    return _broadcast_part(operand, like)


def _broadcasts(operand: Tensor, like: Sharded) -> bool:
    """Whether `operand` broadcasts to the shape of `like`."""
    if operand.dim() > like.dim():
        return False
    sizes = zip(reversed(operand.shape), reversed(like.shape), strict=False)
    return all(own in (1, size) for own, size in sizes)


def _broadcast_part(operand: Tensor, like: Sharded) -> Tensor:
    """Broadcast `operand` to the shape of `like`, and cut this rank's part of it: 1-D."""
    whole = operand.expand(like.shape)
    parts = [
        whole[tuple(slice(at, at + size) for at, size in zip(box.offsets, box.sizes, strict=True))]
        for box in like._boxes()
    ]
    return torch.cat([part.reshape(-1) for part in parts]) if parts else operand.new_empty(0)


def interval_like(full: Tensor, like: Sharded) -> Tensor:
    """Cut this rank's interval from `full`, a whole tensor of the shape of `like`: 1-D."""
    return part_of(full, like._shard_spec)


def store(target: Sharded, full: Tensor) -> None:
    """Write this rank's interval of `full` into `target`."""
    target._local.copy_(interval_like(full, target))
    bump([target._local])


def as_shard(func: compat.Op, local: Tensor, like: Sharded) -> Sharded:
    """Wrap a result on local parts as a ShardTensor; refuse `func` if it changed their length."""
    if local.shape != like._local.shape:
        refuse(func)
    return Sharded.make(local, like.shape, like._shard_spec)


def empty_full(like: Sharded) -> Tensor:
    """An uninitialised plain tensor of the full shape of `like`."""
    return torch.empty(like.shape, dtype=like.dtype, device=like.device)


@cache
def written_operands(func: compat.Op) -> tuple[int | str, ...]:
    """The arguments that `func` writes to: positions, or names of keyword-only arguments."""
    return tuple(
        argument.name if argument.kwarg_only else index
        for index, argument in enumerate(func._schema.arguments)
        if argument.alias_info is not None and argument.alias_info.is_write
    )


def view_local(local: Tensor, view: Callable[[Tensor], Tensor]) -> Tensor:
    """Make a view of `local` that shares the version of `local` (see `bump`).

    Below `__torch_dispatch__`, torch gives a view a version of its own by default.
    """
    if type(local) is not Tensor:  # while tracing
        return view(local)
    with compat.tracking_versions():
        return view(local)


def bump(locals_: Iterable[Tensor]) -> None:
    """Tell autograd that local parts were updated: torch does not below `__torch_dispatch__`.

    A local part shares its version with the segment. So a backward that saved the segment before
    the update fails, and does not use new weights.
    """
    written = [local for local in locals_ if type(local) is Tensor]  # not while tracing
    torch.autograd.graph.increment_version(written)


def has_shards(values: Iterable[object]) -> bool:
    """Whether a ShardTensor is among `values`, or in a list among `values`."""
    listed = (
        x for value in values for x in (value if isinstance(value, list | tuple) else [value])
    )
    return any(isinstance(x, Sharded) for x in listed)


def _same_cut(a: Sharded, b: Sharded) -> bool:
    return a._shard_spec.lies_as(b._shard_spec) and a.shape == b.shape


def _cut(tensor: Sharded) -> str:
    spec = tensor._shard_spec
    return f"{tuple(tensor.shape)} at offset {spec.offset} of {spec.segment}-element segments"
