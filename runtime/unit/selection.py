"""`backward(inputs=)` and `torch.autograd.grad` for sharded parameters.

Autograd's engine knows segments, not the parameters that view them. So the engine gets the segments
of the buckets in place of the parameters, and a bucket gives gradients to the requested parameters
only. The gradient of a bucket is reduced as a whole, so all ranks must request the same parameters.

`grad` runs a backward and then takes the gradients off the parameters: the gradients are sharded,
as `.grad` is, and `.grad` keeps its value.
"""

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeGuard

from torch import Tensor

from shardc.runtime import compat
from shardc.runtime.tensor.shard_tensor import ShardTensor
from shardc.runtime.unit import accumulate

if TYPE_CHECKING:
    from shardc.runtime.unit.bucket import Bucket

Slots = Mapping["Bucket", set[int]]
"""Slots by bucket."""


@dataclass(frozen=True)
class Selection:
    """The slots that the backward under way was asked for; `hooks`: whether it calls the
    post-accumulate hooks of parameters."""

    slots: Slots
    hooks: bool


_current: Selection | None = None


def is_selected(bucket: "Bucket", slot: int) -> bool:
    """Whether the backward under way gives the parameter in `slot` a gradient."""
    return _current is None or slot in _current.slots.get(bucket, ())


def runs_hooks() -> bool:
    """Whether the backward under way calls the post-accumulate hooks of parameters."""
    return _current is None or _current.hooks


def is_sharded_param(value: object) -> TypeGuard[ShardTensor]:
    """Whether `value` is a parameter of a bucket."""
    return isinstance(value, ShardTensor) and hasattr(value, "_slot")


def run_for_inputs(
    run: Callable[[Sequence[object], bool], object],
    inputs: Sequence[Tensor],
    accumulates: bool,
    create_graph: bool,
    allow_unused: bool,
) -> object:
    """Run torch's engine for `inputs`, some of them sharded.

    Args:
        run: the engine; takes inputs that it knows, and whether the graph may lack some of them.
        inputs: the inputs that the user gave.
        accumulates: whether gradients go to `.grad` (`backward`), or are returned (`grad`).
        create_graph: whether the gradients are to be differentiable.
        allow_unused: whether an input may have no gradient.

    Raises:
        RuntimeError: a bucket cannot serve the request; the message says how to change it.
    """
    slots: defaultdict[Bucket, set[int]] = defaultdict(set)
    for param in inputs:
        if not is_sharded_param(param):
            continue
        if not param.requires_grad:
            raise RuntimeError("One of the differentiated Tensors does not require grad")
        slot = param._slot  # type: ignore[attr-defined]
        slots[slot.bucket].add(slot.index)
    _refuse_parts(slots, accumulates)
    others = [value for value in inputs if not is_sharded_param(value)]
    waiting = [bucket.gradients.waiting for bucket in slots]
    leaves: list[Tensor] = [bucket.segment for bucket in slots]
    leaves += [each.sink for each in waiting if each.sink is not None]
    if accumulates:
        with _selecting(Selection(slots, hooks=True)):
            return run((*leaves, *others), True)
    if others or create_graph:
        raise RuntimeError(
            "torch.autograd.grad of sharded parameters gives gradients that are not "
            "differentiable, and of nothing else at the same time: leave out create_graph=True; "
            "ask for the other inputs in a call of their own, the first with retain_graph=True"
        )
    with _without_gradients(inputs), _selecting(Selection(slots, hooks=False)):
        run(leaves, True)
        found = tuple(param.grad for param in inputs)
    if not allow_unused and any(grad is None for grad in found):
        raise RuntimeError(
            "One of the differentiated Tensors appears to not have been used in the graph. Set "
            "allow_unused=True if this is the desired behavior."
        )
    return found


def _refuse_parts(slots: Slots, accumulates: bool) -> None:
    """Raise for a part of a bucket if its gradients wait unreduced, or are to wait: a bucket
    accumulates as a whole."""
    models = {bucket.owner.outermost for bucket in slots}
    waiting = (each.bucket for each in accumulate.accumulating() if not each.is_empty)
    held = {bucket for bucket in waiting if bucket.owner.outermost in models}
    for bucket in {*slots, *held}:
        trained = {index for index, flag in enumerate(bucket.trainable) if flag}
        settings = bucket.settings
        waits = not settings.sync or (not settings.all_reduce and bucket.ranks.replicas is not None)
        if (waits or bucket in held) and (not accumulates or slots.get(bucket, set()) != trained):
            asked = "backward(inputs=...)" if accumulates else "torch.autograd.grad"
            raise RuntimeError(
                f"{asked}: gradients of {bucket.label} are accumulated without being reduced "
                "(no_sync, set_requires_gradient_sync(False), set_requires_all_reduce(False)), "
                "which is done for all parameters of a unit together: call backward() without "
                "inputs=, or with all parameters, or turn gradient sync on"
            )


@contextmanager
def _selecting(selection: Selection) -> Iterator[None]:
    global _current
    before, _current = _current, selection
    try:
        yield
    finally:
        _current = before


@contextmanager
def _without_gradients(params: Sequence[Tensor]) -> Iterator[None]:
    """Set `.grad` of the parameters to None at the start, and restore `.grad` at the end."""
    before = {param: param.grad for param in params}
    for param in before:
        param.grad = None
    try:
        yield
    finally:
        for param, grad in before.items():
            param.grad = grad


compat.give_engine_inputs(run_for_inputs, is_sharded_param)
