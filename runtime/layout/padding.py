"""Padding: the value of elements of a bucket that belong to no parameter.

The value is easy to tell in a segment or a gathered bucket, and must never reach a result: with
`SHARDC_PADDING=nan` every op that reads padding shows. In unreduced gradients padding is zero,
because functions of users (a custom reduction, a hook on reduced gradients) are given the flat
tensor, and a norm or a scale of the tensor must not depend on padding. Padding is also zero in
buckets that travel in blocks with a scale.
"""

import os

import torch
from torch import Tensor

from shardc.runtime.layout.layout import BucketLayout, interval

PADDING = 42
"""The value that FSDP1 has, too."""


def padding_value(dtype: torch.dtype) -> float:
    """The value of padding of `dtype`: `SHARDC_PADDING` where it is set; integers keep `PADDING`.

    Raises:
        ValueError: `SHARDC_PADDING` is no number.
    """
    given = os.environ.get("SHARDC_PADDING")
    if not given:
        return PADDING
    try:
        value = float(given)
    except ValueError:
        raise ValueError(f"SHARDC_PADDING must be a number or 'nan', got {given!r}") from None
    return value if dtype.is_floating_point or dtype.is_complex else PADDING


def new_padded(numel: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """A new segment or bucket, `(numel,)`, all padding until parameters are copied into it."""
    return torch.full((numel,), padding_value(dtype), dtype=dtype, device=device)


def without_padding(segment: Tensor, layout: BucketLayout, rank: int) -> Tensor:
    """Write zeros into the padding of `segment: (S,)` of `rank`, if scales depend on it."""
    if layout.block and not segment.is_meta:
        first, cursor = rank * layout.segment, 0
        for size, slot in layout.split_sizes():
            if slot is None:
                start, stop = interval(cursor, size, layout.segment, rank)
                segment.detach()[cursor + start - first : cursor + stop - first].zero_()
            cursor += size
    return segment
