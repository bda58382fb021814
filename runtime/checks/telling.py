"""Warnings: the line that they name, and the rank that tells them."""

import sys
import warnings

import torch.distributed as dist

from shardc.runtime import compat
from shardc.runtime.checks.call_sites import is_library


def warn(text: str) -> None:
    """Warn at the line of the user's program that led here, if there is one."""
    level, frame = 2, sys._getframe(1)
    while frame.f_back is not None and is_library(frame):
        level, frame = level + 1, frame.f_back
    warnings.warn(text, stacklevel=level)


_warned: set[str] = set()


def warn_once(topic: str, text: str, by_one_rank: bool = False) -> None:
    """Warn of a topic once in this process; with `by_one_rank`, once in the job."""
    if topic not in _warned and (not by_one_rank or is_first_to_tell(topic)):
        warn(text)
    _warned.add(topic)


def is_first_to_tell(topic: str) -> bool:
    """Whether no rank of the job has told of the topic before; each rank asks once a topic."""
    world = dist.group.WORLD if dist.is_initialized() else None
    if world is None or not compat.has_others(world):
        return True
    try:
        return compat.group_store(world).add(f"shardc/told/{topic}", 1) == 1
    except (RuntimeError, ValueError):  # the store is gone
        return True
