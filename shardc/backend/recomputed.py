"""Graphs inside of a checkpoint that was not compiled: computed again, they read what they read.

What a read needs may have changed since: a forward that takes gradients that waited leaves none to
the next one. The checkpoint would run another graph, which saves other tensors.
"""

import functools
from collections.abc import Callable, Iterable
from typing import Any

from shardc.runtime import compat
from shardc.runtime.unit.graph_key import GraphKey, Reading

Noted = dict[GraphKey, list[Reading | None]]
"""What the reads of a checkpoint's forward needed, in order."""


def note_readings(keys: Iterable[GraphKey]) -> None:
    """A graph reads the buckets of these now; checkpoints around it will have it do so again."""
    keys = list(keys)
    for frame in compat.checkpoint_frames():
        noted: Noted | None = getattr(frame.recompute_fn, "noted", None)
        if noted is None:
            frame.recompute_fn, noted = _reading_again(frame.recompute_fn)
        for key in keys:
            noted.setdefault(key, []).append(key.to_read_again())
    for key in keys:
        key.been_read()


def _reading_again(recompute: Callable[..., Any]) -> tuple[Callable[..., Any], Noted]:
    noted: Noted = {}

    @functools.wraps(recompute)
    def read_again(*args: Any, **kwargs: Any) -> Any:
        before: list[tuple[GraphKey, list[Reading | None]]] = []
        try:
            before += ((key, key.read_again(readings)) for key, readings in noted.items())
            return recompute(*args, **kwargs)
        finally:  # a checkpoint stops when it has what it needs, by an exception
            for key, readings in before:
                key.read_again(readings)

    read_again.noted = noted  # type: ignore[attr-defined]
    return read_again, noted
