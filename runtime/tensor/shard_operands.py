"""What an op on parts sees of its operands, and how results become ShardTensors again.

An elementwise op may run on local parts only where all sharded operands hold the same interval of
the same shape. Plain operands of that shape are cut to it, single elements broadcast, anything else
is refused: `shard * row` on the local part would be silently wrong.
"""

from collections.abc import Callable, Iterable
from functools import cache
from typing import NoReturn

import torch
from torch import Tensor

from shardc.runtime import compat
from shardc.runtime.checks.refusal import caller_and_way_out
from shardc.runtime.tensor.shard_tensor import ShardTensor

aten = torch.ops.aten
_TAKES_0_DIM = {
    aten.fill.Tensor, aten.fill_.Tensor, aten.masked_fill.Tensor, aten.masked_fill_.Tensor,
}  # fmt: skip
_USER_NAMES = {"aten._local_scalar_dense.default": ".item()"}
PLAIN_TARGET = (
    "a plain tensor cannot be updated with a part of a sharded one (if it is optimizer state that "
    "was made before fully_shard, build the optimizer after it)"
)


def local_part(func: compat.Op, operand: Tensor, like: ShardTensor) -> Tensor:
    """What an elementwise op on `like`'s local part sees of `operand`.

    Raises:
        NotImplementedError: it is not cut as `like`, nor plain and of its shape, nor one element.
    """
    if isinstance(operand, ShardTensor):
        if operand is like or _same_cut(operand, like):
            return operand._local
        refuse(func, f"operands are cut differently: {_cut(like)} and {_cut(operand)}")
    if operand.dim() == 0:
        # The local part of a 0-dim parameter is 1-D: against a 0-dim operand types would promote
        # otherwise than they do between two 0-dim tensors.
        same_kind = like.dim() > 0 or operand.dtype == like.dtype or func in _TAKES_0_DIM
        return operand if same_kind else operand.reshape(1)
    if operand.shape == like.shape:
        return cut(operand, like)
    if operand.numel() == 1 and operand.dim() <= like.dim():
        return operand.reshape(1)
    refuse(func, f"{tuple(like.shape)} (sharded) with {tuple(operand.shape)} (plain) broadcasts")


def cut(full: Tensor, like: ShardTensor) -> Tensor:
    """This rank's interval of `full`, a whole tensor with the elements of `like`: 1-D."""
    start, stop = like._spec.interval()
    if like._spec.tp is not None:
        full = like._spec.tp.local_of(full)
    return full.reshape(-1)[start:stop]


def wrap(func: compat.Op, local: Tensor, like: ShardTensor) -> ShardTensor:
    """A result on local parts as a ShardTensor; `func` must have kept their length."""
    if local.shape != like._local.shape:
        refuse(func)
    return ShardTensor(local, like.shape, like._spec)


def empty_full(like: ShardTensor) -> Tensor:
    """An uninitialised plain tensor of the full shape."""
    return torch.empty(like.shape, dtype=like.dtype, device=like.device)


@cache
def written_operands(func: compat.Op) -> tuple[int | str, ...]:
    """Which arguments `func` writes to: positions, or names of keyword-only ones."""
    return tuple(
        argument.name if argument.kwarg_only else index
        for index, argument in enumerate(func._schema.arguments)
        if argument.alias_info is not None and argument.alias_info.is_write
    )


def view_local(local: Tensor, view: Callable[[Tensor], Tensor]) -> Tensor:
    """`view(local)`, sharing the version of `local` (see `bump`).

    Below `__torch_dispatch__` views get versions of their own unless told otherwise (2.11 to 2.15).
    """
    if type(local) is not Tensor:  # while tracing
        return view(local)
    with compat.tracking_versions():
        return view(local)


def bump(locals_: Iterable[Tensor]) -> None:
    """Tell autograd that local parts were updated: below `__torch_dispatch__` nobody else does.

    A local part shares its version with the segment, so a backward that saved the segment before
    the update fails instead of using new weights.
    """
    written = [local for local in locals_ if type(local) is Tensor]  # not while tracing
    torch.autograd.graph.increment_version(written)


def refuse(func: compat.Op, why: str = "it needs more than this rank's part") -> NoReturn:
    """Raise for an op that has no meaning on parts."""
    name = str(func)
    caller, way_out = caller_and_way_out()
    raise NotImplementedError(
        f"{_USER_NAMES.get(name, name)} is not supported on a ShardTensor: {why}{caller}. {way_out}"
    )


def _same_cut(a: ShardTensor, b: ShardTensor) -> bool:
    return (a._spec is b._spec or a._spec == b._spec) and a.shape == b.shape


def _cut(tensor: ShardTensor) -> str:
    spec = tensor._spec
    return f"{tuple(tensor.shape)} at offset {spec.offset} of {spec.segment}-element segments"
