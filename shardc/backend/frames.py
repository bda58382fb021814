"""Room for the frames of deep calls, so that no loop crosses the end of a chunk of frames.

CPython (3.11 to 3.14, `push_chunk` in Python/pystate.c) keeps frames in chunks of 16 KiB. A call
that finds its chunk full maps a new chunk, and its return gives the chunk back to the system. A
loop at such a depth maps a chunk in every round: 40% of the time of planning a step of 80 blocks. A
frame larger than a chunk gets a chunk of its own, its size a power of two. The rest of this chunk
serves the calls inside.
"""

import functools
import sys
from collections.abc import Callable
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
R = TypeVar("R")

_SLOTS = 70_000
"""Words of 8 bytes: the frame takes a chunk of 1 MiB and leaves 460 KiB, some thousand frames."""


def with_room_for_frames(function: Callable[P, R]) -> Callable[P, R]:
    """Wrap `function`: each call begins a chunk of its own, which holds the frames inside."""
    if sys.version_info < (3, 11):
        return function  # frames lie on the heap, one by one

    def run(*args: P.args, **kwargs: P.kwargs) -> R:
        return function(*args, **kwargs)

    run.__code__ = run.__code__.replace(co_stacksize=_SLOTS)
    return functools.wraps(function)(run)
