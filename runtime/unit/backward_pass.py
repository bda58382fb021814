"""A backward through eagerly read buckets: its gathers ahead, and its reductions under way.

A bucket's gradient is reduced while earlier layers are differentiated. The parameters get the
gradient when the next reduction starts, or when the backward ends. Autograd owns a `BackwardPass`
through the callback at the backward's end: if a backward raises, its `BackwardPass` is freed with
all that it holds.
"""

import logging
import weakref
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from shardc.runtime import compat
from shardc.runtime.comm.unshard import Steps, pack_gradients, reducing
from shardc.runtime.unit.accumulate import flush_when_done
from shardc.runtime.unit.gather_order import Gathers
from shardc.runtime.unit.parts import Parts
from shardc.runtime.watch.entering import naming
from shardc.runtime.watch.progress import Label

if TYPE_CHECKING:
    from shardc.runtime.unit.bucket import Bucket
    from shardc.runtime.unit.regather import Again

log = logging.getLogger("shardc")

_passes: "weakref.WeakValueDictionary[int, BackwardPass]" = weakref.WeakValueDictionary()


watchers: "list[Callable[[Iterable[Bucket]], None]]" = []
"""Called in each backward, at least once, with the buckets that a part of it differentiates."""


def tell_backward(buckets: "Iterable[Bucket]") -> None:
    """Tell the watchers of buckets that the running backward differentiates."""
    for watch in watchers:
        watch(buckets)


def backward_pass() -> "BackwardPass":
    """The pass of the backward that runs on this thread; outside of a backward, a new pass."""
    task = compat.backward_number()
    found = _passes.get(task)
    if found is None:
        found = BackwardPass()
        if task != -1:
            _passes[task] = found
            compat.when_backward_ends(found.end)
    return found


def parts_of(bucket: "Bucket") -> Parts | None:
    """The parts that eager reads of a bucket gave the running backward; None if none gave one."""
    running = _passes.get(compat.backward_number())
    return None if running is None else running.parts.get(bucket)


class _Reduction:
    """The reduction of one bucket's gradient: collectives that follow each other."""

    def __init__(
        self,
        bucket: "Bucket",
        used: set[int],
        elsewhere: set[int],
        steps: Steps,
        dtype: torch.dtype,
    ) -> None:
        self.bucket, self.used, self.elsewhere = bucket, used, elsewhere
        self._dtype = dtype
        self._steps = steps
        self._reduction = bucket.key.code.reduction
        self._kinds = self._reduction.kinds
        with naming(bucket.ranks.everyone), self._label():
            self._started = next(steps)

    def _label(self, waits: bool = False) -> AbstractContextManager[object]:
        if not self._kinds:
            return nullcontext()
        return Label(self._kinds[0], (self.bucket.label,), "backward", waits, self._dtype)

    def advance(self) -> bool:
        """Wait for a collective and start the next one; False once the gradient is dealt out."""
        try:
            with naming(self.bucket.ranks.everyone):
                with self._label(waits=True):
                    value = self._started.wait()
                self._kinds.pop(0)
                with self._label():
                    self._started = self._steps.send(value)
            return True
        except StopIteration as done:
            gradients = self.bucket.gradients
            gradients.deliver(done.value, self._reduction, self.used, self.elsewhere, eager=True)
            self.bucket.end_backward()
            return False


class BackwardPass:
    """One backward: its gathers and its reductions.

    Attributes:
        gathers: the gathers of the backward.
        opened: buckets that recomputed code left gathered; they are freed when the backward ends.
        parts: the parts of gradients, by bucket.
    """

    def __init__(self) -> None:
        self.gathers = Gathers("backward")
        self.opened: list[Bucket] = []
        self.parts: defaultdict[Bucket, Parts] = defaultdict(lambda: Parts(is_eager=True))
        self._reductions: deque[_Reduction] = deque()
        self._gathered: weakref.WeakSet[Again] = weakref.WeakSet()

    def gather(self, bucket: "Bucket", again: "Again") -> Tensor:
        """Gather the bucket of `again`, `(W*S,)`."""
        self._gathered.add(again)
        full = self.gathers.gather(bucket, again)
        if not bucket.settings.reshard_after_backward:
            bucket.gathered.keep(full, again.written)
        return full

    @torch.no_grad()
    def reduce(self, bucket: "Bucket", grads: Sequence[Tensor | None]) -> None:
        """Reduce the gradients of a bucket's full parameters; without sync, add them up."""
        tell_backward([bucket])
        waiting, spec = bucket.gradients.waiting, bucket.key.code
        used = {slot for slot, grad in enumerate(grads) if grad is not None}
        flush_when_done([bucket])
        bucket.gathered.end_backward()
        if not spec.reduction.sync:
            waiting.add(pack_gradients(grads, spec, waiting.pending), used)
            return
        pending = partial = None
        elsewhere: set[int] = set()
        if not waiting.taken:
            pending, partial = waiting.pending, waiting.partial
            used, elsewhere = used | waiting.used, set(waiting.elsewhere)
            if not waiting.is_empty:
                waiting.clear()
        log.debug("reduce %s", bucket.label)
        self._make_room(bucket)
        flat = pack_gradients(grads, spec, pending)
        steps = reducing(flat, bucket.key.code, partial, bucket.segment)
        self.parts[bucket].under_way += 1
        self._reductions.append(_Reduction(bucket, used, elsewhere, steps, flat.dtype))

    def _make_room(self, bucket: "Bucket") -> None:
        """Advance the oldest reductions before another one starts.

        The inputs of at most `reduce_buffers` units (None: one unit) may be in memory.
        """
        units = list(dict.fromkeys(r.bucket.owner for r in self._reductions))
        before = [unit for unit in units if unit is not bucket.owner]
        late = before[: max(0, len(before) - (bucket.settings.reduce_buffers or 1) + 1)]
        for reduction in list(self._reductions):
            if reduction.bucket.owner in late and not reduction.advance():
                self._reductions.remove(reduction)

    @torch.no_grad()
    def end(self) -> None:
        """End the backward: finish reductions under way, and deal out their gradients."""
        while self._reductions:
            if not self._reductions[0].advance():
                self._reductions.popleft()
        for bucket, parts in self.parts.items():
            parts.is_last = True  # a torch that calls no hook without a gradient did not tell
            bucket.gradients.give(parts)
        self.gathers.close()
        for bucket in self.opened:
            bucket.gathered.end_backward()
        for again in self._gathered:
            again.full = None
