"""Microscaling formats on the wire: MXFP8, MXFP4 and NVFP4, bit for bit.

MXFP8 and MXFP4 (OCP Microscaling Formats 1.0) have 32 elements in float8 (e4m3) or 4 bits (e2m1) in
a block. The scale of a block is a power of two in one byte (e8m0): the smallest that brings no
element beyond the largest code. NVFP4 has 16 elements of 4 bits in a block. Its scale is a float8
(e4m3), times a float32 that belongs to the whole row of a message.

A block with a NaN or an infinity has the scale NaN: all of its values arrive as NaN.
"""

import torch
from torch import Tensor

from shardc.runtime.layout.wire_format import WireFormat

_MOST = {torch.float8_e4m3fn: 448.0, torch.float4_e2m1fn_x2: 6.0}
"""The largest code of an element."""
_MOST_SCALE = 448.0
_LEAST_SCALE = 2.0**-6
"""The smallest normal number of e4m3."""
_NAN_EXPONENT = 0xFF


def encode_blocks(
    blocks: Tensor, finite: Tensor, top: Tensor, form: WireFormat
) -> tuple[Tensor, Tensor, Tensor]:
    """Codes, scales and rows' factors of float32 blocks: int8, int8, float32.

    Args:
        blocks: (R, C, block); `finite` tells its finite values.
        top: (R, C, 1), the largest finite value of each block.

    Returns:
        Codes of (R, bytes), scales of (R, C), and factors of (R, 1).
    """
    rows = blocks.shape[0]
    broken = ~finite.all(-1, keepdim=True)
    most = _MOST[form.dtype]
    if form.scale == torch.float8_e8m0fnu:
        factor = torch.ones_like(top[:, :1])
        exponent = _exponent_rounded_up(top / most)
        inverse = 1 / _power_of_two(exponent)
        scales = _as_byte(torch.where(broken, _NAN_EXPONENT, exponent))
    else:
        largest = top.amax(1, keepdim=True)
        factor = torch.where(largest > 0, largest / (_MOST_SCALE * most), 1.0)
        scale = (top / most / factor).clamp(_LEAST_SCALE, _MOST_SCALE).to(torch.float8_e4m3fn)
        inverse = 1 / factor / scale.float()
        scales = torch.where(broken, torch.nan, scale.float()).to(scale.dtype).view(torch.int8)
    scaled = torch.where(finite, blocks, 0.0) * inverse
    codes = _codes(scaled.clamp(-most, most), form.dtype)
    return codes.view(rows, -1), scales.view(rows, -1), factor.view(rows, 1)


def decode_blocks(codes: Tensor, scales: Tensor, factor: Tensor, form: WireFormat) -> Tensor:
    """The float32 values of `encode_blocks`: (R, C, block)."""
    rows, count = scales.shape
    values = _values(codes, form.dtype).view(rows, count, form.block)
    if form.scale == torch.float8_e8m0fnu:
        exponent = scales.to(torch.int32) & 0xFF
        scale = torch.where(exponent == _NAN_EXPONENT, torch.nan, _power_of_two(exponent))
    else:
        scale = scales.view(torch.float8_e4m3fn).float() * factor
    return values * scale.view(rows, count, 1)


# -- elements --------------------------------------------------------------------------------------


def _codes(scaled: Tensor, dtype: torch.dtype) -> Tensor:
    """Codes of values that are in range, rounded to the nearest and to even, as int8."""
    if dtype == torch.float8_e4m3fn:
        return scaled.to(dtype).view(torch.int8)
    size = scaled.abs()
    # Codes 0 to 7 are 0, 0.5, 1, 1.5, 2, 3, 4, 6. Half-way between two, the even code is nearer.
    above = (
        size > 0.25, size >= 0.75, size > 1.25, size >= 1.75, size > 2.5, size >= 3.5, size > 5.0
    )  # fmt: skip
    code = torch.signbit(scaled).to(torch.int32) * 8
    for each in above:
        code = code + each.to(torch.int32)
    pairs = code.view(*code.shape[:-1], -1, 2)
    return _as_byte(pairs[..., 0] | (pairs[..., 1] << 4))


def _values(codes: Tensor, dtype: torch.dtype) -> Tensor:
    if dtype == torch.float8_e4m3fn:
        return codes.view(dtype).float()
    pair = codes.to(torch.int32)
    code = torch.stack([pair & 0xF, (pair >> 4) & 0xF], dim=-1)
    exponent, half = (code >> 1) & 3, code & 1
    normal = (((exponent + 126) << 23) | (half << 22)).view(torch.float32)
    size = torch.where(exponent == 0, half.float() * 0.5, normal)
    return torch.where(code >= 8, -size, size)


# -- scales ----------------------------------------------------------------------------------------


def _exponent_rounded_up(values: Tensor) -> Tensor:
    """The biased exponent, int32, of the least normal power of two that is not below each value."""
    bits = values.view(torch.int32)
    exponent = (bits >> 23) + ((bits & 0x7FFFFF) != 0).to(torch.int32)
    return exponent.clamp_min(1)


def _power_of_two(exponent: Tensor) -> Tensor:
    return (exponent << 23).view(torch.float32)


def _as_byte(word: Tensor) -> Tensor:
    """The lowest byte of int32 as int8."""
    return (((word & 0xFF) ^ 0x80) - 0x80).to(torch.int8)
