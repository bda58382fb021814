"""From a segment to full parameters and back: the tensor functions that graphs are made of.

`unshard` is what `insert_unshard` splices into a captured graph and what the eager path calls: one
all-gather of the bucket, one split (padding included: the backward of a split is a single `cat`),
views. Its autograd is one reduce-scatter of the whole bucket's gradient.

Under Dynamo a parameter reads as the marker op `shardc::unshard_slot`, which is never executed. The
marker carries an interned signature instead of names or ranks, so identical units trace to
identical code, and units that differ in anything that shapes the graph never share it.
"""

import hashlib
from dataclasses import dataclass
from typing import Any, NoReturn

import torch
from torch import Tensor

from shardc.runtime import collectives, compat


@dataclass(frozen=True)
class UnshardSpec:
    """All that shapes the code that unshards a bucket; equal on every rank.

    `pieces` are the bucket's consecutive parts: (elements, slot index or None for padding).
    `reduce_group` is the communicator of the reduce-scatter where it is not `group`; `hints` are
    the user's wishes for the schedule, here so that a change of them compiles anew.
    """

    dtype: torch.dtype
    world_size: int
    group: str
    pieces: tuple[tuple[int, int | None], ...]
    shapes: tuple[tuple[int, ...], ...]
    trainable: tuple[bool, ...]
    reshard_after_forward: bool
    reduce_op: str
    reduce_group: str | None = None
    hints: tuple[object, ...] = ()

    @property
    def numel(self) -> int:
        """Elements of the whole bucket."""
        return sum(size for size, _ in self.pieces)


_SPECS: dict[str, UnshardSpec] = {}


def intern_spec(spec: UnshardSpec) -> str:
    """The signature of `spec`: the same string for equal specs, on every rank and in every run."""
    signature = hashlib.sha256(repr(spec).encode()).hexdigest()[:16]
    _SPECS[signature] = spec
    return signature


def spec_of(signature: str) -> UnshardSpec:
    """The spec that `intern_spec` gave this signature."""
    return _SPECS[signature]


def unshard(segment: Tensor, signature: str) -> tuple[Tensor, ...]:
    """Gather a bucket: `segment: (S,)` -> its full parameters, views of one `(W*S,)` tensor."""
    return _Unshard.apply(segment, signature)


class _Unshard(torch.autograd.Function):
    """All-gather forward, reduce-scatter backward; nodes carry the signature as a fact.

    The backward sums (`reduce_op`): what remains to be divided, the bucket divides.
    """

    @staticmethod
    def forward(ctx: Any, segment: Tensor, signature: str) -> tuple[Tensor, ...]:
        spec = _SPECS[signature]
        ctx.signature = signature
        ctx.set_materialize_grads(False)
        with compat.annotate({"shardc": signature}):
            full = collectives.all_gather(segment, spec.world_size, spec.group)
        pieces = torch.split(full, [size for size, _ in spec.pieces])
        views = {
            slot: piece.view(spec.shapes[slot])
            for piece, (_, slot) in zip(pieces, spec.pieces, strict=True)
            if slot is not None
        }
        ordered = tuple(views[slot] for slot in range(len(spec.shapes)))
        ctx.mark_non_differentiable(
            *(view for view, flag in zip(ordered, spec.trainable, strict=True) if not flag)
        )
        return ordered

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor, None]:
        spec = _SPECS[ctx.signature]
        parts = [
            None if slot is None or not spec.trainable[slot] else grads[slot]
            for _, slot in spec.pieces
        ]
        with compat.annotate({"shardc": ctx.signature}):
            flat = torch.ops.shardc.pack(parts, [size for size, _ in spec.pieces])
            return collectives.reduce_scatter(
                flat, spec.reduce_op, spec.world_size, spec.reduce_group or spec.group
            ), None


_library = torch.library.Library("shardc", "FRAGMENT")
_library.define("pack(Tensor?[] parts, int[] sizes) -> Tensor")


def _pack(parts: list[Tensor | None], sizes: list[int]) -> Tensor:
    """Flatten and concatenate gradients, zeros for what is None: `(sum(sizes),)`.

    One op, which Inductor calls as it is: lowered, the copies of a `cat` would be fused into the
    neighbouring kernels, differently in every block, and the compiler would have to build them all.
    In the backward graph the pass `write_gradients` puts direct writes in its place.
    """
    like = next(part for part in parts if part is not None)
    zeros = like.new_zeros(max(sizes))
    pairs = zip(parts, sizes, strict=True)
    return torch.cat([zeros[:size] if part is None else part.reshape(-1) for part, size in pairs])


def _pack_fake(parts: list[Tensor | None], sizes: list[int]) -> Tensor:
    like = next(part for part in parts if part is not None)
    return like.new_empty(sum(sizes))


_library.impl("pack", _pack, "CompositeExplicitAutograd")
torch.library.register_fake("shardc::pack", _pack_fake, lib=_library)


_library.define("write_matmul(Tensor(a!) buffer, Tensor left, Tensor right, int start) -> ()")
_library.define("write_parts(Tensor(a!) buffer, Tensor[] parts, int[] starts, int[] gaps) -> ()")


def _write_matmul(buffer: Tensor, left: Tensor, right: Tensor, start: int) -> None:
    """`left @ right` straight into `buffer: (W*S,)` from `start` on."""
    rows, columns = left.shape[0], right.shape[1]
    out = buffer[start : start + rows * columns].view(rows, columns)
    torch.mm(left, right, out=out)


def _write_parts(buffer: Tensor, parts: list[Tensor], starts: list[int], gaps: list[int]) -> None:
    """Copy small gradients into `buffer: (W*S,)`; `gaps`, pairs (start, size), become zero."""
    places = [
        buffer[start : start + part.numel()].view(part.shape)
        for part, start in zip(parts, starts, strict=True)
    ]
    if parts:
        torch._foreach_copy_(places, parts)
    for start, size in zip(gaps[::2], gaps[1::2], strict=True):
        buffer[start : start + size].zero_()


_library.impl("write_matmul", _write_matmul, "CompositeExplicitAutograd")
_library.impl("write_parts", _write_parts, "CompositeExplicitAutograd")
torch.library.register_fake("shardc::write_matmul", lambda *_: None, lib=_library)
torch.library.register_fake("shardc::write_parts", lambda *_: None, lib=_library)


@torch.library.custom_op("shardc::unshard_slot", mutates_args=())
def unshard_slot(segment: Tensor, signature: str, slot: int) -> Tensor:
    """Mark the use of one parameter of a bucket in a Dynamo graph, for `insert_unshard`."""
    raise RuntimeError("shardc::unshard_slot is a marker: compile the model with backend='shardc'")


@unshard_slot.register_fake
def _(segment: Tensor, signature: str, slot: int) -> Tensor:
    spec = _SPECS[signature]
    return segment.new_empty(spec.shapes[slot])


def _no_backward(ctx: Any, grad: Tensor) -> NoReturn:
    raise RuntimeError("shardc::unshard_slot is a marker: compile the model with backend='shardc'")


unshard_slot.register_autograd(_no_backward)
