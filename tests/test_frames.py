"""Loops in deep calls do not map memory in every round."""

import resource
import sys

from shardc.backend.frames import with_room_for_frames

ROUNDS = 500


def _called():
    return None


def _faults():
    """Page faults of a loop of calls: one each where a call maps memory for its frame."""
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(ROUNDS):
        _called()
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before


def _at_depth(depth, call):
    return call() if not depth else _at_depth(depth - 1, call)


def _most_faults():
    return max(_at_depth(depth, _faults) for depth in range(400))


def test_no_depth_maps_memory_in_every_round():
    assert with_room_for_frames(_most_faults)() < ROUNDS / 4
    if sys.version_info < (3, 15):
        assert _most_faults() >= ROUNDS, "else Python keeps its chunks: frames.py can go"
