"""Room for the frames of deep calls, so that no loop lies across the end of a chunk of them.

CPython (3.11 to 3.14, `push_chunk` in Python/pystate.c) keeps frames in chunks of 16 KiB. A call
that finds its chunk full maps a new one, and its return gives that back to the system. A loop at
such a depth does so in every round; that was 40% of the time of planning a step of 80 blocks. A
frame that is larger than a chunk gets one of its own, a power of two, and what remains of it serves
the calls inside.
"""

import functools
import sys
from collections.abc import Callable
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
R = TypeVar("R")

_SLOTS = 70_000
"""Of 8 bytes: such a frame takes a chunk of 1 MiB and leaves 460 KiB, some thousand frames."""


def with_room_for_frames(function: Callable[P, R]) -> Callable[P, R]:
    """`function`, whose calls begin a chunk of frames of their own, which holds all inside."""
    if sys.version_info < (3, 11):
        return function  # frames lie on the heap, one by one

    def run(*args: P.args, **kwargs: P.kwargs) -> R:
        return function(*args, **kwargs)

    run.__code__ = run.__code__.replace(co_stacksize=_SLOTS)
    return functools.wraps(function)(run)
