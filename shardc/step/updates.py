"""Updates of a recorded step: each call of `optimizer.step()`, with its ops or as one call."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor
from torch.fx import Node
from torch.optim import Optimizer
from torch.utils._pytree import tree_leaves

from shardc.runtime import compat
from shardc.step.values import over

SCALING = ("grad_scale", "found_inf")
"""The attributes that a `GradScaler` sets on a fused optimizer."""


@dataclass(frozen=True)
class Given:
    """An argument of an op, by its place among the leaves of all arguments."""

    place: int


@dataclass(frozen=True)
class Op:
    """One op of an update.

    Attributes:
        func: the op.
        node: its node; None for an op that the host runs before each call of the graph.
        constants: its arguments that are neither tensors nor numbers, in order.
        numbers: its arguments that are inputs of the graph, read anew in each call, by their places
            among the leaves of all arguments.
        results: its results without memory; `Given` in place of a result that is an argument.
    """

    func: compat.Op
    node: Node | None
    constants: tuple[object, ...] = ()
    numbers: tuple[int, ...] = ()
    results: object = None


@dataclass
class Update:
    """One call of `optimizer.step()`.

    Attributes:
        optimizer: the optimizer.
        grads: its parameters that had a gradient, each with the gradient, without memory.
        scaling: the attributes that a `GradScaler` sets on a fused optimizer, without memory.
        ops: its ops, in order.
        is_call: whether the graph calls `optimizer.step()`, and has none of the ops.
    """

    optimizer: Optimizer
    grads: list[tuple[Tensor, Tensor]] = field(default_factory=list)
    scaling: dict[str, object] = field(default_factory=dict)
    ops: list[Op] = field(default_factory=list)
    is_call: bool = False

    def has_count(self, value: Tensor) -> bool:
        """Whether a tensor is a step count: a number on the host, in the optimizer's state."""
        storage = value.untyped_storage()._cdata
        return any(
            isinstance(own, Tensor) and compat.storage_id(own) == storage
            for state in self.optimizer.state.values()
            for own in state.values()
        )


Settings = list[dict[str, object]]
FRESH: dict[type, Callable[[Any], object]] = {float: lambda v: v * 1.0, tuple: lambda v: (*v,)}
"""Types of settings of which an equal object can be made, and how."""


def group_settings(optimizer: Optimizer) -> Settings:
    """The settings of each parameter group that are no tensors."""
    return [
        {
            name: list(value) if isinstance(value, list) else value
            for name, value in group.items()
            if name != "params" and not any(isinstance(x, Tensor) for x in tree_leaves(value))
        }
        for group in optimizer.param_groups
    ]


def changed_settings(before: Settings, optimizer: Optimizer) -> str:
    """The names of the settings that are others than `before`, or `FRESH` and other objects."""
    pairs = zip(before, group_settings(optimizer), strict=False)
    changes = ((name, was.get(name), now.get(name)) for was, now in pairs for name in was | now)
    names = {n for n, a, b in changes if a is not b and (type(a) in FRESH or a != b)}
    return ", ".join(sorted(names))


@dataclass(frozen=True, eq=False)
class UpdateCall:
    """The target of a node that calls `optimizer.step()` with gradients and scales of the graph."""

    update: Update
    __name__ = "optimizer_step"

    def __call__(self, grads: list[Tensor], scaling: dict[str, Tensor]) -> None:
        update = self.update
        shards = (over(like, grad) for (_, like), grad in zip(update.grads, grads, strict=True))
        params = [param for param, _ in update.grads]
        grads_of = dict(zip(params, shards, strict=True))
        with compat.entering_autograd(), stepping(update.optimizer, grads_of, scaling):
            update.optimizer.step()


@contextmanager
def stepping(
    optimizer: Optimizer, grads: dict[Tensor, Tensor], scaling: dict[str, Any]
) -> Iterator[None]:
    """Inside, parameters have gradients, and the optimizer has the scale of the scaler."""
    for param, grad in grads.items():
        param.grad = grad
    vars(optimizer).update(scaling)
    try:
        yield
    finally:
        for param in grads:
            param.grad = None
        for name in scaling:
            delattr(optimizer, name)


def counts_on_device(optimizer: Optimizer) -> bool:
    """Whether an optimizer reads its step counts in kernels, and not on the host."""
    return all(group.get("fused") or group.get("capturable") for group in optimizer.param_groups)
