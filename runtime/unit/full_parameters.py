"""A bucket's full parameters outside of graphs: of an eager forward, or held from step to step.

In an eager forward the first read gathers the bucket, and the end of the forward frees it. Where
the bucket stays gathered (`reshard_after_forward=False`), its backward or `reshard()` frees it.
Until then a read gives full parameters. A read in a backward gives full parameters too: recomputed
code may read parameters of modules that it does not call.

A bucket that is held (`unshard()`, `set_reshard_after_backward(False)`) is an input of compiled
graphs too, and is gathered again after a write to its parameters.
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
        stays: whether a step holds the bucket from call to call; a backward does not free it, and
            a read between calls gives the sharded parameter.
        depth: the number of running eager forwards of modules that read the bucket.
        opened: whether reads outside a forward give full parameters, after `unshard()`.
        current: full parameters that the running eager forward read, or that stay of an earlier
            one.
        is_kept: whether `current` stays until a backward.
        is_shared: whether one forward reads the bucket in several graphs, or in a graph and in
            eager code.
        expected: the gathers of backwards to come.
        orders: by phase, the order of gathers in the last pass that began with this bucket.
    """

    def __init__(self, bucket: "Bucket") -> None:
        self.bucket = bucket
        self.held: Tensor | None = None
        self.stays = False
        self.depth = 0
        self.opened = False
        self.current: Unsharded | None = None
        self.is_kept = False
        self.is_shared = False
        self._is_left = False  # `current` stays of an earlier forward, and was not read since
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
        """Gather the bucket, unless it is held, and hold it. Every rank must call it.

        Without `wait`, the first read waits.
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
        """Hold `full: (W*S,)`, the bucket as gathered at version `written`, if its dtype fits."""
        if self.held is None and full.dtype == self.bucket.key.code.compute_dtype:
            self._hold(full, written)

    def _hold(self, full: Tensor | None, written: object) -> None:
        self.held, self._version = full, written
        self.bucket.key.refresh()

    def finish(self) -> None:
        """Wait for the gather that `hold` started."""
        if self._started is not None:
            self._wait(self._started)
            self._started = None

    @torch.no_grad()
    def renew(self) -> None:
        """Gather a held bucket again if its parameters were written since."""
        self.finish()
        if self.held is not None and self._version != self.bucket.version:
            full = self._wait(self._start())
            if self.bucket.key.code.extension is None:
                self.held.copy_(full)  # an input of compiled graphs
            else:
                self.held = full
            self._version = self.bucket.version

    def note_renewed(self) -> None:
        """Note that the held bucket has the values that its parameters have now."""
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
        """Free the held bucket and, outside of a forward, the parameters that were read."""
        self.finish()
        self.shut()
        if self.held is not None:
            self._hold(None, None)

    def shut(self) -> None:
        """End `unshard()`: from now on a read outside of a forward gives the sharded parameter."""
        self.opened = False
        if self.depth == 0:
            self._close(at_once=True)

    def reset(self) -> None:
        """Forget an interrupted step, and free the gathered bucket."""
        self.depth, self.is_kept = 0, False
        self.drop()

    @property
    def is_readable(self) -> bool:
        """Whether a read gives full parameters.

        A read does so in a forward, after `unshard()`, in a backward (except in hooks that are
        given gradients), and while the bucket stays gathered and was not written since.
        """
        if self.depth > 0 or self.opened:
            return True
        if compat.in_backward() and not self.bucket.gradients.delivers:
            return True
        if self.current is not None:
            return self.current.written == self.bucket.version
        is_open = self.held is not None and not self.stays
        return is_open and self._version == self.bucket.version

    @property
    def _is_behind(self) -> bool:
        """Whether parameters that were read outside of a forward were written since."""
        if self.current is None or self.depth > 0 or not self.opened or compat.in_backward():
            return False
        return self.current.written != self.bucket.version

    def read(self, index: int) -> Tensor:
        """The full parameter `index`; outside of a forward and a backward, with its unreduced
        gradient: its part of the sum of `no_sync`, or None."""
        full = self.views()[index]
        if self.depth == 0 and not compat.in_backward():
            full.grad = self.bucket.gradients.unreduced(index, full.dtype)
        return full

    @compat.untraced
    def views(self) -> tuple[Tensor, ...]:
        """The full parameters; the first read in an eager forward gathers them.

        After `unshard()`, outside of a forward, the first read after a write gathers them again.
        """
        if self._is_behind:
            self._close()
        self._is_left = False
        if self.current is None:
            bucket = self.bucket
            self._note_sharing()
            if bucket.segment.is_meta:
                refuse_meta(slot.name for slot in bucket.layout.slots)
            compat.resolve_group(bucket.ranks.shard)  # raises if the group is gone
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
            if self.depth == 0 and compat.in_backward():  # recomputed code reads
                backward_pass().opened.append(bucket)
        return self.current.views

    def enter(self) -> None:
        """Begin an eager forward of a module that reads the bucket."""
        if self.depth == 0:
            if not self._serves_again():
                self._close()
            self._graphs, self._is_left = 0, self.is_kept
        self.depth += 1

    @property
    def is_read(self) -> bool:
        """Whether the running eager forward has read the bucket.

        A bucket that an earlier forward left gathered does not count: ranks that compile a graph in
        different steps must make the same graph.
        """
        return self.depth > 0 and self.current is not None and not self._is_left

    def _serves_again(self) -> bool:
        """Whether the next forward can use the full parameters that an earlier forward read."""
        if self.current is None or self.current.written != self.bucket.version:
            return False
        if not (self.is_kept or self._ran or compat.in_backward()) or self._is_lost(self.current):
            return False
        code = self.bucket.key.reading_code()
        return bool(replace(self.current.code, reduction=code.reduction) == code)

    def note_graph(self) -> None:
        """Note that a graph runs that gathers the bucket by itself."""
        if self.depth > 0:
            self._note_sharing()
            self._graphs += 1

    def _note_sharing(self) -> None:
        """Make the bucket shared if a graph of this forward has read it before.

        From then on the eager runtime gathers the bucket for all graphs and eager code of a
        forward.
        """
        if self._graphs > 0 and not self.is_shared:
            self.is_shared = True
            self.bucket.key.refresh()

    def leave(self, module: object = None, raised: bool = False) -> bool:
        """End an eager forward of a module that reads the bucket; the last one frees the bucket.

        Where the unit does not reshard, the bucket stays gathered until a backward. In a unit of
        several modules the bucket stays until all modules have run, or the outermost forward ends.

        Returns:
            Whether the bucket stays gathered after the last one.
        """
        self.depth -= 1
        if self.depth > 0 or self.current is None:
            return False
        if not raised or compat.in_backward():  # an exception may stop a recomputation
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
        """Whether the running forward has written to the full parameters that it read."""
        return self.current is not None and self.depth > 0 and self.current.is_written

    def hide_gradients(self) -> None:
        """Take outdated unreduced gradients off the full parameters read before."""
        for full in self.current.views if self.current is not None else ():
            full.grad = None

    def end_forward(self, raised: bool) -> None:
        """End the outermost forward: free a bucket that stayed for modules that did not run.

        After an exception free a bucket that stayed for a backward too: ranks may have stopped at
        different ops.
        """
        if self.depth == 0 and (raised or not self.is_kept):
            self._close()

    def end_backward(self) -> None:
        """Free the bucket that stayed for a backward, or hold it without `reshard_after_backward`.

        Nothing happens while a forward runs.
        """
        if self.depth > 0 or self.current is None:
            return
        if not self.bucket.settings.reshard_after_backward:
            self.keep(self.current.full, self.current.written)
        self._close(at_once=True)

    def remember(self, phase: str, gathered: Sequence["Bucket"]) -> None:
        """Keep the order of gathers of a pass that began with this bucket."""
        self.orders[phase] = tuple(weakref.ref(bucket) for bucket in gathered)

    def remembered(self, phase: str) -> tuple["Bucket", ...]:
        """The order of gathers in the last pass that began with this bucket.

        It is empty if a bucket of that order is gone.
        """
        known = self.orders.get(phase, ())
        buckets = tuple(bucket for ref in known if (bucket := ref()) is not None)
        return buckets if len(buckets) == len(known) else ()

    def expect(self, again: Again) -> None:
        """Note the gather of a backward to come."""
        self.expected = [known for known in self.expected if known() is not None]
        self.expected.append(weakref.ref(again))

    def next_again(self) -> Again | None:
        """The gather of the next backward that reads the bucket, or None."""
        alive = (reference() for reference in reversed(self.expected))
        return next((again for again in alive if again is not None and again.full is None), None)

    def _close(self, at_once: bool = False) -> None:
        """Free the full parameters, `at_once` or when no backward needs them any more.

        Raises:
            RuntimeError: a full parameter was written after the forward, and the write is lost.
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
                "because they stayed gathered after a forward: the writes are lost. Write to "
                "parameters(), or inside summon_full_params(module), or call "
                "module.reshard() first. What gives them another shape (as resize_token_embeddings "
                "does) comes before fully_shard"
            )

    def _is_lost(self, current: Unsharded) -> bool:
        """Whether full parameters that stayed after a forward were written or resized."""
        if current.is_resized:
            return True
        return self.is_kept and not current.code.held and current.state() != self._kept_state
