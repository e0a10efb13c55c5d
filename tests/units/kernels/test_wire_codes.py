"""Rows as they travel: records, and what comes back from them, are those of the definition; means are rounded once."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from tests.units.kernels.drawn import drawn, same, spoiled
from zero_fn.kernels.wire_codes import decode, decode_mean, encode
from zero_fn.values.wire import Wire

HIGHEST = {"int4": 7, "int8": 127, "float8_e4m3fn": 448, "float8_e5m2": 57344}
FORMATS = [
    *(Wire(codes, 64, rotates=r) for codes in ("int4", "int8") for r in (True, False)),
    *(Wire(codes, 64) for codes in ("float8_e4m3fn", "float8_e5m2")),
]
each_format = pytest.mark.parametrize("wire", FORMATS, ids=str)


def encoded(values, form, held=None):
    out = torch.full((len(values), form.row_nbytes), 77, dtype=torch.uint8)
    encode(values, form, out, held)
    return out


def decoded(coded, form, dtype=torch.float32):
    out = torch.full((len(coded), form.row_numel), 77, dtype=dtype)
    decode(coded, form, out)
    return out


def hadamard(size):
    matrix = np.ones((1, 1), np.float32)
    while len(matrix) < size:
        matrix = np.kron(np.array([[1, 1], [1, -1]], np.float32), matrix)
    return matrix


def reference(values, form):
    """Records by the definition, and what they stand for: block by block, in numpy. A missing element is 0.0."""
    wire, matrix = form.wire, hadamard(form.rotated)
    rows = np.zeros((len(values), form.blocks * form.numel), np.float32)
    rows[:, : form.row_numel] = values.numpy()
    records, meant = [], []
    for block in rows.reshape(-1, form.numel):
        mixed = block if form.rotated == 1 else (block.reshape(-1, form.rotated) @ matrix).ravel()
        highest = np.float32(HIGHEST[wire.codes])
        largest = np.abs(mixed).max()
        scale, shares = largest / highest, np.zeros_like(mixed)
        if not np.isfinite(largest):
            scale = np.float32(np.nan)
        elif largest < 2.0**-100:
            scale = np.float32(0)
        else:
            shares = mixed * (highest / largest)
        if wire.codes.startswith("int"):
            numbers = np.rint(shares) + np.float32(0)  # no zero is negative
            codes = numbers.astype(np.int16).astype(np.uint8)
        else:
            floats = torch.from_numpy(shares).to(getattr(torch, wire.codes))
            numbers, codes = floats.float().numpy(), floats.view(torch.uint8).numpy()
        if wire.codes == "int4":
            half = -(-form.numel // 2)
            padded = np.pad(codes & 15, (0, 2 * half - form.numel))
            codes = padded[:half] | padded[half:] << 4
        record = np.concatenate([np.array([scale], np.float32).view(np.uint8), codes])
        records.append(np.pad(record, (0, form.nbytes - len(record))))
        mixed = (numbers * scale).astype(np.float32)
        mixed = mixed if form.rotated == 1 else (mixed.reshape(-1, form.rotated) @ matrix).ravel() / form.rotated
        meant.append(mixed)
    records = torch.from_numpy(np.stack(records)).view(len(values), form.row_nbytes)
    return records, torch.from_numpy(np.stack(meant)).view(len(values), -1)[:, : form.row_numel]


ROTATED = {(100, 64): 2, (120, 64): 4, (384, 64): 64, (66, 64): 1, (80, 64): 8, (1000, 4096): 8, (144, 4096): 16}
ROTATED |= {(run, 4096): run for run in (32, 64, 128, 256, 512, 1024, 2048, 4096)}


@pytest.mark.parametrize(("row_numel", "block"), [*((n, 64) for n in (64, 33, 63, 101, 129, 640)), *ROTATED])
@each_format
def test_records_and_what_they_stand_for_are_those_of_the_definition(wire, row_numel, block):
    """Of rotated ones the values are whole numbers, whose sums are exact in any order."""
    form = replace(wire, block=block).records(row_numel)
    assert form.rotated == (ROTATED.get((row_numel, block), form.rotated) if wire.rotates else 1)
    generator = torch.Generator().manual_seed(0)
    values = torch.randint(-9, 9, (9, row_numel), generator=generator).float()
    values[5] = 7.0
    if not wire.rotates:
        values[6:] = spoiled(drawn(3, row_numel, seed=row_numel), row_numel)
    values[7] = torch.tensor([2.0**-100, -(2.0**-111)])[torch.arange(row_numel) % 2]
    values[8, ::2] = torch.inf
    coded = encoded(values, form)
    with np.errstate(invalid="ignore"):
        expected, meant = reference(values, form)
    places, known = coded.view(9, -1, form.nbytes), expected.view(9, -1, form.nbytes)
    assert same(places[..., :4].contiguous().view(torch.float32), known[..., :4].contiguous().view(torch.float32))
    assert torch.equal(places[..., 4:], known[..., 4:])
    if form.rotated == 1:
        assert same(decoded(coded, form), meant)
    else:
        torch.testing.assert_close(decoded(coded, form), meant, rtol=1e-5, atol=1e-5, equal_nan=True)


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2])
def test_every_float_of_eight_bits_comes_back(dtype):
    every = torch.arange(256).to(torch.uint8).view(dtype).float()
    every = every[every.isfinite()]
    form = Wire("float8_e4m3fn" if dtype == torch.float8_e4m3fn else "float8_e5m2").records(len(every))
    for scale in (1.0, 2.0**-90, 2.0**90):
        coded = encoded(every[None] * scale, form)
        assert torch.equal(coded[0, 4 : 4 + len(every)], every.to(dtype).view(torch.uint8))
        assert same(decoded(coded, form), every[None] * scale)


@each_format
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_means_and_sums_are_rounded_once(wire, dtype):
    form = wire.records(200)
    parts = [encoded(drawn(9, 200, seed=seed, spread=0.5), form) for seed in range(3)]
    first, second, third = (decoded(part, form) for part in parts)
    mean = torch.full((9, 200), 77, dtype=dtype)
    decode_mean(parts, form, mean)
    assert same(mean, (((first + second) + third) / 3).to(dtype))
    decode_mean(parts[:1], form, mean)
    assert same(mean, first.to(dtype)) and same(mean, decoded(parts[0], form, dtype))
    decode(parts[1], form, mean, add=True)
    assert same(mean, (first.to(dtype).float() + second).to(dtype))


@pytest.mark.parametrize("wire", [Wire("int8"), Wire("int4", is_difference=True)], ids=str)
def test_what_is_held_is_subtracted_in_float32(wire):
    form = wire.records(100)
    values = drawn(6, 100, seed=0, spread=0.5)
    held = values.bfloat16()
    difference = values - held.float()
    assert difference.any()
    assert torch.equal(encoded(values, form, held), encoded(difference, form))


def test_sizes_are_checked():
    form = Wire("int8").records(64)
    values, coded = torch.ones(3, 64), torch.zeros(3, form.row_nbytes, dtype=torch.uint8)
    for wrong in (coded[:2], coded[:, :-1], coded.view(torch.int8), coded.t().contiguous().t()):
        with pytest.raises(AssertionError):
            encode(values, form, wrong)
    with pytest.raises(AssertionError):
        decode_mean([], form, values)
