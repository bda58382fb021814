"""The wire format of values in one byte each: the neighbours in a block share a scale.

    message of (R, S) values:  R rows of [elements | scales | exact values | padding], int8

`comm.quantise` makes such messages and reads them.
"""

from dataclasses import dataclass

import torch

from shardc.runtime.layout.layout import round_up

LARGEST = {torch.int8: 126.0, torch.float8_e4m3fn: 416.0}
"""The largest finite code of every dtype; the next code stands for infinity."""
_ALIGN = 16
"""Rows of a message begin at multiples of this many bytes."""


@dataclass(frozen=True)
class WireFormat:
    """The format of rows of floating-point values on the wire.

    NaN and infinities arrive as such, and leave the other values of their block alone.

    Attributes:
        dtype: the dtype of an element: `torch.int8` or `torch.float8_e4m3fn`.
        block: the number of neighbours that share a scale.
        exact: the number of values at the start of each row that travel as float32.
        seed: the seed of stochastic rounding; None rounds to the nearest.
    """

    dtype: torch.dtype
    block: int
    exact: int = 0
    seed: int | None = None

    def blocks(self, size: int) -> int:
        """Blocks of a row of `size` values."""
        assert (size - self.exact) % self.block == 0
        return (size - self.exact) // self.block

    def row_of(self, size: int, rows: int) -> int:
        """Values in each of `rows` rows of whole blocks, which together hold `size` values."""
        return round_up(size - self.exact * rows, rows * self.block) // rows + self.exact

    def row_bytes(self, size: int) -> int:
        """Bytes of the message of a row of `size` values."""
        nbytes = self.blocks(size) * (self.block + 2) + 4 * self.exact
        return round_up(nbytes, _ALIGN)

    @property
    def error(self) -> float:
        """The largest error of an element, as a share of the largest finite value of its block.

        In float8 this is the bound for the largest values; a smaller value is off by at most a
        sixteenth of itself.
        """
        nearest = 0.5 / LARGEST[torch.int8] if self.dtype == torch.int8 else 1 / 16
        scale = 1 + 2.0**-7  # two bytes of a float32, rounded up
        return scale * nearest * (1 if self.seed is None else 2)
