"""A WholeValue holds a statistic of sharded tensors, plain and equal on all ranks.

Code for DTensors calls `.full_tensor()` on the result of `clip_grad_norm_` or `param.norm()`, one
number; here the call gives the value itself. In a backward, each rank has the gradient of its own
loss. These gradients are averaged where the value is first used, before any formula spreads them
over the parts. Left out: `to_local`. It would give a rank's share, for ranks to add up.
"""

from collections.abc import Callable, Sequence
from typing import SupportsIndex

import torch
from torch import Tensor
from torch.distributed.tensor import Placement

from shardc.runtime import compat
from shardc.runtime.tensor.shard_spec import ShardSpec, over_ranks


class WholeValue(Tensor):
    """A plain tensor with `full_tensor()`; 0-dim results of ops on WholeValues are WholeValues."""

    _spec_of_ranks: ShardSpec | None = None
    """The spec over which the gradient is still to be averaged; None if there is nothing to do."""

    def full_tensor(self, *, grad_placements: Sequence[Placement] | None = None) -> Tensor:
        """The value, plain: every rank has it."""
        _average_gradient(self)
        return compat.as_plain(self)

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., object],
        types: Sequence[type],
        args: compat.Args = (),
        kwargs: compat.Kwargs | None = None,
    ) -> object:
        values = [*args, *(kwargs or {}).values()]
        listed = [x for value in values if isinstance(value, (list, tuple)) for x in value]
        for value in (*values, *listed):
            if type(value) is WholeValue:
                _average_gradient(value)
        with compat.without_functions_of_subclasses():
            result = func(*args, **(kwargs or {}))
        if type(result) is not Tensor or any(type(value) is Tensor for value in values):
            return result  # a list may have a plain tensor, such as an ignored norm
        stays = not result.dim() or func in (torch.stack, Tensor.detach)
        return result.as_subclass(cls) if stays else result

    @property
    def _is_param(self) -> bool:
        return False

    @_is_param.setter
    def _is_param(self, flag: bool) -> None:
        """Make the value an ordinary parameter; `nn.Parameter(value)` sets this flag."""
        compat.become_parameter(self)

    def __repr__(self, *, tensor_contents: object = None) -> str:  # type: ignore[override]
        return repr(compat.as_plain(self))

    def __format__(self, format_spec: str) -> str:
        return format(compat.as_plain(self), format_spec)

    def __deepcopy__(self, memo: dict[int, object]) -> Tensor:
        return compat.as_plain(self).detach().clone()

    def __reduce_ex__(self, protocol: SupportsIndex) -> str | tuple[object, ...]:
        return compat.as_plain(self).__reduce_ex__(protocol)


def _average_gradient(value: WholeValue) -> None:
    spec, value._spec_of_ranks = value._spec_of_ranks, None
    if spec is not None and value.requires_grad:
        value.register_hook(lambda grad: over_ranks(grad, spec))


def as_whole(value: Tensor, spec: ShardSpec, trained: bool) -> Tensor:
    """Make a statistic of tensors with a spec a WholeValue; `trained`: a gradient may flow back."""
    if type(value) is not Tensor or (value.dim() and not trained):  # while tracing
        return value
    whole: WholeValue = compat.as_class(value, WholeValue)
    if trained:
        whole._spec_of_ranks = spec
    return whole
