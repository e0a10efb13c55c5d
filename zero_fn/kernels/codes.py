"""Tensors in eight bits: a code for each element, and a scale in float32 for each block
of 256 that follow each other.

The scale is the largest absolute value of its block. A code stands for a share of it, from 0 to 1:

    signed      the top bit is the sign. Shares of 1 to 2^-22: 16 codes a binade in the first 4
                binades below 1, then 8, 4 and 2 a binade in 4 binades each, and 1 in the last 6
    unsigned    shares of 1 to 2^-46: 16, 8, 4 and 2 codes a binade in 8 binades each,
                then 1 in the last 14

Codes that follow each other have values that follow each other, 255 (or 127) is 1, and 0 is zero. A
value becomes the nearest code, and one in the middle of two the larger in size. In the unsigned
map, whose roots one divides by, what is not zero gets code 1 at least. In the signed map it may
become zero. A block of zeros has scale 0. One with a NaN or an infinity has scale NaN, and all of
it is NaN when it is decoded.

A block that was encoded, decoded and encoded again has the same scale and codes to the bit, if
scale times least share is a normal float: from scales of 2^-104 (signed) and 2^-80 (unsigned) on.
Below, small values round to denormal floats or to zero when they are decoded. What they are encoded
to then may be another code, which is decoded to the same value.

The arithmetic is one division, one multiplication and integers, so C and torch have the same bits
on all devices (as long as denormal floats are not flushed to zero).
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator

import torch
from torch import Tensor

from zero_fn.kernels.compiler import call_kernel, has_kernels
from zero_fn.kernels.threads import threads_for

__all__ = ["BLOCK_NUMEL", "MapInC", "decode", "decode_by", "encode", "encode_by", "map_in_c"]

BLOCK_NUMEL = 256
"""Elements that share a scale. The last block of a tensor may have fewer."""

# Codes counted from 1 downward, after which steps are twice as large. (Inside a binade the bits of
# a float rise evenly, so a map to bits is a line with bends, and one step after a bend is two
# steps before it.)
_BENDS = {False: (128, 192, 224, 240), True: (64, 96, 112, 120)}
_ZERO_BINADES = 23  # in the signed map a share below 2^-23 is nearer to zero than to code 1
_FINENESS = 4  # the first codes are 2^4 to a binade; also in codes.c
_MANTISSA, _ONE = 23, 127 << 23  # bits of a place in a binade, and those of 1.0


def encode(
    values: Tensor, codes: Tensor, scales: Tensor, *, is_signed: bool, given: bool = False
) -> None:
    """Writes the codes and scales of values.

    Args:
        values: float32, contiguous.
        codes: uint8, contiguous, as many.
        scales: float32, contiguous, one for each BLOCK_NUMEL elements.
        given: `scales` is read: each is NaN, or no less than any absolute value of its block.
    """
    _check(values, codes, scales)
    if has_kernels(values, codes, scales):
        form = ctypes.byref(map_in_c(is_signed=is_signed))
        numel = values.numel()
        call_kernel(
            "zero_fn_encode",
            values,
            codes,
            scales,
            numel,
            form,
            given,
            threads_for(numel),
            written=[codes, scales],
        )
    else:
        for rows, row_codes, row_scales in _rows(values, codes, scales):
            if not given:
                largest = rows.abs().amax(1, keepdim=True)
                row_scales.copy_(largest.masked_fill_(~largest.isfinite(), torch.nan))
            row_codes.copy_(encode_by(rows, row_scales, is_signed))


def decode(codes: Tensor, scales: Tensor, out: Tensor, *, is_signed: bool) -> None:
    """Writes the values of codes. Shapes and dtypes are those of `encode`, `out` being `values`."""
    _check(out, codes, scales)
    if has_kernels(out, codes, scales):
        form = ctypes.byref(map_in_c(is_signed=is_signed))
        numel = out.numel()
        call_kernel(
            "zero_fn_decode", out, codes, scales, numel, form, threads_for(numel), written=[out]
        )
    else:
        for rows, row_codes, row_scales in _rows(out, codes, scales):
            rows.copy_(decode_by(row_codes, row_scales, is_signed))


def encode_by(values: Tensor, scale_of_element: Tensor, is_signed: bool) -> Tensor:
    """The codes of values whose scales are given, of a shape that broadcasts to theirs,
    by operations of torch."""
    shift, highest = _MANTISSA - _FINENESS, 127 if is_signed else 255
    distance = _ONE - ((values / scale_of_element).view(torch.int32) & 0x7FFFFFFF)
    below = distance
    # Averages are rounded up as the whole is, so that it is rounded once.
    for bend in _BENDS[is_signed]:
        below = torch.minimum(below, (below + ((bend << shift) + 1)) >> 1)
    rounding = 1 << shift - 1  # any in [0, 1 << shift) rounds, but not to the nearest
    codes = (((highest << shift) + rounding - below) >> shift).clamp_min_(1)
    if is_signed:
        codes += values.signbit() * 128
    is_zero = distance > _ZERO_BINADES << _MANTISSA if is_signed else values == 0
    return codes.masked_fill_(is_zero | ~(scale_of_element > 0), 0).to(torch.uint8)


def decode_by(codes: Tensor, scale_of_element: Tensor, is_signed: bool) -> Tensor:
    """The values in float32 of codes whose scales are given,
    of a shape that broadcasts to theirs, by operations of torch."""
    highest = 127 if is_signed else 255
    every = torch.arange(highest + 1, dtype=torch.int32, device=codes.device)
    below = highest - every
    for bend in reversed(_BENDS[is_signed]):
        below += (below - bend).clamp_min_(0)
    shares = (_ONE - (below << _MANTISSA - _FINENESS)).view(torch.float32) * (every > 0)
    if is_signed:
        shares = torch.cat([shares, 0 - shares])  # no zero is negative
    return shares[codes.int()] * scale_of_element


class MapInC(ctypes.Structure):
    """The numbers of a map, as kernels take them."""

    _fields_ = (
        ("bends", ctypes.c_uint16 * 4),
        ("zero_binades", ctypes.c_uint16),
        ("is_signed", ctypes.c_uint16),
    )


def map_in_c(*, is_signed: bool) -> MapInC:
    return MapInC(_BENDS[is_signed], _ZERO_BINADES, is_signed)


def _check(values: Tensor, codes: Tensor, scales: Tensor) -> None:
    """Sizes, before anything is written."""
    tensors = (values, codes, scales)
    assert [t.dtype for t in tensors] == [torch.float32, torch.uint8, torch.float32], tensors
    assert codes.numel() == values.numel(), tensors
    assert scales.numel() == -(-values.numel() // BLOCK_NUMEL), tensors
    assert all(t.is_contiguous() for t in tensors), tensors


def _rows(values: Tensor, codes: Tensor, scales: Tensor) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """Views of the whole blocks, one a row, and of the last one if it has fewer elements;
    each with a column of scales."""
    values, codes, scales = values.view(-1), codes.view(-1), scales.view(-1, 1)
    whole = values.numel() // BLOCK_NUMEL
    numel = whole * BLOCK_NUMEL
    if whole:
        yield values[:numel].view(whole, -1), codes[:numel].view(whole, -1), scales[:whole]
    if numel < values.numel():
        yield values[numel:].view(1, -1), codes[numel:].view(1, -1), scales[whole:]
