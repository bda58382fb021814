"""Messages of values in one byte each (`WireFormat`), made and read in ops that Inductor fuses.

A scale is two bytes, the upper half of a float32 that is rounded up, so that no element is beyond
the largest code; `microscale` has the published formats, with scales of their own. All ops but one
maximum a block are elementwise: a message takes one or two kernels to make, and to read.
"""

import torch
from torch import Tensor

from shardc.runtime.comm.microscale import decode_blocks, encode_blocks
from shardc.runtime.layout.wire_format import LARGEST, WireFormat

_INFINITE = {torch.int8: 127.0, torch.float8_e4m3fn: 448.0}
_NAN = -128
"""The code for NaN in int8; float8 has a NaN."""


def encode(values: Tensor, form: WireFormat) -> Tensor:
    """The message of `values: (R, S)`, int8 of `(R, form.row_bytes(S))`."""
    rows, size = values.shape
    count = form.blocks(size)
    blocks = values[:, form.exact :].float().view(rows, count, form.block)
    sizes = blocks.abs()
    finite = sizes < torch.inf  # false for NaN
    top = torch.where(finite, sizes, 0.0).amax(-1, keepdim=True)
    if form.scale is not None:
        codes, scales, factor = encode_blocks(blocks, finite, top, form)
        parts = [codes, scales]
        if form.scale != torch.float8_e8m0fnu:
            parts += _bytes(factor.view(torch.int32), 4)
    else:
        high = _upper_half_rounded_up(top / LARGEST[form.dtype])
        codes = _codes(blocks, finite, 1 / _from_upper_half(high), form)
        parts = [codes.view(rows, -1), *_bytes(high.view(rows, count), 2)]
    if form.exact:
        parts += _bytes(values[:, : form.exact].float().view(torch.int32), 4)
    padding = form.row_bytes(size) - sum(part.shape[1] for part in parts)
    if padding:
        parts.append(codes.new_zeros(rows, padding))
    return torch.cat(parts, dim=1)


def decode(
    message: Tensor, size: int, form: WireFormat, dtype: torch.dtype = torch.float32
) -> Tensor:
    """The values of a message: `(R, size)`, computed in float32."""
    rows, count = message.shape[0], form.blocks(size)
    parts = form.parts(size)
    codes, scales, exact, _ = message.split([*parts, message.shape[1] - sum(parts)], dim=1)
    if form.scale is not None:
        scales, factor = scales.split([count, parts[1] - count], dim=1)
        times = _from_bytes(factor, 4).view(torch.float32) if factor.shape[1] else factor
        values = decode_blocks(codes, scales, times, form)
    else:
        scale = _from_upper_half(_from_bytes(scales, 2)).view(rows, count, 1)
        values = _values(codes.view(rows, count, form.block), form) * scale
    values = values.view(rows, -1).to(dtype)
    if not form.exact:
        return values
    return torch.cat([_from_bytes(exact, 4).view(torch.float32).to(dtype), values], dim=1)


def _codes(blocks: Tensor, finite: Tensor, inverse: Tensor, form: WireFormat) -> Tensor:
    """The codes of the elements of blocks, as int8; `inverse` is 1 / scale of each block."""
    largest, infinite = LARGEST[form.dtype], _INFINITE[form.dtype]
    scaled = blocks * inverse
    is_nan = blocks != blocks  # C++ asks `isnan` of one element after the other
    if form.dtype == torch.int8:
        if form.seed is None:
            scaled = scaled.round()
        else:
            rounded = _rounded_at_random(scaled, blocks, form).clamp(-largest, largest)
            scaled = torch.where(finite, rounded, scaled)
        return torch.where(is_nan, float(_NAN), scaled.clamp(-infinite, infinite)).to(torch.int8)
    if form.seed is not None:
        scaled = _cut_at_random(scaled, blocks, form).clamp(-largest, largest)
    special = torch.where(blocks > 0, infinite, -infinite)
    special = torch.where(is_nan, blocks, special)
    return torch.where(finite, scaled, special).to(form.dtype).view(torch.int8)


def _values(codes: Tensor, form: WireFormat) -> Tensor:
    """The values of codes, without their scale."""
    if form.dtype == torch.int8:
        values = codes.float()  # compared as floats: C++ compares vectors of bytes one by one
        values = torch.where(values == _NAN, values * torch.nan, values)
    else:
        values = codes.view(form.dtype).float()
    beyond = values.abs() == _INFINITE[form.dtype]
    return torch.where(beyond, values * torch.inf, values)


# -- stochastic rounding -------------------------------------------------------------------------

_MIX = 0x2C1B3C6D
"""An odd number whose multiples, as 32 bits, look random."""
_FLOAT8_CUTS = 20
"""Bits of a float32's mantissa that float8_e4m3fn does not have."""


def _rounded_at_random(scaled: Tensor, values: Tensor, form: WireFormat) -> Tensor:
    """Round to the whole number below or above; the odds of each are the distance to the other."""
    return (scaled + _random_bits(values, form, 24).float() * 2.0**-24).floor()


def _cut_at_random(scaled: Tensor, values: Tensor, form: WireFormat) -> Tensor:
    """Round at random to the mantissa of float8; its subnormal numbers are not rounded here."""
    bits = scaled.view(torch.int32) + _random_bits(values, form, _FLOAT8_CUTS)
    return (bits & -(1 << _FLOAT8_CUTS)).view(torch.float32)


def _random_bits(values: Tensor, form: WireFormat, count: int) -> Tensor:
    """`count` bits as int32 for each value: a hash of the value, its place in its row and the seed.

    A value at a place always gives the same bits, so a second gather gives the same bucket.
    """
    assert form.seed is not None
    places = torch.arange(values[0].numel(), device=values.device, dtype=torch.int32)
    mixed = values.view(torch.int32) ^ (places.view(values[0].shape) * _MIX)
    mixed = mixed ^ (form.seed & 0x7FFFFFFF)
    for _ in range(2):
        mixed = (mixed ^ ((mixed >> 15) & 0x1FFFF)) * _MIX
    return (mixed >> (32 - count)) & ((1 << count) - 1)


# -- bytes ---------------------------------------------------------------------------------------


def _upper_half_rounded_up(values: Tensor) -> Tensor:
    """The upper 16 bits of float32 values that are not negative, rounded up.

    The result is at least that of the smallest normal number.
    """
    smallest = torch.finfo(torch.float32).tiny
    return (values.clamp_min(smallest).view(torch.int32) + 0xFFFF) >> 16


def _from_upper_half(high: Tensor) -> Tensor:
    return (high << 16).view(torch.float32)


def _bytes(words: Tensor, count: int) -> list[Tensor]:
    """The lower `count` bytes of int32 `(R, N)`, each as int8 `(R, N)`."""
    planes = [(((words >> 8 * i) & 0xFF) ^ 0x80) - 0x80 for i in range(count)]
    return [plane.to(torch.int8) for plane in planes]


def _from_bytes(planes: Tensor, count: int) -> Tensor:
    """The integers that `_bytes` was given, from its results side by side in each row."""
    first, *others = planes.split(planes.shape[1] // count, dim=1)[:count]
    words = first.to(torch.int32) & 0xFF
    for i, plane in enumerate(others, 1):
        words = words | ((plane.to(torch.int32) & 0xFF) << 8 * i)
    return words
