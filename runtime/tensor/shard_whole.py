"""Ops run on gathered whole tensors, and their writes go back to the parts.

The result is plain, and every rank has it. A view that is no interval (`p.t()`, `p[:, 1]`) is a
`WholeView`: a view of the gathered value that refers to the parameter. A write to the view reaches
the parameter. After an update of the parameter, the view gathers the value again.

Left out: ops on process groups, random ops (ranks could draw different values), and tracing.
"""

from functools import partial
from typing import Any, SupportsIndex

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from shardc.runtime import compat
from shardc.runtime.tensor.shard_gathers import (
    NEEDS_WHOLE,
    expect_plain_gradient,
    gathered,
    plain,
    refuse,
)
from shardc.runtime.tensor.shard_operands import store, written_operands
from shardc.runtime.tensor.sharded import Sharded

_OF_GROUPS = ("c10d", "_c10d", "shardc", "symm_mem")
"""Prefixes of the namespaces of ops that send their operands to other ranks."""


def run_whole(func: compat.Op, args: compat.Args, kwargs: compat.Kwargs) -> object:
    """Run `func` on whole tensors. Every rank that holds a part must make this call.

    Raises:
        NotImplementedError: `gathered` refuses the op, the op is random or is on process groups, or
            it would change the shape or dtype of a tensor that it writes to.
    """
    if func.namespace.startswith(_OF_GROUPS) or torch.Tag.nondeterministic_seeded in func.tags:
        refuse(func)
    if _is_view(func):
        return view_whole(func, args, kwargs)
    held: dict[int, tuple[Sharded, Tensor]] = {}

    def whole(value: Tensor) -> Tensor:
        if not isinstance(value, Sharded):
            return plain(func, value)
        if id(value) not in held:
            expect_plain_gradient(value)
            held[id(value)] = value, gathered(func, value)
        return held[id(value)][1]

    values, named = tree_map_only(Tensor, whole, (args, kwargs))
    result = func(*values, **named)
    for target in _written(func, args, kwargs):
        if isinstance(target, Sharded):
            full = held[id(target)][1]
            if (full.shape, full.dtype) != (target.shape, target.dtype):
                refuse(func, "its segment has room for its shape only")
            store(target, full)
    targets = {id(full): target for target, full in held.values()}
    return tree_map_only(Tensor, lambda value: targets.get(id(value), value), result)


def view_whole(
    func: compat.Op, args: compat.Args, kwargs: compat.Kwargs, why: str = NEEDS_WHOLE
) -> object:
    """Make one or several views that are no intervals."""
    source: Sharded = args[0]
    expect_plain_gradient(source)
    base = gathered(func, source, why)
    views = func(base, *args[1:], **kwargs)
    return tree_map_only(Tensor, lambda view: WholeView(source, base, view), views)


def _is_view(func: compat.Op) -> bool:
    """Whether `func` returns only views of its first operand, and writes to nothing."""
    returned = [result.alias_info for result in func._schema.returns]
    return bool(returned) and all(info is not None and not info.is_write for info in returned)


def _written(func: compat.Op, args: compat.Args, kwargs: compat.Kwargs) -> list[Tensor]:
    """The tensors that `func` writes to."""
    found: list[Tensor] = []
    for key in written_operands(func):
        value = kwargs.get(key) if isinstance(key, str) else args[key] if key < len(args) else None
        listed = value if isinstance(value, (list, tuple)) else [value]
        found += [x for x in listed if isinstance(x, Tensor)]
    return found


class WholeView(Tensor):
    """A view of a gathered ShardTensor; writes to it reach the ShardTensor's parts."""

    _source: Sharded
    _gathered: Tensor
    _whole: Tensor
    _seen: int

    __torch_function__ = compat.NO_TORCH_FUNCTION  # type: ignore[assignment]

    @staticmethod
    def __new__(cls, source: Sharded, base: Tensor, whole: Tensor) -> "WholeView":
        """Wrap `whole`, a view of `base`, which was gathered from `source`."""
        self: WholeView = compat.make_wrapper_of_view(cls, whole)  # type: ignore[assignment]
        self._source, self._gathered, self._whole = source, base, whole
        self._seen = source._local._version
        return self

    def _current(self, func: compat.Op) -> Tensor:
        """The plain view; the value is gathered again if the source was updated."""
        if self._source._local._version != self._seen:
            self._gathered.copy_(gathered(func, self._source))
            self._seen = self._source._local._version
        return self._whole

    def _write_back(self) -> None:
        store(self._source, self._gathered)
        self._seen = self._source._local._version

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls,
        func: compat.Op,
        types: object,
        args: compat.Args = (),
        kwargs: compat.Kwargs | None = None,
    ) -> object:
        held: dict[int, WholeView] = {}

        def plain(value: Tensor) -> Tensor:
            if not isinstance(value, WholeView):
                return value
            held[id(whole := value._current(func))] = value
            return whole

        values, named = tree_map_only(Tensor, plain, (args, kwargs or {}))
        result = func(*values, **named)
        for target in _written(func, args, kwargs or {}):
            if isinstance(target, WholeView):
                target._write_back()
        if _is_view(func):
            source = args[0]
            made = partial(WholeView, source._source, source._gathered)
            return tree_map_only(Tensor, made, result)
        return tree_map_only(Tensor, lambda x: held.get(id(x), x), result)

    def numpy(self, *, force: bool = False) -> Any:
        """A copy of the values as an array; a write to the array does not reach the parameter."""
        return self.clone().numpy(force=force)

    def tolist(self) -> list[object]:
        """The values as a list, as of a plain tensor."""
        return self.clone().tolist()

    def __repr__(self, *, tensor_contents: object = None) -> str:  # type: ignore[override]
        return repr(self.detach().clone())

    def __deepcopy__(self, memo: dict[int, object]) -> Tensor:
        return self.detach().clone()

    def __reduce_ex__(self, protocol: SupportsIndex) -> str | tuple[object, ...]:
        return self.detach().clone().__reduce_ex__(protocol)
