"""Padding: the value of elements of a bucket that no parameter has.

It is easy to tell in a segment or a gathered bucket, and must never reach a result: with
`SHARDC_PADDING=nan` whatever reads it shows. Unreduced gradients have zeros there instead, because
what users plug in (a custom reduction, a hook on reduced gradients) is given the flat tensor, and a
norm or a scale of it must not depend on padding. So it is in buckets that travel in blocks with a
scale: padding is zeros there.
"""

import os

import torch
from torch import Tensor

from shardc.runtime.layout.layout import BucketLayout, interval

PADDING = 42
"""The same as FSDP1's."""


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
    """A new segment or bucket, `(numel,)`: padding everywhere, until parameters are cut into it."""
    return torch.full((numel,), padding_value(dtype), dtype=dtype, device=device)


def without_padding(segment: Tensor, layout: BucketLayout, rank: int) -> Tensor:
    """`segment: (S,)` of `rank`, with zeros where it has no parameter if scales depend on it."""
    if layout.block and not segment.is_meta:
        first, cursor = rank * layout.segment, 0
        for size, slot in layout.split_sizes():
            if slot is None:
                start, stop = interval(cursor, size, layout.segment, rank)
                segment.detach()[cursor + start - first : cursor + stop - first].zero_()
            cursor += size
    return segment
