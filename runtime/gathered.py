"""A bucket's full parameters at hand: for an eager forward, or held from one step to the next.

Inside an eager forward the first read gathers the bucket and the end of the forward frees it. What
is held (`unshard()`, `set_reshard_after_backward(False)`) is given to compiled graphs too, and is
gathered again where the parameters were written since.
"""

import weakref
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from shardc.runtime import compat
from shardc.runtime.collectives import Started, naming
from shardc.runtime.eager import gathers
from shardc.runtime.meta import refuse_meta
from shardc.runtime.progress import Label
from shardc.runtime.unshard import start_gather
from shardc.runtime.unsharded import Again, Unsharded


class Gathered:
    """What is gathered of one bucket.

    Attributes:
        held: the whole bucket, `(W*S,)`, where it stays gathered beyond a forward or backward.
        depth: how many eager forwards that read it are running.
        opened: whether reads outside a forward give full parameters, since `unshard()`.
        current: what the eager forward that runs has read.
        is_shared: whether several graphs of one forward read the bucket, or one and eager code.
        expected: what backwards to come will gather again.
        orders: where a pass began with this bucket, what it gathered, by phase.
    """

    def __init__(self, bucket: Any) -> None:
        self.bucket = bucket
        self.held: Tensor | None = None
        self.depth = 0
        self.opened = False
        self.current: Unsharded | None = None
        self.is_shared = False
        self._graphs = 0
        self.expected: list[weakref.ref[Again]] = []
        self.orders: dict[str, tuple[weakref.ref[Any], ...]] = {}
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
            self._started = self._start()
            self.held = self._started.early
            self._version = self.bucket.version
            self.bucket.refresh_signature()
        if wait:
            self.finish()

    def keep(self, full: Tensor) -> None:
        """Hold `full: (W*S,)`, the bucket as a backward has just gathered it."""
        if self.held is None:
            self.held, self._version = full, self.bucket.version
            self.bucket.refresh_signature()

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
            self.held.copy_(self._wait(self._start()))
            self._version = self.bucket.version

    def _start(self) -> Started:
        with (
            naming(self.bucket.ranks.everyone),
            Label("all_gather", (self.bucket.label,), "forward"),
        ):
            return start_gather(self.bucket.segment.detach(), self.bucket.code)

    def _wait(self, started: Started) -> Tensor:
        label = Label("all_gather", (self.bucket.label,), "forward", waits=True)
        with naming(self.bucket.ranks.everyone), label:
            return started.wait()

    def drop(self) -> None:
        """Free what is held."""
        self.finish()
        self.opened = False
        if self.depth == 0:
            self._close()
        if self.held is not None:
            self.held = None
            self.bucket.refresh_signature()

    def reset(self) -> None:
        """Forget a step that was interrupted."""
        self._close()
        self.depth, self.opened = 0, False

    @torch.compiler.disable
    def views(self) -> tuple[Tensor, ...]:
        """The full parameters, gathered at the first read inside an eager forward."""
        if self.current is None:
            bucket = self.bucket
            self._note_sharing()
            if bucket.segment.is_meta:
                refuse_meta(slot.name for slot in bucket.layout.slots)
            compat.resolve_group(bucket.group)  # says so if it is gone
            self.renew()
            code = bucket.reading_code()
            with (
                compat.outside_selective_checkpoints(),
                compat.outside_function_transforms(),
                torch.inference_mode(False),
                torch.no_grad(),
            ):
                full = self.held if code.held else gathers().gather(bucket)
                assert full is not None
                self.current = Unsharded(bucket, code, full)
        return self.current.views

    def enter(self) -> None:
        """An eager forward of a module that reads the bucket begins."""
        if self.depth == 0:
            self._close()
            self._graphs = 0
        self.depth += 1

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
            self.bucket.refresh_signature()

    def leave(self) -> None:
        """A module that counted itself in `depth` ends; the last one frees what was gathered."""
        self.depth -= 1
        if self.depth == 0:
            self._close()

    def remember(self, phase: str, gathered: Sequence[Any]) -> None:
        """A pass that began with this bucket gathered these."""
        self.orders[phase] = tuple(weakref.ref(bucket) for bucket in gathered)

    def remembered(self, phase: str) -> tuple[Any, ...]:
        """What the last such pass gathered; nothing, where a model that took part is gone."""
        buckets = tuple(reference() for reference in self.orders.get(phase, ()))
        return () if None in buckets else buckets

    def expect(self, again: Again) -> None:
        """A backward to come will gather `again`."""
        self.expected = [known for known in self.expected if known() is not None]
        self.expected.append(weakref.ref(again))

    def next_again(self) -> Again | None:
        """What the next backward that reads the bucket will gather again."""
        self.expected = [r for r in self.expected if r() is not None]
        alive = (reference() for reference in reversed(self.expected))
        return next((again for again in alive if again is not None and again.full is None), None)

    def _close(self) -> None:
        if self.current is not None:
            self.current.close()
            self.current = None
