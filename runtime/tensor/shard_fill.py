"""Initialisers, random methods and assignments to parts fill a ShardTensor in place.

An op that draws or computes whole values runs on a temporary full tensor, and this rank keeps its
interval. The temporary needs the memory of one full parameter for a moment. The values and the
generator state are exactly equal to the unsharded run's.
"""

import torch
from torch import Tensor

from shardc.runtime import compat
from shardc.runtime.tensor.shard_gathers import refuse
from shardc.runtime.tensor.shard_operands import bump, empty_full, has_shards, interval_like, store
from shardc.runtime.tensor.sharded import Sharded

RANDOM: tuple[str, ...] = (
    "bernoulli_", "cauchy_", "exponential_", "geometric_", "log_normal_", "normal_", "random_",
    "uniform_",
)  # fmt: skip
RANDOM_LIKE: tuple[str, ...] = ("rand_like", "randint_like", "randn_like")


def draw_in_place(func: compat.Op, args: compat.Args, kwargs: compat.Kwargs) -> Sharded:
    """Run `tensor.normal_()`, or another op of `RANDOM`."""
    target = args[0]
    if not isinstance(target, Sharded) or has_shards(args[1:]):
        refuse(func)
    store(target, func(empty_full(target), *args[1:], **kwargs))
    return target


def draw_like(func: compat.Op, args: compat.Args, kwargs: compat.Kwargs) -> Sharded:
    """Run `torch.randn_like`, or another op of `RANDOM_LIKE`."""
    like: Sharded = args[0]
    if not isinstance(like, Sharded) or "out" in kwargs:
        refuse(func)
    full = func(empty_full(like), *args[1:], **kwargs)
    return Sharded.make(interval_like(full, like).clone(), like.shape, like._shard_spec)


def fill_out(func: compat.Op, args: compat.Args, kwargs: compat.Kwargs) -> Sharded:
    """Run an op on plain tensors that only writes to a sharded `out` (`torch.eye`)."""
    target = kwargs["out"]
    others = [*args, *(value for key, value in kwargs.items() if key != "out")]
    if not isinstance(target, Sharded) or has_shards(others):
        refuse(func)
    full = func(*args, **{**kwargs, "out": empty_full(target)})
    if full.shape != target.shape:
        refuse(func, f"its result has shape {tuple(full.shape)}, `out` has {tuple(target.shape)}")
    store(target, full)
    return target


def set_items(target: Sharded, index: compat.Index, value: Tensor | complex) -> None:
    """Assign `target[index] = value` without communication: every rank has the value.

    Memory and time grow with the number of elements that `index` selects, not with `target`.
    """
    if isinstance(value, Sharded):
        raise NotImplementedError("assigning a ShardTensor to a part of another is not supported")
    if isinstance(index, Sharded):  # a mask, as Rprop makes it
        if isinstance(value, Tensor) and value.numel() != 1:
            raise NotImplementedError("only one value can be assigned where a sharded mask is set")
        target.masked_fill_(index, value)
    elif type(index) is int or (isinstance(index, slice) and index.step in (None, 1)):
        rows = target[index]
        rows.copy_(torch.as_tensor(value, dtype=rows.dtype, device=rows.device).expand(rows.shape))
    else:
        _scatter(target, index, value)


def _scatter(target: Sharded, index: compat.Index, value: Tensor | complex) -> None:
    if torch.is_grad_enabled() and target.requires_grad:
        raise RuntimeError("assigning to parts of a parameter needs torch.no_grad()")
    if target._shard_spec.tp is not None:
        raise NotImplementedError(
            "assigning to parts of a parameter that is also cut by tensor parallelism is not "
            "supported: param.copy_(full_tensor) writes all of it"
        )
    flat = _flat_positions(target.shape, index)
    start, stop = target._shard_spec.interval()
    held = (flat >= start) & (flat < stop)
    values = torch.as_tensor(value, dtype=target.dtype, device=flat.device)
    if values.dim() > flat.dim():  # drop leading dims of size 1, as torch does
        values = values.reshape(values.shape[values.dim() - flat.dim() :])
    target._local[flat[held] - start] = values.expand(flat.shape)[held].to(target.device)
    bump([target._local])


def _flat_positions(shape: torch.Size, index: compat.Index) -> Tensor:
    """The places of the elements of `tensor[index]` in the flattened tensor, in the same shape."""
    positions, stride = torch.zeros((), dtype=torch.int64), 1
    for dim in reversed(range(len(shape))):
        along = torch.arange(shape[dim]).view(-1, *[1] * (len(shape) - dim - 1)).expand(shape)
        positions = positions + along[index] * stride  # a view of shape[dim] elements
        stride *= shape[dim]
    return positions
