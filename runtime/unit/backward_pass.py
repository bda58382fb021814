"""One backward through eagerly read buckets: its gathers ahead, and reductions under way.

A bucket's gradient is reduced while the layers before it are differentiated; the parameters get it
when the next reduction starts, or when the backward ends. Autograd owns the object, through the
callback that ends it: where a backward raises, it is dropped with all that it holds.
"""

import logging
import weakref
from collections import deque
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from shardc.runtime import compat
from shardc.runtime.comm.unshard import Steps, pack_gradients, reducing
from shardc.runtime.unit.accumulate import flush_when_done
from shardc.runtime.unit.gather_order import Gathers
from shardc.runtime.watch.entering import naming
from shardc.runtime.watch.progress import Label

if TYPE_CHECKING:
    from shardc.runtime.unit.bucket import Bucket
    from shardc.runtime.unit.regather import Again

log = logging.getLogger("shardc")

_passes: "weakref.WeakValueDictionary[int, BackwardPass]" = weakref.WeakValueDictionary()


def backward_pass() -> "BackwardPass":
    """The pass of the backward that runs on this thread; outside of one, a pass of its own."""
    task = compat.backward_number()
    found = _passes.get(task)
    if found is None:
        found = BackwardPass()
        if task != -1:
            _passes[task] = found
            compat.when_backward_ends(found.end)
    return found


class _Reduction:
    """The gradient of one bucket on its way: collectives that follow each other."""

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
        r = bucket.key.code.reduction
        self._kinds = r.kinds
        with naming(bucket.ranks.everyone), self._label():
            self._started = next(steps)

    def _label(self, waits: bool = False) -> AbstractContextManager[object]:
        if not self._kinds:
            return nullcontext()
        return Label(self._kinds[0], (self.bucket.label,), "backward", waits, self._dtype)

    def advance(self) -> bool:
        """Wait for the collective under way and start the next; False once the gradient is dealt
        out."""
        try:
            with naming(self.bucket.ranks.everyone):
                with self._label(waits=True):
                    value = self._started.wait()
                self._kinds.pop(0)
                with self._label():
                    self._started = self._steps.send(value)
            return True
        except StopIteration as done:
            self.bucket.gradients.deliver(done.value, self.used, self.elsewhere, eager=True)
            self.bucket.end_backward()
            return False


class BackwardPass:
    """One backward.

    Attributes:
        gathers: what it gathers again.
        opened: the buckets that were read in it, outside of a forward.
    """

    def __init__(self) -> None:
        self.gathers = Gathers("backward")
        self.opened: list[Bucket] = []
        self._reductions: deque[_Reduction] = deque()
        self._gathered: list[weakref.ref[Again]] = []

    def gather(self, bucket: "Bucket", again: "Again") -> Tensor:
        """The bucket that `again` stands for, `(W*S,)`."""
        self._gathered.append(weakref.ref(again))
        full = self.gathers.gather(bucket, again)
        if not bucket.settings.reshard_after_backward:
            bucket.gathered.keep(full, again.written)
        return full

    @torch.no_grad()
    def reduce(self, bucket: "Bucket", grads: Sequence[Tensor | None]) -> None:
        """Reduce the gradients of a bucket's full parameters, or add them up where it does not sync
        now."""
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
        self._reductions.append(_Reduction(bucket, used, elsewhere, steps, flat.dtype))

    def _make_room(self, bucket: "Bucket") -> None:
        """Before another reduction starts: those of so many units may have inputs in memory."""
        units = list(dict.fromkeys(r.bucket.owner for r in self._reductions))
        before = [unit for unit in units if unit is not bucket.owner]
        late = before[: max(0, len(before) - (bucket.settings.reduce_buffers or 1) + 1)]
        for reduction in list(self._reductions):
            if reduction.bucket.owner in late and not reduction.advance():
                self._reductions.remove(reduction)

    @torch.no_grad()
    def end(self) -> None:
        """All nodes have run: deal out what is still under way."""
        while self._reductions:
            if not self._reductions[0].advance():
                self._reductions.popleft()
        self.gathers.close()
        for bucket in self.opened:
            bucket.gathered.end_backward()
        for reference in self._gathered:
            again = reference()
            if again is not None:
                again.full = None
