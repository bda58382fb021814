"""A statistic of a whole tensor, of all elements or along dims, takes one small collective.

An interval of a flattened n-d tensor is up to 2n-1 rectangles (`interval_boxes`). Each rectangle is
reduced along the dims and merged into a tensor of the result's size. One all-reduce then merges the
tensors of all ranks. (A variance takes two all-reduces: of the mean, and of the squared distances
from the mean.) Sums are accumulated in fp64 or int64, so that the result is right to the last digit
of its dtype.

Left out: statistics that need all values at once (median, sort, prod); their operands are gathered.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from shardc.runtime import compat
from shardc.runtime.comm.collectives import all_reduce
from shardc.runtime.tensor import shard_norms
from shardc.runtime.tensor.shard_gathers import expect_plain_gradient, plain
from shardc.runtime.tensor.shard_operands import interval_like
from shardc.runtime.tensor.shard_whole import run_whole
from shardc.runtime.tensor.sharded import Sharded
from shardc.runtime.tensor.whole_value import as_whole

Over = Literal["sum", "max", "min"]
Index = tuple[slice, ...]


@dataclass(frozen=True)
class Statistic:
    """A statistic as one reduction: along dims, over the rectangles of a rank, and over ranks.

    Attributes:
        values: gives the values to reduce, from the elements of a rectangle.
        over: the reduction.
        finish: gives the result, from the reduced values and the number of elements in each.
    """

    values: Callable[[Tensor], Tensor]
    over: Over = "sum"
    finish: Callable[[Tensor, int], Tensor] = lambda reduced, count: reduced


def _is_set(part: Tensor) -> Tensor:
    return (part != 0).to(torch.int32)


def _widened(part: Tensor) -> Tensor:
    """A part in the dtype in which it is reduced."""
    if part.is_complex():
        return part.to(torch.complex128)
    return part.to(torch.float64 if part.is_floating_point() else torch.int64)


_MAX, _MIN = Statistic(_widened, "max"), Statistic(_widened, "min")
_STATISTICS: dict[str, Statistic] = {
    "sum": Statistic(_widened),
    "mean": Statistic(_widened, finish=lambda reduced, count: reduced / count),
    "count_nonzero": Statistic(_is_set),
    "any": Statistic(_is_set, "max"),
    "all": Statistic(_is_set, "min"),
    "amax": _MAX,
    "amin": _MIN,
    "max": _MAX,
    "min": _MIN,
}
_NORMS = ("linalg_vector_norm", "norm")
_SPREADS = ("var", "std")


def is_known(func: compat.Op, name: str) -> bool:
    """Whether `run_statistic` knows the op; `max` along a dim gives indices, of all values."""
    if func._overloadname.endswith("out") or "names" in func._overloadname:
        return False
    if name in ("max", "min"):
        return func._overloadname == "default"
    if name in _SPREADS:
        return func._overloadname == "correction"
    return name in _STATISTICS or name in _NORMS or name == "equal"


def run_statistic(func: compat.Op, args: compat.Args, kwargs: compat.Kwargs) -> object:
    """Run `func`: all ranks get one result. Every rank that holds a part must make this call."""
    tensor, name = args[0], func._schema.name.removeprefix("aten::")
    if name == "equal":
        return _equal(func, args, kwargs)
    named = {
        argument.name: value
        for argument, value in zip(func._schema.arguments, args, strict=False)
    } | kwargs  # fmt: skip
    dims = _dims_of(tensor, named)
    expect_plain_gradient(tensor, "own")
    if name in _NORMS and len(dims) == tensor.dim() and not named.get("keepdim"):
        return shard_norms.norm(tensor, _order(named), named.get("dtype"))
    if not tensor.numel():
        return run_whole(func, args, kwargs)  # without a message: no rank has an element
    like = func(torch.empty(tensor.shape, dtype=tensor.dtype, device="meta"), *args[1:], **kwargs)
    if name in _SPREADS:
        value = _variance(tensor, dims, named)
        value = value.sqrt() if name == "std" else value
    else:
        known = _norm_of_order(_order(named)) if name in _NORMS else _STATISTICS[name]
        count = math.prod(tensor.shape[dim] for dim in dims)
        value = known.finish(_reduced(tensor, dims, known), count)
    trained = torch.is_grad_enabled() and tensor.requires_grad
    return as_whole(value.to(like.dtype).reshape(like.shape), tensor._shard_spec, trained)


def _dims_of(tensor: Tensor, named: compat.Kwargs) -> list[int]:
    """The dims to reduce: the named dims, or all dims if none is named."""
    dim = named.get("dim")
    listed = [dim] if isinstance(dim, int) else list(dim or range(tensor.dim()))
    return [d % max(1, tensor.dim()) for d in listed if tensor.dim()]


def _order(named: compat.Kwargs) -> float:
    order = named.get("ord", named.get("p", 2))
    return 2.0 if order is None else float(order)


def _norm_of_order(order: float) -> Statistic:
    """The statistic of a norm: a sum of p-th powers, a count, or an extremum."""

    def sizes(part: Tensor) -> Tensor:
        return _widened(part.abs()).to(torch.float64)

    if math.isinf(order):
        return Statistic(sizes, "max" if order > 0 else "min")
    if order == 0:
        return Statistic(_is_set)
    return Statistic(
        lambda part: sizes(part).pow(order), finish=lambda reduced, count: reduced ** (1 / order)
    )


# -- reducing ------------------------------------------------------------------------------------


def _reduced(tensor: Sharded, dims: list[int], known: Statistic) -> Tensor:
    """Reduce the values of all ranks; a reduced dim keeps size 1."""
    return _over_rectangles(tensor, dims, lambda part, where: known.values(part), known.over)


def _over_rectangles(
    tensor: Sharded, dims: list[int], values: Callable[[Tensor, Index], Tensor], over: Over
) -> Tensor:
    """Reduce the values of all rectangles; `values` also gets a rectangle's place in the result."""

    def along_dims(part: Tensor, where: Index) -> Tensor:
        return _ALONG_DIMS[over](values(part, where), dims, keepdim=True)

    local, at = tensor._local, 0
    shape = [1 if dim in dims else size for dim, size in enumerate(tensor.shape)]
    sample = along_dims(local.new_zeros([1] * tensor.dim()), tuple(slice(0, 1) for _ in shape))
    total = torch.full(shape, _start(over, sample.dtype), dtype=sample.dtype, device=local.device)
    for box in tensor._boxes():
        part, at = local[at : at + box.numel].view(box.sizes), at + box.numel
        if not box.numel:
            continue
        where = tuple(
            slice(0, 1) if dim in dims else slice(start, start + size)
            for dim, (start, size) in enumerate(zip(box.offsets, box.sizes, strict=True))
        )
        total[where] = _MERGE[over](total[where], along_dims(part, where))
    for group in tensor._shard_spec.groups:
        total = _over_ranks(total, over, group)
    return total


_ALONG_DIMS: dict[str, Callable[..., Tensor]] = {
    "sum": Tensor.sum, "max": Tensor.amax, "min": Tensor.amin,
}  # fmt: skip
_MERGE: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "sum": torch.add, "max": torch.maximum, "min": torch.minimum,
}  # fmt: skip


def _start(over: Over, dtype: torch.dtype) -> float | int:
    if over == "sum":
        return 0
    if dtype.is_floating_point:
        return -math.inf if over == "max" else math.inf
    return torch.iinfo(dtype).min if over == "max" else torch.iinfo(dtype).max


def _over_ranks(value: Tensor, over: Over, group: str) -> Tensor:
    flat = value.reshape(-1)
    if value.is_complex():
        return torch.view_as_complex(all_reduce(torch.view_as_real(flat), over, group)).view(
            value.shape
        )
    if over == "sum" or not value.is_floating_point():
        return all_reduce(flat, over, group).view(value.shape)
    return shard_norms.extremum(flat, 1.0 if over == "max" else -1.0, group).view(value.shape)


# -- statistics with more than one round, or of two tensors --------------------------------------


def _variance(tensor: Sharded, dims: list[int], named: compat.Kwargs) -> Tensor:
    count = math.prod(tensor.shape[dim] for dim in dims)
    mean = _reduced(tensor, dims, _STATISTICS["sum"]) / count

    def squares(part: Tensor, where: Index) -> Tensor:
        return (_widened(part) - mean[where]).abs().square()

    correction = named.get("correction", 1)
    divisor = max(0.0, count - float(1 if correction is None else correction))
    return _over_rectangles(tensor, dims, squares, "sum") / divisor


def _equal(func: compat.Op, args: compat.Args, kwargs: compat.Kwargs) -> object:
    a, b = (plain(func, operand) for operand in args)
    if a.shape != b.shape:
        return False
    like: Sharded = next(x for x in (a, b) if isinstance(x, Sharded))
    shards = [x for x in (a, b) if isinstance(x, Sharded)]
    if type(like._local) is not Tensor or any(x._shard_spec != like._shard_spec for x in shards):
        return run_whole(func, args, kwargs)
    a, b = (x._local if isinstance(x, Sharded) else interval_like(x, like) for x in (a, b))
    same = torch.tensor(func(a, b), dtype=torch.int32, device=like.device)
    for group in like._shard_spec.groups:
        same = all_reduce(same, "min", group)
    return bool(same)
