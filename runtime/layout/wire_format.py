"""The wire format of values in one byte each, or half a byte: neighbours in a block share a scale.

    message of (R, S) values:  R rows of [elements | scales | exact values | padding], int8

`comm.quantise` makes such messages and reads them.
"""

from dataclasses import dataclass
from typing import NamedTuple

import torch

from shardc.runtime.checks.values import Microscaled
from shardc.runtime.layout.layout import round_up

LARGEST = {torch.int8: 126.0, torch.float8_e4m3fn: 416.0}
"""The largest finite code of every dtype; the next code stands for infinity."""
_ALIGN = 16
"""Rows of a message begin at multiples of this many bytes."""


class Microscaling(NamedTuple):
    """A published format: the dtype of elements, the block, and the dtype of a block's scale."""

    dtype: torch.dtype
    block: int
    scale: torch.dtype


MICROSCALING: dict[Microscaled, Microscaling] = {
    "mxfp8": Microscaling(torch.float8_e4m3fn, 32, torch.float8_e8m0fnu),
    "mxfp4": Microscaling(torch.float4_e2m1fn_x2, 32, torch.float8_e8m0fnu),
    "nvfp4": Microscaling(torch.float4_e2m1fn_x2, 16, torch.float8_e4m3fn),
}
"""The formats of `comm.microscale`."""


@dataclass(frozen=True)
class WireFormat:
    """The format of rows of floating-point values on the wire.

    NaN and infinities arrive as such, and leave the other values of their block alone; a block of a
    microscaling format arrives as NaN then.

    Attributes:
        dtype: the dtype of an element: `torch.int8`, or that of a microscaling format.
        block: the number of neighbours that share a scale.
        exact: the number of values at the start of each row that travel as float32.
        seed: the seed of stochastic rounding; None rounds to the nearest.
        scale: the dtype of scales in a microscaling format; None: the upper half of a float32.
    """

    dtype: torch.dtype
    block: int
    exact: int = 0
    seed: int | None = None
    scale: torch.dtype | None = None

    def blocks(self, size: int) -> int:
        """Blocks of a row of `size` values."""
        assert (size - self.exact) % self.block == 0
        return (size - self.exact) // self.block

    def row_of(self, size: int, rows: int) -> int:
        """Values in each of `rows` rows of whole blocks, which together hold `size` values."""
        return round_up(size - self.exact * rows, rows * self.block) // rows + self.exact

    def parts(self, size: int) -> tuple[int, int, int]:
        """Bytes of elements, of scales and of exact values in the message of a row."""
        count = self.blocks(size)
        elements = count * self.block // (2 if self.dtype == torch.float4_e2m1fn_x2 else 1)
        if self.scale is None:
            return elements, 2 * count, 4 * self.exact
        factor = 0 if self.scale == torch.float8_e8m0fnu else 4
        return elements, count + factor, 4 * self.exact

    def row_bytes(self, size: int) -> int:
        """Bytes of the message of a row of `size` values."""
        return round_up(sum(self.parts(size)), _ALIGN)

    @property
    def error(self) -> float:
        """The largest error of an element, as a share of the largest finite value of its block.

        In float8 this is the bound for the largest values; a smaller value is off by at most a
        sixteenth of itself. In four bits the scale of NVFP4 may be rounded up by a sixteenth; a
        block of values below a 28,000th of the largest in the row may arrive as zeros.
        """
        if self.dtype == torch.float4_e2m1fn_x2:
            return 1 / 5 if self.scale == torch.float8_e8m0fnu else 1 / 6 * (1 + 1 / 16)
        nearest = 0.5 / LARGEST[torch.int8] if self.dtype == torch.int8 else 1 / 16
        scale = 1 + 2.0**-7  # two bytes of a float32, rounded up
        return scale * nearest * (1 if self.seed is None else 2)
