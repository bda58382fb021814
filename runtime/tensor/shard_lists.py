"""List ops run on the local parts of ShardTensors: `_foreach_*` and the fused optimizers.

The entries i of all lists belong together, and are cut like the first sharded entry i. An entry may
be plain (an ignored parameter, a step counter) or sharded.
"""

from collections.abc import Sequence
from itertools import zip_longest

from torch import Tensor

from shardc.runtime import compat
from shardc.runtime.comm.collectives import all_reduce
from shardc.runtime.tensor.shard_gathers import refuse
from shardc.runtime.tensor.shard_operands import (
    PLAIN_TARGET,
    NeedsWhole,
    as_shard,
    bump,
    local_part,
    written_operands,
)
from shardc.runtime.tensor.sharded import Sharded

_FUSED = {"_fused_adagrad_", "_fused_adam_", "_fused_adamw_", "_fused_sgd_"}
_UNSCALE = "_amp_foreach_non_finite_check_and_unscale_"
_GRADS = 1
"""The argument with a fused optimizer's gradients, which the op unscales in place. Of a whole
gradient, the op unscales this rank's part."""
_NOT_ELEMENTWISE = {"_foreach_max", "_foreach_mm", "_foreach_norm", "_foreach_powsum"}

Refs = list[Sharded | None]


def is_list_op(func: compat.Op, name: str) -> bool:
    """Whether `func` works on lists, entry by entry and elementwise."""
    if name.startswith("_foreach_"):
        return name not in _NOT_ELEMENTWISE and "out" not in func._overloadname
    return name in _FUSED or name == _UNSCALE


def run_lists(func: compat.Op, args: compat.Args, kwargs: compat.Kwargs) -> list[Tensor] | None:
    """Run `func` on the local parts of the entries of its lists."""
    name, like = func._schema.name.removeprefix("aten::"), _first_shards(args)
    if any(isinstance(arg, Sharded) for arg in (*args, *kwargs.values())):
        refuse(func, "a list cannot be combined with one sharded tensor")
    written: list[Tensor] = []
    for index in written_operands(func):
        assert isinstance(index, int)
        if isinstance(args[index], (list, tuple)):
            _note_written(func, args[index], like, written, index == _GRADS and name in _FUSED)
    try:
        parts = [_parts(func, arg, like) if _is_list(arg) else arg for arg in args]
    except NeedsWhole as error:
        refuse(func, str(error))
    result = func(*parts, **kwargs)
    bump(written)
    if name == _UNSCALE:  # all ranks skip the step if one rank has a non-finite gradient
        specs = [ref._shard_spec for ref in like if ref is not None]
        for group in dict.fromkeys(group for spec in specs for group in spec.groups):
            args[1].copy_(all_reduce(args[1], "max", group))
    if result is None:
        return None
    return [
        out if ref is None else as_shard(func, out, ref)
        for out, ref in zip(result, like, strict=True)
    ]


def _is_list(arg: object) -> bool:
    return isinstance(arg, (list, tuple)) and len(arg) > 0 and isinstance(arg[0], Tensor)


def _first_shards(args: compat.Args) -> Refs:
    """The first ShardTensor at each index of the lists; None where all entries are plain."""
    lists = [arg for arg in args if _is_list(arg)]
    if all(isinstance(item, Sharded) for item in lists[0]):
        return list(lists[0])
    return [
        next((item for item in items if isinstance(item, Sharded)), None)
        for items in zip_longest(*lists)
    ]


def _parts(func: compat.Op, items: Sequence[Tensor], like: Refs) -> list[Tensor]:
    return [
        item if ref is None else ref._local if item is ref else local_part(func, item, ref)
        for item, ref in zip(items, like, strict=True)
    ]


def _note_written(
    func: compat.Op, items: Sequence[Tensor], like: Refs, written: list[Tensor], may_be_whole: bool
) -> None:
    for item, ref in zip(items, like, strict=False):  # an empty list: a state that is not used
        if ref is None:
            continue
        if isinstance(item, Sharded):
            written.append(item._local)
        elif not may_be_whole and not _is_step(func, item):
            refuse(func, PLAIN_TARGET)


def _is_step(func: compat.Op, item: Tensor) -> bool:
    """Whether `item` is a step counter, which `func` writes by its schema."""
    return func._schema.name == "aten::_fused_adagrad_" and not item.dim()
