"""Ops that bring the gradients of a bucket's parameters into one flat tensor.

The backward is traced with `shardc::pack`; the pass `write_gradients` replaces it by the ops that
write, so that matmuls leave their results in the tensor that the reduce-scatter reads.
"""

import itertools

import torch
from torch import Tensor

from shardc.runtime.comm.ops import define_op


def _pack(
    parts: list[Tensor | None], sizes: list[int], dtype: torch.dtype, pending: Tensor | None = None
) -> Tensor:
    """Flatten, concatenate and cast gradients, zeros for None, and add `pending`: `(sum(sizes),)`.

    None stands for a parameter without gradient, and for padding (`padding` says why zeros).

    Inductor calls this op as it is. Inductor would fuse the copies of a `cat` into the neighbouring
    kernels, differently in every block, and would have to compile all these kernels.
    """
    like = next(part for part in parts if part is not None)
    flat = like.new_empty(sum(sizes), dtype=dtype)
    places = list(zip(parts, itertools.accumulate(sizes, initial=0), sizes, strict=False))
    given = [(part, start) for part, start, _ in places if part is not None]
    gaps = [number for part, *place in places if part is None for number in place]
    _write_parts(flat, [part for part, _ in given], [start for _, start in given], gaps)
    return flat if pending is None else flat.add_(pending)


def _pack_fake(
    parts: list[Tensor | None], sizes: list[int], dtype: torch.dtype, pending: Tensor | None = None
) -> Tensor:
    like = next(part for part in parts if part is not None)
    return like.new_empty(sum(sizes), dtype=dtype)


define_op(
    "pack(Tensor?[] parts, int[] sizes, ScalarType dtype, Tensor? pending=None) -> Tensor",
    _pack,
    _pack_fake,
)


def _first_matmul(left: Tensor, right: Tensor, numel: int, start: int) -> Tensor:
    """A new buffer, `(numel,)`, with `left @ right` from `start` on.

    The first write allocates the memory: Inductor would run an `aten.empty` before or after the
    kernels that come before it, depending on how Inductor fuses them.
    """
    buffer = left.new_empty(numel)
    _write_matmul(buffer, left, right, start)
    return buffer


def _write_matmul(buffer: Tensor, left: Tensor, right: Tensor, start: int) -> None:
    """Write `left @ right` straight into `buffer: (W*S,)` from `start` on."""
    rows, columns = left.shape[0], right.shape[1]
    out = buffer[start : start + rows * columns].view(rows, columns)
    torch.mm(left, right, out=out)


def _write_parts(buffer: Tensor, parts: list[Tensor], starts: list[int], gaps: list[int]) -> None:
    """Copy and cast gradients into `buffer: (W*S,)`; `gaps`, pairs (start, size), become zero."""
    places = [
        buffer[start : start + part.numel()].view(part.shape)
        for part, start in zip(parts, starts, strict=True)
    ]
    if parts:
        torch._foreach_copy_(places, parts)
    for start, size in zip(gaps[::2], gaps[1::2], strict=True):
        buffer[start : start + size].zero_()


define_op(
    "first_matmul(Tensor left, Tensor right, int numel, int start) -> Tensor",
    _first_matmul,
    lambda left, right, numel, _: left.new_empty(numel),
)
define_op(
    "write_matmul(Tensor(a!) buffer, Tensor left, Tensor right, int start) -> ()", _write_matmul
)
define_op(
    "write_parts(Tensor(a!) buffer, Tensor[] parts, int[] starts, int[] gaps) -> ()", _write_parts
)
