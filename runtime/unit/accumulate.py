"""Gradients that wait: unreduced ones of `no_sync`, and those not yet reduced over copies.

A bucket that does not sync differentiates to a leaf of its own, the sink: `(W*S,)`, expanded from
one element, so it holds no data. Its gradient, in the dtype of the reduction, is where autograd
adds up the unreduced gradients. The next backward that syncs is given the sum (`take`) and adds its
own to it before the reduce-scatter. What no such backward took, because it did not use the bucket,
is reduced when that backward ends.
"""

import weakref
from collections.abc import Iterable
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.optim.optimizer import register_optimizer_step_pre_hook

from shardc.runtime import compat
from shardc.runtime.unit.weak_hooks import weak_hook

if TYPE_CHECKING:
    from shardc.runtime.unit.bucket import Bucket
    from shardc.runtime.unit.unit import Unit


class Accumulated:
    """Sums of unreduced gradients of one bucket.

    Attributes:
        sink: the leaf whose gradient is the sum of unreduced gradients, once there was one.
        partial: the sum of what was reduced over one copy of the model only, `(S,)`.
        used, elsewhere: slots that have part in the sums, here and on other ranks only.
        taken: whether a forward was given them, so that another does not add them again.
    """

    def __init__(self, bucket: "Bucket") -> None:
        self.bucket = bucket
        self.sink: Tensor | None = None
        self._sum: tuple[Tensor | None, Tensor | None] = None, None  # of the sink, see `pending`
        self.partial: Tensor | None = None
        self.used: set[int] = set()
        self.elsewhere: set[int] = set()
        self.taken = False

    def make_sink(self, numel: int, dtype: torch.dtype, device: torch.device) -> None:
        """Make a sink of that size and dtype, if there is none."""
        if self.sink is None or self.sink.dtype != dtype:
            self.sink = torch.zeros(1, dtype=dtype, device=device).expand(numel)
            self.sink.requires_grad_()
            self.sink.register_post_accumulate_grad_hook(weak_hook(self._end_backward))
            _watch(self)

    def _end_backward(self, sink: Tensor) -> None:
        """The hook of the sink."""
        _waiting.add(id(self))
        self.bucket.end_backward()

    def keep_partial(self, part: Tensor) -> None:
        """Keep `part: (S,)` until copies are reduced, beside what another backward left there."""
        self.partial = part if self.partial is None else self.partial + part
        _watch(self)
        _waiting.add(id(self))
        self.bucket.key.refresh()

    def add(self, flat: Tensor, used: Iterable[int]) -> None:
        """Set `flat: (W*S,)`, which includes all that waited, as the unreduced gradient; an eager
        backward used `used`."""
        assert self.sink is not None
        self.bucket.gathered.hide_gradients()
        self.sink.grad = flat
        _waiting.add(id(self))
        self.used.update(used)
        self.bucket.end_backward()

    @property
    def pending(self) -> Tensor | None:
        """The sum of unreduced gradients, `(W*S,)`.

        A forward that syncs may be given it before the backwards of earlier forwards have added to
        it in place. Autograd lets it, as this tensor has a version counter of its own.
        """
        grad = None if self.sink is None else self.sink.grad
        if grad is not self._sum[0]:
            self._sum = grad, None if grad is None else grad.data
        return self._sum[1]

    @property
    def is_empty(self) -> bool:
        """Whether nothing waits."""
        return self.pending is None and self.partial is None

    def take(self, taken: bool = True) -> None:
        """A forward was given the sums: another one will not be, until they are not `taken`."""
        self.taken = taken
        self.bucket.key.refresh()

    def release(self, pending: Tensor | None, partial: Tensor | None) -> None:
        """The backward of the forward that took these begins.

        Raises:
            RuntimeError: they are not what waits now.
        """
        if (pending is not None and pending is not self.pending) or partial is not self.partial:
            raise RuntimeError(
                "the gradients that were accumulated without sync when this forward ran have been "
                "reduced or discarded since: run its backward before, or run the forward again"
            )
        self.clear()

    def clear(self) -> None:
        """Nothing waits any more."""
        if self.sink is not None:
            self.bucket.gathered.hide_gradients()
            self.sink.grad = None
        _waiting.discard(id(self))
        self.partial, self.taken = None, False
        self.used, self.elsewhere = set(), set()
        self.bucket.key.refresh()


_accumulating: "weakref.WeakSet[Accumulated]" = weakref.WeakSet()
_waiting: set[int] = set()
"""Those in which something waits, by id.

Every backward and every optimizer's step looks at it. Dynamo traces the latter: unlike a WeakSet,
it does not change with the garbage collector.
"""
_watching = False


def _watch(accumulated: Accumulated) -> None:
    """From the first accumulation on, see `zero_grad`, optimizer steps and ends of backwards."""
    global _watching
    if accumulated not in _accumulating:
        _accumulating.add(accumulated)
        weakref.finalize(accumulated, _waiting.discard, id(accumulated)).atexit = False
    if not _watching:
        _watching = True
        compat.after_zero_grad(_discard)
        register_optimizer_step_pre_hook(_refuse_step)


def accumulating() -> list[Accumulated]:
    """All in which something waits, or has waited, in the same order on all ranks."""
    return sorted(_accumulating, key=lambda each: (each.bucket.ranks.everyone, each.bucket.serial))


def flush_when_done(used: Iterable["Bucket"]) -> None:
    """From within a backward that uses these: reduce at its end what waits elsewhere in their
    models.

    Its end is that of the backward around it, if it is one of a reentrant checkpoint: what waits
    may have been given to a forward that is differentiated after it. What waits in another model is
    left alone. It may be one that only some ranks have freed.
    """
    if _waiting:
        models = {bucket.owner.outermost for bucket in used}
        compat.when_outermost_backward_ends(partial(_flush, models))


def _flush(models: set["Unit"]) -> None:
    for waiting in accumulating():
        if not waiting.is_empty and waiting.bucket.owner.outermost in models:
            waiting.bucket.gradients.flush()


def _of(params: Iterable[Tensor]) -> dict["Bucket", None]:
    slots = (getattr(param, "_slot", None) for param in params)
    return dict.fromkeys(slot.bucket for slot in slots if slot is not None)


def _discard(params: Iterable[Tensor]) -> None:
    for bucket in _of(params):
        if not bucket.gradients.waiting.is_empty:
            bucket.gradients.waiting.clear()


def _refuse_step(
    optimizer: torch.optim.Optimizer, args: compat.Args, kwargs: compat.Kwargs
) -> tuple[compat.Args, compat.Kwargs] | None:
    """Before a step, refuse gradients that wait; a closure may reduce them: look after it."""
    if not _waiting:
        return None
    closure = kwargs.get("closure", args[1] if len(args) > 1 else None)
    if closure is None:
        _require_reduced(optimizer)
        return None

    def checked_closure() -> object:
        loss = closure()
        _require_reduced(optimizer)
        return loss

    if "closure" in kwargs:
        return args, {**kwargs, "closure": checked_closure}
    return (args[0], checked_closure, *args[2:]), kwargs


def _require_reduced(optimizer: torch.optim.Optimizer) -> None:
    for bucket in _of(p for group in optimizer.param_groups for p in group["params"]):
        if not bucket.gradients.waiting.is_empty:
            names = [slot.name for slot in bucket.layout.slots]
            raise RuntimeError(
                f"optimizer.step() with gradients of {names} accumulated but not reduced: run the "
                "last micro-batch with gradient sync on (outside no_sync, or after "
                "set_requires_gradient_sync(True)), or discard them with zero_grad()"
            )
