"""Sharded optimizer state, quantised over blocks: torchao's AdamW8bit, AdamW4bit and AdamWFp8.

A state has the cut of its parameter. Its blocks are the blocks of the flattened parameter, as in an
unsharded run. So a rank keeps each block that its interval touches; zeros fill up the first and the
last block. As in an unsharded run, the whole parameter decides whether its state is quantised.

`state_dict` dequantises the state, and `load_state_dict` quantises it again. So checkpoints have
the values of AdamW's state, and load at any world size; at the same one, with the codes of then.
"""

import math
from typing import Any, cast

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.optim import Optimizer
from torch.utils._pytree import tree_map_only

from shardc.runtime import compat
from shardc.runtime.checks.optimizer_hooks import Turn, before_steps
from shardc.runtime.tensor.shard_tensor import ShardTensor

aten = torch.ops.aten
SMALLEST = 4096
"""The smallest number of elements of a parameter with quantised state: torchao/optim/adam.py."""


class BlockState(Tensor):
    """Elements `[front, front + n)` of a flat quantised tensor, `(n,)`.

    Ops compute with the dequantised values. Only `copy_` writes: it quantises the new values.
    """

    _inner: Any
    _front: int

    __torch_function__ = compat.NO_TORCH_FUNCTION  # type: ignore[assignment]

    @staticmethod
    def __new__(cls, inner: Tensor, front: int, numel: int) -> "BlockState":
        self: BlockState = compat.make_wrapper(cls, (numel,), inner)  # type: ignore[assignment]
        self._inner = inner
        self._front = front
        return self

    def dequantised(self) -> Tensor:
        """The plain value of the state."""
        whole: Tensor = self._inner.dequantize(self.dtype).view(-1)
        return whole.narrow(0, self._front, self.shape[0])

    def quantise(self, values: Tensor) -> None:
        """Quantise `values: (n,)` into the state."""
        self._inner.copy_(self._in_blocks(values))

    def restore(self, values: Tensor) -> None:
        """After `copy_` of `values: (n,)`, an earlier `dequantised()`, take the codes of then.

        The largest value of a block gives its scale. In a map of codes that ends nearer to zero
        below than above, a largest value that is negative belongs to a larger scale.
        """
        state = self._inner
        lowest = -float(state.qmap[0]) if hasattr(state, "qmap") else 0.0
        if lowest <= 0.0:
            return
        blocks = self._in_blocks(values.to(state.device)).view(-1, state.block_size)
        exact = (state.dequantize().view_as(blocks) == blocks).all(1)
        halfway = (state.qmap[1:] + state.qmap[:-1]) / 2
        scales = state.scale.clone()
        codes = _unpacked(state.codes, blocks.numel()).view_as(blocks)
        for toward in (None, 0.0, math.inf):  # the division may round to a neighbour of the scale
            scale = blocks.abs().amax(1) / lowest
            if toward is not None:
                scale = scale.nextafter(torch.full_like(scale, toward))
            found = torch.bucketize(blocks / scale[:, None].clamp_min(1e-30), halfway)
            fits = (state.qmap[found] * scale[:, None] == blocks).all(1) & ~exact
            scales = torch.where(fits, scale, scales)
            codes = torch.where(fits[:, None], found.to(torch.uint8), codes)
            exact |= fits
        state.scale.copy_(scales)
        state.codes.copy_(_packed(codes.view(-1), state.codes.numel()).view_as(state.codes))

    def _in_blocks(self, values: Tensor) -> Tensor:
        """`values` with zeros around them, up to whole blocks."""
        behind = self._inner.numel() - self._front - self.shape[0]
        return F.pad(values.float(), (self._front, behind))

    def __tensor_flatten__(self) -> tuple[list[str], tuple[int, int]]:
        return ["_inner"], (self._front, self.shape[0])

    @staticmethod
    def __tensor_unflatten__(
        inner: dict[str, Tensor], context: tuple[int, int], shape: object, stride: object
    ) -> "BlockState":
        return BlockState(inner["_inner"], *context)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls,
        func: compat.Op,
        types: object,
        args: compat.Args = (),
        kwargs: compat.Kwargs | None = None,
    ) -> object:
        target = args[0]
        if func in (aten.detach.default, aten.alias.default):
            return BlockState(target._inner, target._front, target.shape[0])
        if func is aten.is_pinned.default:
            return func(target._inner)
        if func is aten.copy_.default and _same_blocks(target, args[1]):
            target._inner.copy_(args[1]._inner)
            return target
        plain, named = tree_map_only(BlockState, BlockState.dequantised, (args, kwargs or {}))
        if not isinstance(target, BlockState) or not func._schema.is_mutable:
            return func(*plain, **named)
        if func is not aten.copy_.default:
            raise NotImplementedError(f"{func} on a quantised optimizer state: write it by copy_")
        target.quantise(plain[1].expand(target.shape))
        return target


def _unpacked(codes: Tensor, count: int) -> Tensor:
    """`count` codes, one a byte; torchao packs two codes of 4 bits."""
    if codes.numel() == count:
        return codes.view(-1)
    return torch.stack([codes >> 4, codes & 0xF], dim=-1).view(-1)


def _packed(codes: Tensor, nbytes: int) -> Tensor:
    if codes.numel() == nbytes:
        return codes
    first, second = codes.view(-1, 2).unbind(-1)
    return (first << 4) | second


def _same_blocks(a: object, b: object) -> bool:
    """Whether both are quantised states of the same type, front and shape."""
    if not isinstance(a, BlockState) or not isinstance(b, BlockState):
        return False
    return (type(a._inner), a._front, a.shape) == (type(b._inner), b._front, b.shape)


def _making_shards(own: compat.NewBuffer) -> compat.NewBuffer:
    def new_buffer(optimizer: compat.QuantisingOptimizer, param: Tensor, signed: bool) -> Tensor:
        if isinstance(param, ShardTensor):
            return _zeros(optimizer, param, signed)
        return own(optimizer, param, signed)

    return new_buffer


def _zeros(optimizer: compat.QuantisingOptimizer, param: ShardTensor, signed: bool) -> Tensor:
    """Make a state of zeros with the spec of `param`, quantised if an unsharded run would do so."""
    spec, block = param._shard_spec, optimizer.block_size
    start, stop = spec.interval()
    if spec.numel < SMALLEST or spec.numel % block or start == stop:
        return torch.zeros_like(param)
    front = start % block
    covered = -(-(front + stop - start) // block) * block
    like = torch.empty(covered, dtype=param.dtype, device=param._local.device)
    inner = optimizer._subclass_zeros(like, signed, block)
    return ShardTensor(BlockState(inner, front, stop - start), param.shape, spec)


# -- state dicts ----------------------------------------------------------------------------------


def _dequantised(value: object) -> object:
    if isinstance(value, ShardTensor) and isinstance(value._local, BlockState):
        return ShardTensor(value._local.dequantised().clone(), value.shape, value._shard_spec)
    return value


def _show_values(optimizer: Optimizer, state_dict: dict[str, Any]) -> dict[str, Any]:
    """Dequantise the states of a state dict, so that it loads at any world size."""
    shown = {
        key: {name: _dequantised(value) for name, value in state.items()}
        for key, state in state_dict["state"].items()
    }
    return {**state_dict, "state": shown}


def restore(target: Tensor, value: Tensor) -> None:
    """Give a quantised `target` the codes that its `value`, a dequantised one, had."""
    if not isinstance(target, ShardTensor) or not isinstance(value, ShardTensor):
        return
    own, given = target._local, value._local
    cut_alike = target._shard_spec == value._shard_spec
    if cut_alike and isinstance(own, BlockState) and not isinstance(given, BlockState):
        own.restore(given)


@torch.no_grad()
def _quantise_again(optimizer: Optimizer) -> None:
    """Quantise the loaded state, after `load_state_dict` or before the optimizer's first step."""
    for param, state in optimizer.state.items():
        if not isinstance(param, ShardTensor):
            continue
        for name, value in state.items():
            if not isinstance(value, ShardTensor) or isinstance(value._local, BlockState):
                continue
            made = _zeros(cast(compat.QuantisingOptimizer, optimizer), param, name == "exp_avg")
            state[name] = made.copy_(value)
            restore(made, value)


def _shard_state(optimizer: Optimizer, *_: object) -> None:
    """Shard the state that a torchao optimizer keeps for sharded parameters."""
    if not compat.quantises_state(optimizer):
        return
    if any(isinstance(param, ShardTensor) for param in compat.params_of(optimizer)):
        compat.replace_new_buffer(_making_shards)
        _quantise_again(optimizer)
        optimizer.register_state_dict_post_hook(_show_values)
        optimizer.register_load_state_dict_post_hook(_quantise_again)


def shard_quantised_state() -> None:
    """Shard the state of each torchao optimizer, from the optimizer's first step on."""
    before_steps.call(Turn.QUANTISED, _shard_state, once=True, compiled=True)
