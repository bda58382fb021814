"""Graphs inside an eager checkpoint: a recomputation repeats the reads of the forward.

The signature and the inputs of a read may change after the forward: a forward that takes waiting
gradients leaves none to the next forward. Without repeated reads, the checkpoint would run another
graph, which saves other tensors.
"""

import functools
from collections.abc import Callable, Iterable
from typing import Any

from shardc.runtime import compat
from shardc.runtime.unit.graph_key import GraphKey, Reading

Noted = dict[GraphKey, list[Reading | None]]
"""The signature and inputs of each read in a checkpoint's forward, in order."""


def note_readings(keys: Iterable[GraphKey]) -> None:
    """Note the reads of a graph that runs now, so that checkpoints around it can repeat them."""
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
        finally:  # a checkpoint that has all its tensors stops by an exception
            for key, readings in before:
                key.read_again(readings)

    read_again.noted = noted  # type: ignore[attr-defined]
    return read_again, noted
