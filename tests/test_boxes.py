"""Intervals as boxes: they cover the interval exactly, in order, and there are at most 2n-1."""

import math

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from shardc.runtime.layout.interval_boxes import Box, boxes_of

settings.register_profile("shardc", deadline=None)  # rank processes may keep all cores busy
settings.load_profile("shardc")

shapes = st.lists(st.integers(0, 6), max_size=4).map(tuple)


@given(shapes, st.data())
def test_boxes_cover_the_interval(shape, data):
    numel = math.prod(shape)
    start = data.draw(st.integers(0, numel))
    stop = data.draw(st.integers(start, numel))
    flat = torch.arange(numel)
    covered = []
    for box in boxes_of(shape, start, stop):
        assert len(box.offsets) == len(box.sizes) == len(shape)
        index = tuple(slice(o, o + s) for o, s in zip(box.offsets, box.sizes, strict=True))
        elements = flat.view(shape)[index].reshape(-1)
        assert elements.numel() == box.numel > 0
        # contiguous in the flattened order: a view of the local part serves the box
        assert torch.equal(elements, flat[box.start : box.start + box.numel])
        covered += elements.tolist()
    assert covered == list(range(start, stop))
    assert len(list(boxes_of(shape, start, stop))) <= max(1, 2 * len(shape) - 1)


def test_exact_boxes():
    assert list(boxes_of((), 0, 1)) == [Box((), (), 0)]
    assert list(boxes_of((), 0, 0)) == []
    assert list(boxes_of((5,), 2, 4)) == [Box((2,), (2,), 2)]
    assert list(boxes_of((0, 3), 0, 0)) == []
    assert list(boxes_of((4, 3), 3, 9)) == [Box((1, 0), (2, 3), 3)]
    assert list(boxes_of((4, 3), 1, 11)) == [
        Box((0, 1), (1, 2), 1), Box((1, 0), (2, 3), 3), Box((3, 0), (1, 2), 9),
    ]  # fmt: skip
    assert list(boxes_of((3, 2, 4), 3, 21)) == [
        Box((0, 0, 3), (1, 1, 1), 3), Box((0, 1, 0), (1, 1, 4), 4), Box((1, 0, 0), (1, 2, 4), 8),
        Box((2, 0, 0), (1, 1, 4), 16), Box((2, 1, 0), (1, 1, 1), 20),
    ]  # fmt: skip
