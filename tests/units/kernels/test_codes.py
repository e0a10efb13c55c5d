"""Codes of eight bits are those of a reference in numpy, to the bit: the code of a value is the nearest one."""

import numpy as np
import pytest
import torch

from tests.units.kernels.drawn import drawn, same, spoiled
from zero_fn.kernels.codes import BLOCK_NUMEL, decode, encode

signed_or_not = pytest.mark.parametrize("is_signed", [True, False])


def shares(is_signed):
    """What codes of 0 on, without signs, stand for. The definition: so many codes a binade in so many binades."""
    runs = zip((16, 8, 4, 2, 1), (4, 4, 4, 4, 6) if is_signed else (8, 8, 8, 8, 14), strict=True)
    values, top = [1.0], 1.0
    for per_binade, binades in runs:
        for _ in range(binades):
            top /= 2
            values += [top * (1 + place / per_binade) for place in reversed(range(per_binade))]
    return np.array([0.0, *reversed(values)], dtype=np.float32)


def reference(values, is_signed):
    table = shares(is_signed).astype(np.float64)
    found, scales = np.zeros(len(values), np.uint8), np.zeros(-(-len(values) // BLOCK_NUMEL), np.float32)
    for number, begin in enumerate(range(0, len(values), BLOCK_NUMEL)):
        block = values[begin : begin + BLOCK_NUMEL]
        scale = np.abs(block).max()
        scales[number] = scale if np.isfinite(scale) else np.float32(np.nan)
        if scales[number] > 0:
            share = (np.abs(block) / scale).astype(np.float64)
            far = np.abs(share[:, None] - table[None, :])
            nearest = len(table) - 1 - far[:, ::-1].argmin(axis=1)  # the larger of two that are as near
            if is_signed:
                nearest += 128 * (np.signbit(block) & (nearest > 0))
            else:
                nearest = np.where(block != 0, np.maximum(nearest, 1), 0)
            found[begin : begin + BLOCK_NUMEL] = nearest
    return found, scales


def encoded(values, is_signed):
    found = torch.full(values.shape, 77, dtype=torch.uint8)
    scales = torch.full((-(-values.numel() // BLOCK_NUMEL),), 77.0)
    encode(values, found, scales, is_signed=is_signed)
    return found, scales


def decoded(found, scales, is_signed):
    out = torch.full(found.shape, 77.0)
    decode(found, scales, out, is_signed=is_signed)
    return out


@signed_or_not
def test_every_code_has_the_value_of_its_definition(is_signed):
    table = torch.from_numpy(shares(is_signed))
    expected = torch.cat([table, torch.where(table > 0, -table, 0.0)]) if is_signed else table
    for scale in (1.0, 0.7, 3e38, 1e-30, 1e-42):
        found = decoded(torch.arange(256).to(torch.uint8), torch.tensor([scale]), is_signed)
        assert same(found, expected * torch.tensor(scale))


@signed_or_not
@pytest.mark.parametrize("numel", [0, 1, 31, 255, 256, 257, 1000, 4096 + 1, 300_001])
@pytest.mark.parametrize("spread", [0.0, 2.0, 12.0])
def test_codes_are_the_nearest_and_scales_the_largest(numel, spread, is_signed):
    """A block with a number that is not finite is NaN, and no other; a second moment that is not zero stays so."""
    values = spoiled(drawn(-(-numel // BLOCK_NUMEL), BLOCK_NUMEL, seed=numel, spread=spread), numel).flatten()[:numel]
    values[5::11] *= 1e-42
    values = values if is_signed else values.abs()
    found, scales = encoded(values, is_signed)
    with np.errstate(invalid="ignore"):
        expected, expected_scales = reference(values.numpy(), is_signed)
    assert np.array_equal(found.numpy(), expected)
    assert np.array_equal(scales.numpy(), expected_scales, equal_nan=True)
    given = scales.clone()
    encode(values.nan_to_num(1.0, 1.0, -1.0), found, given, is_signed=is_signed, given=True)
    assert same(given, scales)
    assert not found[scales.isnan().repeat_interleave(BLOCK_NUMEL)[:numel]].any()


@signed_or_not
def test_values_around_every_middle_go_to_the_nearer_side(is_signed):
    table = shares(is_signed)
    middles = (table[1:] + table[:-1]) / 2
    above, below = np.nextafter(middles, np.float32(1)), np.nextafter(middles, np.float32(0))
    values = np.concatenate([table, middles, above, below])
    values = np.concatenate([values, -values, -table * 0]) if is_signed else values
    scale = torch.full((-(-len(values) // BLOCK_NUMEL),), 1.0)
    found = torch.empty(len(values), dtype=torch.uint8)
    encode(torch.from_numpy(values), found, scale, is_signed=is_signed, given=True)
    with_one = np.insert(values, np.arange(0, len(values), BLOCK_NUMEL - 1), np.float32(1))  # so that 1 is each scale
    expected = np.delete(reference(with_one, is_signed)[0], np.arange(0, len(with_one), BLOCK_NUMEL))
    assert np.array_equal(found.numpy(), expected)
    codes_of_middles = found.numpy()[len(table) : 2 * len(table) - 1]
    assert np.array_equal(codes_of_middles, np.arange(1, len(table))), "a middle goes up"


@signed_or_not
def test_encoding_again_changes_nothing(is_signed):
    """Codes and scales down to the scale whose least value is normal; below that the values at least."""
    row = torch.arange(256).to(torch.uint8)
    if is_signed:
        row[128] = 0
    least = -104 if is_signed else -80
    scales = torch.cat([2.0 ** torch.arange(least, 128), drawn(500, seed=0, spread=20.0).abs().clamp(2.0**least, 3e38)])
    rows = row.repeat(len(scales))
    again, again_scales = encoded(decoded(rows, scales, is_signed), is_signed)
    assert torch.equal(again, rows) and same(again_scales, scales)

    small = torch.cat([torch.arange(1, 5000, dtype=torch.int32).view(torch.float32), 2.0 ** torch.arange(-149, least)])
    values = decoded(row.repeat(len(small)), small, is_signed)
    again, again_scales = encoded(values, is_signed)
    assert same(again_scales, small)
    assert torch.equal(decoded(again, again_scales, is_signed), values)  # but for the sign of what rounded to zero


def test_sizes_are_checked():
    values, found, scales = torch.ones(300), torch.zeros(300, dtype=torch.uint8), torch.zeros(2)
    with pytest.raises(AssertionError):
        encode(values, found, scales[:1], is_signed=True)
