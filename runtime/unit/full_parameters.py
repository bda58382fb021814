"""A bucket's full parameters at hand: for an eager forward, or held from one step to the next.

Inside an eager forward the first read gathers the bucket and the end of the forward frees it; where
the bucket stays gathered (`reshard_after_forward=False`), its backward does, or `reshard()`. Until
then full parameters are what a read gives. So they are in a backward, where what is recomputed may
read parameters of modules that it does not call.

What is held (`unshard()`, `set_reshard_after_backward(False)`) is given to compiled graphs too, and
is gathered again where the parameters were written since.
"""

import weakref
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from shardc.runtime import compat
from shardc.runtime.checks.meta import refuse_meta
from shardc.runtime.comm.collectives import Started
from shardc.runtime.comm.unshard import start_gather
from shardc.runtime.unit.backward_pass import backward_pass
from shardc.runtime.unit.eager import gathers
from shardc.runtime.unit.regather import Again, Unsharded
from shardc.runtime.watch.entering import naming
from shardc.runtime.watch.progress import Label

if TYPE_CHECKING:
    from shardc.runtime.unit.bucket import Bucket


class Gathered:
    """The gathered values of one bucket.

    Attributes:
        held: the whole bucket, `(W*S,)`, where it stays gathered beyond a forward or backward.
        depth: how many eager forwards that read it are running.
        opened: whether reads outside a forward give full parameters, since `unshard()`.
        current: what the eager forward that runs has read, and what stays of one that ran.
        is_kept: whether `current` waits for a backward.
        is_shared: whether several graphs of one forward read the bucket, or one and eager code.
        expected: what backwards to come will gather again.
        orders: per phase, the gather order of the last pass that this bucket opened.
    """

    def __init__(self, bucket: "Bucket") -> None:
        self.bucket = bucket
        self.held: Tensor | None = None
        self.depth = 0
        self.opened = False
        self.current: Unsharded | None = None
        self.is_kept = False
        self.is_shared = False
        self._is_left = False  # `current` is of an earlier forward, and was not read since
        self._graphs = 0
        self._ran: set[object] = set()
        self._kept_state: object = None
        self.expected: list[weakref.ref[Again]] = []
        self.orders: dict[str, tuple[weakref.ref[Bucket], ...]] = {}
        self._version: object = None
        self._started: Started | None = None

    @property
    def is_held(self) -> bool:
        """Whether the bucket stays gathered beyond a forward or backward."""
        return self.held is not None

    @torch.no_grad()
    def hold(self, wait: bool = True) -> None:
        """Gather the bucket, if it is not, and keep it so. Every rank must call it.

        Without `wait`, what reads it first waits.
        """
        if self.held is None:
            started, written = self._start(), self.bucket.version
            if self.bucket.key.code.is_made_later:
                self._hold(self._wait(started), written)
                return
            self._started = started
            self._hold(started.early, written)
        if wait:
            self.finish()

    def keep(self, full: Tensor, written: object) -> None:
        """Hold `full: (W*S,)`, the bucket as it was gathered when its version was `written`."""
        if self.held is None and full.dtype == self.bucket.key.code.compute_dtype:
            self._hold(full, written)

    def _hold(self, full: Tensor | None, written: object) -> None:
        self.held, self._version = full, written
        self.bucket.key.refresh()

    def finish(self) -> None:
        """Wait for what `hold` started."""
        if self._started is not None:
            self._wait(self._started)
            self._started = None

    @torch.no_grad()
    def renew(self) -> None:
        """Gather what is held again if the parameters were written since."""
        self.finish()
        if self.held is not None and self._version != self.bucket.version:
            full = self._wait(self._start())
            if self.bucket.key.code.extension is None:
                self.held.copy_(full)  # compiled graphs are given it
            else:
                self.held = full
            self._version = self.bucket.version

    def _start(self) -> Started:
        bucket = self.bucket
        bucket.owner.await_updates()
        dtype = bucket.key.code.compute_dtype
        label = Label("all_gather", (bucket.label,), "forward", dtype=dtype)
        with naming(bucket.ranks.everyone), label:
            return start_gather(bucket.segment.detach(), bucket.key.code)

    def _wait(self, started: Started) -> Tensor:
        label = Label("all_gather", (self.bucket.label,), "forward", waits=True)
        with naming(self.bucket.ranks.everyone), label:
            return started.wait()

    def drop(self) -> None:
        """Free what is held."""
        self.finish()
        self.opened = False
        if self.depth == 0:
            self._close(at_once=True)
        if self.held is not None:
            self._hold(None, None)

    def reset(self) -> None:
        """Forget a step that was interrupted, and free what is gathered."""
        self.depth, self.is_kept = 0, False
        self.drop()

    @property
    def is_readable(self) -> bool:
        """Whether a read gives full parameters: in a forward, in a backward (but for the hooks that
        are given their gradients), and while they are at hand and were not written since."""
        if self.depth > 0 or self.opened:
            return True
        if compat.in_backward() and not self.bucket.gradients.delivers:
            return True
        if self.current is not None:
            return self.current.written == self.bucket.version
        return self.held is not None and self._version == self.bucket.version

    @property
    def _is_behind(self) -> bool:
        """Whether parameters were written since they were read outside of a forward."""
        if self.current is None or self.depth > 0 or not self.opened or compat.in_backward():
            return False
        return self.current.written != self.bucket.version

    def read(self, index: int) -> Tensor:
        """The full parameter `index`; outside of a forward with its unreduced gradient, if there is
        one: a part of what `no_sync` has added up."""
        full = self.views()[index]
        if self.depth == 0 and not compat.in_backward():
            full.grad = self.bucket.gradients.unreduced(index, full.dtype)
        return full

    @compat.untraced
    def views(self) -> tuple[Tensor, ...]:
        """The full parameters, gathered at the first read inside an eager forward; outside of one,
        after `unshard()`, also at the first read behind a write to the parameters."""
        if self._is_behind:
            self._close()
        self._is_left = False
        if self.current is None:
            bucket = self.bucket
            self._note_sharing()
            if bucket.segment.is_meta:
                refuse_meta(slot.name for slot in bucket.layout.slots)
            compat.resolve_group(bucket.ranks.shard)  # says so if it is gone
            self.renew()
            code = bucket.key.reading_code()
            with (
                compat.outside_selective_checkpoints(),
                compat.outside_function_transforms(),
                torch.inference_mode(False),
                torch.no_grad(),
            ):
                full = self.held if code.held else gathers().gather(bucket)
                assert full is not None
                self.current = Unsharded(bucket, code, full)
            if self.depth == 0 and compat.in_backward():  # by what recomputes a forward
                backward_pass().opened.append(bucket)
        return self.current.views

    def enter(self) -> None:
        """An eager forward of a module that reads the bucket begins."""
        if self.depth == 0:
            if not self._serves_again():
                self._close()
            self._graphs, self._is_left = 0, self.is_kept
        self.depth += 1

    @property
    def is_read(self) -> bool:
        """Whether the eager forward that runs has read the bucket, beside what an earlier one left
        gathered: a graph is the same on ranks that compile it in another step."""
        return self.depth > 0 and self.current is not None and not self._is_left

    def _serves_again(self) -> bool:
        """Whether what an earlier forward has read is what the next one would gather."""
        if self.current is None or self.current.written != self.bucket.version:
            return False
        if not (self.is_kept or self._ran or compat.in_backward()) or self._is_lost(self.current):
            return False
        code = self.bucket.key.reading_code()
        return bool(replace(self.current.code, reduction=code.reduction) == code)

    def note_graph(self) -> None:
        """A graph that gathers the bucket by itself runs."""
        if self.depth > 0:
            self._note_sharing()
            self._graphs += 1

    def _note_sharing(self) -> None:
        """Another piece of a forward reads the bucket: after a graph, the runtime gathers it for
        all of them from now on."""
        if self._graphs > 0 and not self.is_shared:
            self.is_shared = True
            self.bucket.key.refresh()

    def leave(self, module: object = None, raised: bool = False) -> bool:
        """A module that counted itself in `depth` ends; the last one frees what was gathered.

        It stays until a backward where the unit does not reshard, and until all modules of a unit
        of several have run, or the forward around them ends.

        Returns:
            Whether something stays.
        """
        self.depth -= 1
        if self.depth > 0 or self.current is None:
            return False
        if not raised or compat.in_backward():  # what is recomputed may be stopped by an exception
            modules = self.bucket.owner.modules
            if self.is_kept:
                return True
            if module in modules:  # else a part of the unit was called alone
                if self.current.stays and torch.is_grad_enabled():
                    self.is_kept, self._kept_state = True, self.current.state()
                    return True
                self._ran.add(module)
                if len(self._ran) < len(modules):
                    return True
        self._close()
        return False

    @property
    def is_written(self) -> bool:
        """Whether the forward that runs has written to what it has read."""
        return self.current is not None and self.depth > 0 and self.current.is_written

    def hide_gradients(self) -> None:
        """Hide unreduced gradients that are no longer true from parameters read before."""
        for full in self.current.views if self.current is not None else ():
            full.grad = None

    def end_forward(self, raised: bool) -> None:
        """The forward around all modules ends: free what stayed for those that did not run.

        After an exception all of it: ranks may have come to different places.
        """
        if self.depth == 0 and (raised or not self.is_kept):
            self._close()

    def end_backward(self) -> None:
        """A backward needs the bucket no more: free what stayed for it, or hold that."""
        if self.depth > 0 or self.current is None:
            return
        if not self.bucket.settings.reshard_after_backward:
            self.keep(self.current.full, self.current.written)
        self._close(at_once=True)

    def remember(self, phase: str, gathered: Sequence["Bucket"]) -> None:
        """A pass that began with this bucket gathered these."""
        self.orders[phase] = tuple(weakref.ref(bucket) for bucket in gathered)

    def remembered(self, phase: str) -> tuple["Bucket", ...]:
        """The buckets that the last such pass gathered; none, where a model that took part is
        gone."""
        known = self.orders.get(phase, ())
        buckets = tuple(bucket for ref in known if (bucket := ref()) is not None)
        return buckets if len(buckets) == len(known) else ()

    def expect(self, again: Again) -> None:
        """A backward to come needs the bucket."""
        self.expected = [known for known in self.expected if known() is not None]
        self.expected.append(weakref.ref(again))

    def next_again(self) -> Again | None:
        """The gather that the next backward that reads the bucket will do."""
        alive = (reference() for reference in reversed(self.expected))
        return next((again for again in alive if again is not None and again.full is None), None)

    def _close(self, at_once: bool = False) -> None:
        """Free what the forward has read, `at_once` or when no backward needs it any more.

        Raises:
            RuntimeError: it was written to after the forward, which nobody will see.
        """
        current = self.current
        is_lost = current is not None and self._is_lost(current)
        self.current, self.is_kept, self._ran = None, False, set()
        if current is None:
            return
        current.close(at_once)
        if is_lost:
            raise RuntimeError(
                f"parameters of {self.bucket.label} were written while a module gave full ones, "
                "because they stayed gathered after a forward: what was written is lost. Write to "
                "those of parameters(), or inside summon_full_params(module), or call "
                "module.reshard() first. What gives them another shape (as resize_token_embeddings "
                "does) comes before fully_shard"
            )

    def _is_lost(self, current: Unsharded) -> bool:
        """Whether something was written to full parameters that stayed after a forward."""
        if current.is_resized:
            return True
        return self.is_kept and not current.code.held and current.state() != self._kept_state
