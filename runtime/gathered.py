"""A bucket's full parameters at hand: for an eager forward, or held from one step to the next.

Inside an eager forward the first read gathers the bucket and the end of the forward frees it. What
is held (`unshard()`, `set_reshard_after_backward(False)`) is given to compiled graphs too, and is
gathered again where the parameters were written since.
"""

import functools
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from shardc.runtime import compat
from shardc.runtime.accumulate import flush_when_done
from shardc.runtime.meta import refuse_meta
from shardc.runtime.unshard import gather, unshard


class Gathered:
    """What is gathered of one bucket.

    Attributes:
        held: the whole bucket, `(W*S,)`, where it stays gathered beyond a forward or backward.
        depth: how many eager forwards that read it are running.
        opened: whether reads outside a forward give full parameters, since `unshard()`.
    """

    def __init__(self, bucket: Any) -> None:
        self.bucket = bucket
        self.held: Tensor | None = None
        self.depth = 0
        self.opened = False
        self._version = (-1, -1)
        self._views: tuple[Tensor, ...] | None = None

    @property
    def is_held(self) -> bool:
        """Whether the bucket stays gathered beyond a forward or backward."""
        return self.held is not None

    @torch.no_grad()
    def hold(self) -> None:
        """Gather the bucket, if it is not, and keep it so. Every rank must call it."""
        if self.held is None:
            self.held = gather(self.bucket.segment.detach(), self.bucket.code)
            self._version = self._written()
            self.bucket.refresh_signature()

    @torch.no_grad()
    def renew(self) -> None:
        """Gather what is held again if the parameters were written since."""
        if self.held is not None and self._version != self._written():
            self.held.copy_(gather(self.bucket.segment.detach(), self.bucket.code))
            self._version = self._written()

    def drop(self) -> None:
        """Free what is held."""
        self.opened = False
        if self.depth == 0:
            self._views = None
        if self.held is not None:
            self.held = None
            self.bucket.refresh_signature()

    def reset(self) -> None:
        """Forget a step that was interrupted."""
        self._views, self.depth, self.opened = None, 0, False

    def _written(self) -> tuple[int, int]:
        return self.bucket.segment._version, self.bucket.updates()

    @torch.compiler.disable
    def views(self) -> tuple[Tensor, ...]:
        """The full parameters, gathered at the first read inside an eager forward."""
        if self._views is None:
            if self.bucket.segment.is_meta:
                refuse_meta(slot.name for slot in self.bucket.layout.slots)
            compat.resolve_group(self.bucket.group)  # says so if it is gone
            self.renew()
            # The first read may lie inside `no_grad` or `vmap` and a later one outside: what is
            # cached serves both.
            with compat.outside_function_transforms(), torch.enable_grad():
                signature, extras = self.bucket.reading()
                views = unshard(self.bucket.segment, signature, *extras)
                if self.bucket.segment.requires_grad:
                    _on_backward(views, self.bucket, self.bucket.gradients.lend())
                self._views = tuple(
                    view if placed is None else placed.wrap(view)
                    for view, placed in zip(views, self.bucket.placed, strict=True)
                )
        return self._views

    def enter(self) -> None:
        """An eager forward of a module that reads the bucket begins."""
        if self.depth == 0:
            self._views = None
        self.depth += 1

    def leave(self) -> None:
        """A module that counted itself in `depth` ends; the last one frees what was gathered."""
        self.depth -= 1
        if self.depth == 0:
            self._views = None


def _on_backward(
    views: Sequence[Tensor], bucket: Any, lent: tuple[Tensor | None, Tensor | None]
) -> None:
    """Note each full parameter as used when its own gradient is computed."""
    begun: list[bool] = []

    def note(grad: Tensor | None, index: int) -> None:
        if grad is None:
            return
        if not begun:
            begun.append(True)
            bucket.gradients.begin_backward(lent)
            flush_when_done()
        bucket.gradients.note_used([index])

    for index, view in enumerate(views):
        if view.requires_grad:
            view.register_hook(functools.partial(note, index=index))
