"""Gradients that wait: for a reduction (`no_sync`), or for the all-reduce over copies of the model.

A bucket that does not sync differentiates to a leaf of its own, the sink: `(W*S,)`, expanded from
one element, so it holds no data. In the sink's gradient, of the reduction's dtype, autograd adds up
the unreduced gradients. The next backward that syncs takes the sum (`take`) and adds its own
gradient to the sum before the reduce-scatter. If that backward does not use the bucket, the sum is
reduced when the backward ends.
"""

import weakref
from collections.abc import Iterable
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from shardc.runtime import compat
from shardc.runtime.checks.optimizer_hooks import Turn, before_steps
from shardc.runtime.comm.unshard import split_full
from shardc.runtime.unit.weak_hooks import weak_hook

if TYPE_CHECKING:
    from shardc.runtime.unit.bucket import Bucket
    from shardc.runtime.unit.unit import Unit


class Accumulated:
    """Sums of unreduced gradients of one bucket.

    Attributes:
        sink: the leaf whose gradient is the sum of unreduced gradients; None until it is needed.
        partial: the sum of gradients reduced within one copy of the model only, `(S,)`.
        used, elsewhere: slots with a gradient in the sums, here, and on other ranks only.
        taken: whether a forward has the sums, so that no other forward adds them again.
    """

    def __init__(self, bucket: "Bucket") -> None:
        self.bucket = bucket
        self.sink: Tensor | None = None
        self._sum: tuple[Tensor | None, Tensor | None] = None, None  # sink.grad and its alias
        self.partial: Tensor | None = None
        self.used: set[int] = set()
        self.elsewhere: set[int] = set()
        self.taken = False

    def make_sink(self, numel: int, dtype: torch.dtype, device: torch.device) -> None:
        """Make a sink of `numel` elements, unless there is one of this dtype."""
        if self.sink is None or self.sink.dtype != dtype:
            self.sink = torch.zeros(1, dtype=dtype, device=device).expand(numel)
            self.sink.requires_grad_()
            self.sink.register_post_accumulate_grad_hook(weak_hook(self._end_backward))
            _watch(self)

    def _end_backward(self, sink: Tensor) -> None:
        """Note that an unreduced gradient waits: the hook of the sink."""
        _waiting.add(id(self))
        self.bucket.end_backward()

    def keep_partial(self, part: Tensor) -> None:
        """Add `part: (S,)` to the sum that waits for the all-reduce over copies."""
        self.partial = part if self.partial is None else self.partial + part
        _watch(self)
        _waiting.add(id(self))
        self.bucket.key.refresh()

    def add(self, flat: Tensor, used: Iterable[int]) -> None:
        """Set `flat: (W*S,)` as the unreduced gradient of an eager backward that used slots `used`.

        `flat` includes the unreduced gradients that waited before.
        """
        assert self.sink is not None
        self.bucket.gathered.hide_gradients()
        self.sink.grad = flat
        _waiting.add(id(self))
        self.used.update(used)
        self.bucket.end_backward()

    @property
    def pending(self) -> Tensor | None:
        """The sum of unreduced gradients, `(W*S,)`.

        A forward that syncs may be given the sum before backwards of earlier forwards add to the
        sum in place. Autograd allows this: the alias given here has a version counter of its own.
        """
        grad = None if self.sink is None else self.sink.grad
        if grad is not self._sum[0]:
            self._sum = grad, None if grad is None else grad.data
        return self._sum[1]

    @property
    def is_empty(self) -> bool:
        """Whether no gradient waits."""
        return self.pending is None and self.partial is None

    def take(self, taken: bool = True) -> None:
        """Note that a forward has the sums; no other forward gets them while they are `taken`."""
        self.taken = taken
        self.bucket.key.refresh()

    def hand_over(self, *lent: Tensor | None) -> tuple[set[int], set[int]]:
        """Leave the sums to the backward, about to run, of the forward that was given `lent`.

        Sums that do not wait any more become zeros for that backward: they were reduced, discarded
        or added to a later sum, or an earlier backward through the same forward took them.

        Args:
            lent: (pending, partial) when the forward ran.

        Returns:
            The slots with a gradient in the sums that waited, here, and on other ranks only.
        """
        wait = [
            each is not None and each is now
            for each, now in zip(lent, (self.pending, self.partial), strict=True)
        ]
        for each, waits in zip(lent, wait, strict=True):
            if each is not None and not waits:
                each.data.zero_()  # `.data`: the graph saved the sum, and autograd sees no write
        if not any(wait):
            return set(), set()
        used, elsewhere = set(self.used), set(self.elsewhere)
        self._drop(*wait)
        return used, elsewhere

    def clear(self) -> None:
        """Drop the sums: no gradient waits any more."""
        self._drop(pending=True, partial=True)

    def discard(self, slots: set[int]) -> None:
        """Drop the sums of `slots`; the sums of other slots wait on.

        Ranks decide alike, by the slots that are trained: ranks may have used different ones.
        """
        bucket = self.bucket
        if slots.issuperset(index for index, flag in enumerate(bucket.trainable) if flag):
            self.clear()
            return
        self.used -= slots
        self.elsewhere -= slots
        sizes, places = bucket.split
        for index in slots:  # `.data`: a forward may have been given the sums
            if self.pending is not None:
                split_full(self.pending.data, bucket.key.code)[index].zero_()
            if self.partial is not None:
                self.partial.data.split_with_sizes(sizes)[places[index]].zero_()

    def _drop(self, pending: bool, partial: bool) -> None:
        if pending and self.sink is not None:
            self.bucket.gathered.hide_gradients()
            self.sink.grad = None
        if partial:
            self.partial = None
        if self.is_empty:
            _waiting.discard(id(self))
            self.used, self.elsewhere = set(), set()
        self.take(False)


_accumulating: "weakref.WeakSet[Accumulated]" = weakref.WeakSet()
_waiting: set[int] = set()
"""The ids of each `Accumulated` in which a gradient waits.

Every backward and every optimizer step looks at this set. Dynamo traces optimizer steps: a set of
ids, unlike a WeakSet, does not change with the garbage collector.
"""


def _watch(accumulated: Accumulated) -> None:
    """Register an `Accumulated`; the first one hooks `zero_grad` and optimizer steps."""
    if accumulated not in _accumulating:
        _accumulating.add(accumulated)
        weakref.finalize(accumulated, _waiting.discard, id(accumulated)).atexit = False
    compat.after_zero_grad(_discard)
    before_steps.call(Turn.UNREDUCED, _refuse_step, compiled=True)


def accumulating() -> list[Accumulated]:
    """Each `Accumulated` in which a gradient waits or has waited, in one order on all ranks."""
    return sorted(_accumulating, key=lambda each: (each.bucket.ranks.everyone, each.bucket.serial))


def waiting_sums(buckets: Iterable["Bucket"]) -> list[Tensor]:
    """The sums that wait in `buckets`."""
    if not _waiting:
        return []
    waiting = [bucket.gradients.waiting for bucket in buckets]
    sums = [(each.pending, each.partial) for each in waiting]
    return [value for pair in sums for value in pair if value is not None]


def flush_when_done(used: Iterable["Bucket"]) -> None:
    """Reduce the gradients that wait in the models of `used` when the current backward ends.

    The backward of a reentrant checkpoint runs inside another backward, and the end of the outer
    one counts: a forward that has the sums may be differentiated after the inner backward.
    Gradients in another model are left alone: some ranks may have freed that model.
    """
    if _waiting:
        models = {bucket.owner.outermost for bucket in used}
        compat.when_outermost_backward_ends(partial(_flush, models))


def _flush(models: set["Unit"]) -> None:
    for waiting in accumulating():
        if not waiting.is_empty and waiting.bucket.owner.outermost in models:
            waiting.bucket.gradients.flush()


def _waiting_slots(params: Iterable[Tensor]) -> dict["Accumulated", set[int]]:
    """The slots of `params` by the sums of their buckets, where a gradient waits."""
    found: dict[Accumulated, set[int]] = {}
    for slot in (getattr(param, "_slot", None) for param in params):
        if slot is not None and not slot.bucket.gradients.waiting.is_empty:
            found.setdefault(slot.bucket.gradients.waiting, set()).add(slot.index)
    return found


def _discard(params: Iterable[Tensor]) -> None:
    for waiting, slots in _waiting_slots(params).items():
        waiting.discard(slots)


def _refuse_step(
    optimizer: torch.optim.Optimizer, args: compat.Args, kwargs: compat.Kwargs
) -> tuple[compat.Args, compat.Kwargs] | None:
    """Refuse a step while gradients wait; a closure may reduce them, so check after a closure."""
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
    for waiting, slots in _waiting_slots(compat.params_of(optimizer)).items():
        if slots & (waiting.used | waiting.elsewhere):
            names = [slot.name for slot in waiting.bucket.layout.slots]
            raise RuntimeError(
                f"optimizer.step() with gradients of {names} accumulated but not reduced: run the "
                "last micro-batch with gradient sync on (outside no_sync, or after "
                "set_requires_gradient_sync(True)), or discard them with zero_grad()"
            )
