"""Ops that bring the gradients of a bucket's parameters into one flat tensor.

The backward is traced with `shardc::pack`; the pass `write_gradients` replaces it by the ops that
write, so that matmuls leave their results in the tensor that the reduce-scatter reads.
"""

import itertools

import torch
from torch import Tensor

_library = torch.library.Library("shardc", "FRAGMENT")
_library.define(
    "pack(Tensor?[] parts, int[] sizes, ScalarType dtype, Tensor? pending=None) -> Tensor"
)


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


_library.impl("pack", _pack, "CompositeExplicitAutograd")
torch.library.register_fake("shardc::pack", _pack_fake, lib=_library)


_library.define("first_matmul(Tensor left, Tensor right, int numel, int start) -> Tensor")
_library.define("write_matmul(Tensor(a!) buffer, Tensor left, Tensor right, int start) -> ()")
_library.define("write_parts(Tensor(a!) buffer, Tensor[] parts, int[] starts, int[] gaps) -> ()")


def _first_matmul(left: Tensor, right: Tensor, numel: int, start: int) -> Tensor:
    """A new buffer, `(numel,)`, with `left @ right` from `start` on.

    The first write allocates the memory: Inductor would run an `aten.empty` before or after the
    kernels that come before it, depending on how Inductor fuses them.
    """
    buffer = left.new_empty(numel)
    _write_matmul(buffer, left, right, start)
    return buffer


def _first_matmul_fake(left: Tensor, right: Tensor, numel: int, start: int) -> Tensor:
    return left.new_empty(numel)


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


_library.impl("first_matmul", _first_matmul, "CompositeExplicitAutograd")
_library.impl("write_matmul", _write_matmul, "CompositeExplicitAutograd")
_library.impl("write_parts", _write_parts, "CompositeExplicitAutograd")
torch.library.register_fake("shardc::first_matmul", _first_matmul_fake, lib=_library)
torch.library.register_fake("shardc::write_matmul", lambda *_: None, lib=_library)
torch.library.register_fake("shardc::write_parts", lambda *_: None, lib=_library)
