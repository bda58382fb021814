"""`backward(inputs=)` and `torch.autograd.grad` for parameters that are sharded.

The engine knows segments, not the parameters that view them. Where it is given such parameters, it
is given the segments of their buckets instead, and what a bucket deals out goes to the parameters
asked for only. What flows into a bucket is reduced as a whole, so all ranks must ask alike.

`grad` is a backward whose gradients are taken off the parameters again: they are sharded, as
`.grad` is, and `.grad` stays as it was.
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
    """The slots that the backward under way was asked for; `hooks`: whether `.grad` has new values
    by it."""

    slots: Slots
    hooks: bool


_current: Selection | None = None


def is_selected(bucket: "Bucket", slot: int) -> bool:
    """Whether the backward under way shall give this parameter a gradient."""
    return _current is None or slot in _current.slots.get(bucket, ())


def runs_hooks() -> bool:
    """Whether hooks on parameters that have a new `.grad` shall be called."""
    return _current is None or _current.hooks


def is_sharded(value: object) -> TypeGuard[ShardTensor]:
    """Whether `value` is a parameter that a bucket holds."""
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
        run: the engine, given inputs that it knows, and whether some may be missing in the graph.
        inputs: what the user gave.
        accumulates: whether gradients go to `.grad` (`backward`), or are returned (`grad`).
        create_graph: whether they shall be differentiable.
        allow_unused: whether an input may have none.

    Raises:
        RuntimeError: what is asked cannot be done for a bucket; says what can.
    """
    slots: defaultdict[Bucket, set[int]] = defaultdict(set)
    for param in inputs:
        if not is_sharded(param):
            continue
        if not param.requires_grad:
            raise RuntimeError("One of the differentiated Tensors does not require grad")
        slot = param._slot  # type: ignore[attr-defined]
        slots[slot.bucket].add(slot.index)
    _refuse_parts(slots, accumulates)
    others = [value for value in inputs if not is_sharded(value)]
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
    """Raise where gradients wait, or shall wait, to be reduced, which a bucket does as a whole."""
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
    """Inside, `.grad` is None to begin with; afterwards it is what it was."""
    before = {param: param.grad for param in params}
    for param in before:
        param.grad = None
    try:
        yield
    finally:
        for param, grad in before.items():
            param.grad = grad


compat.give_engine_inputs(run_for_inputs, is_sharded)
