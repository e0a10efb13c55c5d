"""Rows of tensors as they travel: what the codes of a record are (`zero_fn.values.wire`
says where they lie), both ways.

A block counts as float32. Where it is rotated, runs of r elements are first mixed by
butterflies of elements 1, 2, 4 ... apart, (a, b) -> (a + b, a - b). The same again, and times
1 / r, gives them back.

    scale = largest / m, code = value * (m / largest),
    of the largest absolute value; m is the largest code

Codes are rounded to the nearest, ties to even, and a value is `code * scale`. Where the largest is
below 2^-100 the scale and the codes are 0. Where it is no finite number, because a value is none or
a sum overflows, the scale is NaN and the codes are 0, so all of the block is NaN when it is
decoded: who scales losses sees it.

Each of these operations is rounded to float32, in one order,
so C and torch have the same bits on all devices.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import torch
from torch import Tensor

from zero_fn.kernels.compiler import call_kernel, has_kernels
from zero_fn.kernels.threads import threads_for
from zero_fn.values.wire import SCALE_NBYTES, Records

__all__ = ["decode", "decode_mean", "encode"]

# The values of m above.
_HIGHEST = {"int4": 7, "int8": 127, "float8_e4m3fn": 448, "float8_e5m2": 57344}
# Number of the format, bits of mantissa, bias.
_KINDS = {
    "int4": (0, 0, 0),
    "int8": (1, 0, 0),
    "float8_e4m3fn": (2, 3, 7),
    "float8_e5m2": (2, 2, 15),
}
_FLOATS = (torch.float32, torch.bfloat16, torch.float16)


def encode(values: Tensor, records: Records, out: Tensor, held: Tensor | None = None) -> None:
    """Writes the records of values, or of how they differ from what is held.

    Args:
        values: Rows, [R, w]: float32, bfloat16 or float16, contiguous as all of these. R may be 0.
        records: How they travel; w is `records.row_numel`.
        out: uint8, [R, records.row_nbytes].
        held: Of the shape of values: `float32(values) - float32(held)` is coded.
    """
    sources = [values] if held is None else [values, held]
    _check(records, sources, [out])
    if not has_kernels(*sources, out):
        _encode_by_torch(
            values.float() if held is None else values.float() - held.float(), records, out
        )
        return
    sources = [source.float() if source.dtype == torch.float16 else source for source in sources]
    _run(records, sources, sources, out, adds=None)


def decode(coded: Tensor, records: Records, out: Tensor, *, add: bool = False) -> None:
    """Writes the values of records (uint8, [R, records.row_nbytes]) into rows [R, w], rounded to
    their dtype; or adds them: `float32(out) + values`, rounded."""
    _decode([coded], records, out, add)


def decode_mean(parts: Sequence[Tensor], records: Records, out: Tensor) -> None:
    """Writes the mean of parts, each as `decode` takes it, into rows [R, w]:
    `((v0 + v1) + v2 ...) / n` in float32, rounded to the dtype of `out`."""
    _decode(parts, records, out, False)


def _decode(parts: Sequence[Tensor], records: Records, out: Tensor, add: bool) -> None:
    _check(records, [out], parts)
    if not has_kernels(out, *parts):
        mean = sum(
            (_decoded_by_torch(part, records) for part in parts[1:]),
            _decoded_by_torch(parts[0], records),
        )
        mean /= _full(mean, len(parts))
        out.copy_(out.float() + mean if add else mean)
        return
    into = out.float() if out.dtype == torch.float16 else out
    _run(records, [into], list(parts), into, adds=add)
    if into is not out:
        out.copy_(into)


def _check(records: Records, rows: Sequence[Tensor], coded: Sequence[Tensor]) -> None:
    """Sizes, before anything is written."""
    tensors, count = (*rows, *coded), rows[0].shape[0]
    assert coded and all(t.is_contiguous() for t in tensors), tensors
    assert all(t.dtype in _FLOATS and t.shape == (count, records.row_numel) for t in rows), rows
    shape = (count, records.row_nbytes)
    assert all(t.dtype == torch.uint8 and t.shape == shape for t in coded), coded


def _run(
    records: Records, rows: list[Tensor], sources: list[Tensor], out: Tensor, adds: bool | None
) -> None:
    """Encodes (`adds` is None), or decodes."""
    wire, (kind, *float8) = records.wire, _KINDS[records.wire.codes]
    form = [rows[0].shape[0], records.row_numel, records.blocks, records.numel]
    form += [records.rotated, records.nbytes]
    form += [kind, _HIGHEST[wire.codes], *float8]
    form += [tensor.dtype == torch.bfloat16 for tensor in (rows[0], rows[-1])]
    form += [adds is None, adds is True, threads_for(rows[0].numel())]
    # The numbers of `Form` in wire_codes.c.
    numbers = (ctypes.c_int64 * len(form))(*form)
    call_kernel("zero_fn_records", numbers, sources, out, written=[out])


def _encode_by_torch(values: Tensor, records: Records, out: Tensor) -> None:
    blocks, numel = records.blocks, records.numel
    y = torch.nn.functional.pad(values, (0, blocks * numel - records.row_numel))
    y = y.view(-1, blocks, numel)
    y = _mixed(y, records.rotated)
    width = y.abs().amax(-1, keepdim=True)
    highest = _full(y, _HIGHEST[records.wire.codes])
    is_finite = width.isfinite()
    is_coded = is_finite & (width >= 2.0**-100)
    scale = torch.where(is_coded, width / highest, 0.0).masked_fill_(~is_finite, torch.nan)
    shares = torch.where(is_coded, y * (highest / width), 0.0)
    if records.wire.codes in ("int4", "int8"):
        codes = shares.round_().to(torch.int16).to(torch.uint8)  # two's complement
    else:
        codes = shares.to(getattr(torch, records.wire.codes)).view(torch.uint8)
    if records.wire.codes == "int4":
        low, high = torch.nn.functional.pad(codes & 15, (0, numel % 2)).chunk(2, -1)
        codes = low | high << 4
    places = out.zero_().view(-1, blocks, records.nbytes)
    places[..., :SCALE_NBYTES].view(torch.float32).copy_(scale)
    places[..., SCALE_NBYTES : SCALE_NBYTES + codes.shape[-1]] = codes


def _decoded_by_torch(coded: Tensor, records: Records) -> Tensor:
    places = coded.view(-1, records.blocks, records.nbytes)
    scale = places[..., :SCALE_NBYTES].contiguous().view(torch.float32)
    codes = places[..., SCALE_NBYTES:]
    if records.wire.codes == "int4":
        codes = codes[..., : -(-records.numel // 2)]
        codes = torch.cat([codes & 15, codes >> 4], -1)
        codes = (codes ^ 8) - 8  # the upper half of them is negative
    is_integer = records.wire.codes in ("int4", "int8")
    codes = codes[..., : records.numel]
    codes = codes.view(torch.int8 if is_integer else getattr(torch, records.wire.codes))
    y = codes.float() * scale
    y = _mixed(y, records.rotated) * (1 / records.rotated)
    return y.view(-1, records.blocks * records.numel)[:, : records.row_numel]


def _mixed(y: Tensor, rotated: int) -> Tensor:
    """Butterflies of elements of the innermost dim, in runs of so many."""
    shape, h = y.shape, 1
    while h < rotated:
        a, b = y.view(-1, 2, h).unbind(1)
        y, h = torch.stack((a + b, a - b), 1), 2 * h
    return y.view(shape)


def _full(like: Tensor, value: float) -> Tensor:
    """A number by which all devices divide: they multiply by the
    reciprocal of one that is no tensor."""
    return torch.full((), value, dtype=torch.float32, device=like.device)
