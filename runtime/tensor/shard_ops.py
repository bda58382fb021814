"""Ops on ShardTensors follow one table, a few rules, and a refusal for the rest.

Elementwise ops (`torch.Tag.pointwise`) and list ops (`shard_lists`) run on the local parts. One
all-reduce finishes norms and other statistics (`shard_norms`, `shard_stats`). An op that fills a
tensor in place runs on a temporary full tensor, and the rank keeps its interval (`shard_fill`). A
view of consecutive elements is the same interval under another shape, or a part of the interval.
Any other op runs on gathered tensors (`shard_whole`), or is refused (`shardc.strict`).

The rule of an op is looked up once and cached: an optimizer step calls hundreds of ops.
"""

from collections.abc import Callable
from functools import cache

import torch
from torch import Tensor

from shardc.runtime import compat
from shardc.runtime.tensor import shard_fill, shard_lists, shard_norms, shard_stats
from shardc.runtime.tensor.shard_gathers import gather_counts, refuse
from shardc.runtime.tensor.shard_operands import (
    PLAIN_TARGET,
    NeedsWhole,
    as_shard,
    bump,
    has_shards,
    local_part,
    view_local,
    written_operands,
)
from shardc.runtime.tensor.shard_whole import run_whole, view_whole
from shardc.runtime.tensor.sharded import Sharded

aten = torch.ops.aten
Rule = Callable[[compat.Op, compat.Args, compat.Kwargs], object]

_ELEMENTWISE = {
    "_to_copy", "copy_", "empty_like", "fill", "fill_", "full_like", "masked_fill", "masked_fill_",
    "ones_like", "threshold_", "zero_", "zeros_like", "_pin_memory",
}  # fmt: skip
"""Elementwise ops without the tag. In-place ops (`eq_`) have no tag either: the tag of `eq` counts.
"""
_VIEWS = {
    "_unsafe_view", "expand", "permute", "reshape", "select", "slice", "split", "split_with_sizes",
    "squeeze", "t", "transpose", "unbind", "unsqueeze", "view",
}  # fmt: skip
_NEW = {"new_empty", "new_empty_strided", "new_full", "new_ones", "new_zeros"}


@cache
def rule_of(func: compat.Op) -> Rule:
    """The rule of an op: the function that runs `func`.

    The rule raises NotImplementedError if the op, or its mix of operands, cannot run on parts.
    """
    if not hasattr(func, "_schema"):  # a higher-order op
        return _refuse
    name = func._schema.name.removeprefix("aten::")
    if name in _TABLE:
        return _TABLE[name]
    if shard_stats.is_known(func, name):
        return shard_stats.run_statistic
    if shard_lists.is_list_op(func, name):
        return shard_lists.run_lists
    if torch.Tag.nondeterministic_seeded in func.tags:
        return shard_fill.fill_out if "out" in written_operands(func) else _refuse
    if name in _ELEMENTWISE or _is_pointwise(func, name):
        return run_elementwise
    return _fill_out if "out" in written_operands(func) else run_whole


def _fill_out(func: compat.Op, args: compat.Args, kwargs: compat.Kwargs) -> object:
    """Run an op that writes to `out`, on whole tensors if another operand is sharded."""
    if gather_counts.strict or not has_shards(args):
        return shard_fill.fill_out(func, args, kwargs)
    return run_whole(func, args, kwargs)


def _is_pointwise(func: compat.Op, name: str) -> bool:
    """Whether `func` has the tag `pointwise`, or is the in-place form of an op with the tag."""
    if not all(str(result.type) == "Tensor" for result in func._schema.returns):
        return False  # aten.equal is tagged pointwise, and gives a bool
    if torch.Tag.pointwise in func.tags:
        return True
    functional = getattr(getattr(aten, name.removesuffix("_"), None), func._overloadname, None)
    return functional is not None and torch.Tag.pointwise in functional.tags


def _refuse(func: compat.Op, args: compat.Args, kwargs: compat.Kwargs) -> object:
    refuse(func)


def run_elementwise(func: compat.Op, args: compat.Args, kwargs: compat.Kwargs) -> object:
    """Run `func` on the local parts, or on whole tensors if the parts do not fit together."""
    like = args[0] if args else None
    if not isinstance(like, Sharded):
        like = next((x for x in (*args, *kwargs.values()) if isinstance(x, Sharded)), None)
        if like is None:
            refuse(func)
    written = [args[key] if isinstance(key, int) else kwargs[key] for key in written_operands(func)]
    if not all(isinstance(target, Sharded) for target in written):
        return _run_whole(func, args, kwargs, PLAIN_TARGET)
    try:
        parts = [local_part(func, x, like) if isinstance(x, Tensor) else x for x in args]
        named = {
            key: local_part(func, x, like) if isinstance(x, Tensor) else x
            for key, x in kwargs.items()
            if key != "memory_format"  # a format of the full shape; the local part is 1-D
        }
    except NeedsWhole as error:
        return _run_whole(func, args, kwargs, str(error))
    result = func(*parts, **named)
    if written:
        bump([target._local for target in written])
        return written[0] if len(written) == 1 else tuple(written)
    if isinstance(result, Tensor):
        return as_shard(func, result, like)
    return tuple(as_shard(func, part, like) for part in result)


def _run_whole(func: compat.Op, args: compat.Args, kwargs: compat.Kwargs, why: str) -> object:
    if gather_counts.strict:
        refuse(func, why)
    return run_whole(func, args, kwargs)


# -- views and new tensors ------------------------------------------------------------------------


def _detach(func: compat.Op, args: compat.Args, kwargs: compat.Kwargs) -> Sharded:
    source: Sharded = args[0]
    return Sharded.make(source._local, source.shape, source._shard_spec)


def _view(func: compat.Op, args: compat.Args, kwargs: compat.Kwargs) -> object:
    """View consecutive elements: a part of the interval, under the view's shape.

    The same view of a tensor without data shows the elements that it takes: `p[3]`, `p[2:5]`,
    `p.view(-1)` and the pieces of `p.chunk(3)` are contiguous, a transposed matrix is not.
    """
    source: Sharded = args[0]
    if func is aten.view.dtype:
        return view_whole(func, args, kwargs)
    views = func(torch.empty(source.shape, device="meta"), *args[1:], **kwargs)
    listed = [views] if isinstance(views, Tensor) else views
    if not all(view.is_contiguous() for view in listed):
        return view_whole(func, args, kwargs, "it takes elements that are not consecutive")
    if source._shard_spec.tp is not None and any(view.shape != source.shape for view in listed):
        return view_whole(func, args, kwargs, _PLACED)
    intervals = [_interval_of(source, view) for view in listed]
    return intervals[0] if isinstance(views, Tensor) else intervals


def _interval_of(source: Sharded, view: Tensor) -> Sharded:
    if view.numel() == source.numel():
        return Sharded.make(source._local, view.shape, source._shard_spec)
    start = int(view.storage_offset()) if view.numel() else 0
    spec = source._shard_spec.narrowed(start, view.numel())
    start, stop = spec.interval()
    held, _ = source._shard_spec.interval()
    first = spec.offset - source._shard_spec.offset + start - held if stop > start else 0
    part = view_local(source._local, lambda local: local[first : first + stop - start])
    return Sharded.make(part, view.shape, spec)


_PLACED = "it is also cut by tensor parallelism, so its parts have another shape"


def _view_as_real(func: compat.Op, args: compat.Args, kwargs: compat.Kwargs) -> object:
    source: Sharded = args[0]
    if source._shard_spec.tp is not None:
        return view_whole(func, args, kwargs, _PLACED)
    part = view_local(source._local, lambda local: torch.view_as_real(local).view(-1))
    return Sharded.make(part, (*source.shape, 2), source._shard_spec.doubled())


def _new(func: compat.Op, args: compat.Args, kwargs: compat.Kwargs) -> Tensor:
    """Run `new_*`: a result of the same shape gets the same spec, another result is plain.

    `p.new_empty(p.shape)` is plain too: `orthogonal_` draws into it and needs the whole value.
    With a device it is sharded: `dcp.async_save` makes copies with a device.
    """
    source, size = args[0], tuple(args[1])
    local = source._local
    if func is aten.new_empty_strided.default:
        func, args = aten.new_empty.default, args[:2]
    if size != source.shape or (func is aten.new_empty.default and "device" not in kwargs):
        plain: Tensor = func(local, size, *args[2:], **kwargs)
        return plain
    return Sharded.make(func(local, [local.numel()], *args[2:], **kwargs), size, source._shard_spec)


_TABLE: dict[str, Rule] = {
    "alias": _detach,
    "detach": _detach,
    "detach_": lambda func, args, kwargs: args[0],  # autograd has detached it
    "is_pinned": lambda func, args, kwargs: func(args[0]._local, *args[1:], **kwargs),
    "view_as_real": _view_as_real,
    **dict.fromkeys(_VIEWS, _view),
    **dict.fromkeys(_NEW, _new),
    **dict.fromkeys(shard_fill.RANDOM, shard_fill.draw_in_place),
    **dict.fromkeys(shard_fill.RANDOM_LIKE, shard_fill.draw_like),
    "_foreach_norm": shard_norms.foreach_norm,
}
