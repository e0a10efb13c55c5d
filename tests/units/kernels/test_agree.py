"""What a kernel in C writes torch writes in its place, to the bit, on any number of threads; and autograd hears of it.

The step of Adam, whose oracle is torch's own kernel, is in `test_adam.py`; copies and means in `test_nontemporal.py`.
"""

from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.units.kernels.drawn import any_floats, drawn, needs_kernels, same, spoiled, threads, without_kernels
from tests.units.kernels.test_wire_codes import FORMATS
from zero_fn.kernels import codes, stochastic_rounding, wire_codes

seeds = st.integers(0, 999)
numels = st.one_of(st.integers(1, 40), st.integers(1, 5000), st.sampled_from([1 << 15, 300_001]))


def place(*shape, dtype=torch.float32):
    """What nobody has written to."""
    return torch.full(shape, 77, dtype=dtype)


def as_records(wire, row_numel, rows, dtypes, has_held, seed):
    form = wire.records(row_numel)
    values, held = (
        spoiled(drawn(rows, row_numel, seed=seed + number, spread=9), seed + number).to(dtype)
        for number, dtype in enumerate(dtypes[:2])
    )
    coded = [place(rows, form.row_nbytes, dtype=torch.uint8) for _ in range(2)]
    wire_codes.encode(values, form, coded[0], held if has_held else None)
    wire_codes.encode(values.flip(1), form, coded[1])
    found = [place(rows, row_numel, dtype=dtypes[2]) for _ in range(4)]
    wire_codes.decode(coded[0], form, found[0])
    wire_codes.decode(coded[1], form, found[1], add=True)
    wire_codes.decode_mean(coded, form, found[2])
    wire_codes.decode_mean([*coded, coded[0]], form, found[3])
    return [*coded, *found]


def as_codes(numel, is_signed, seed):
    values = spoiled(drawn(-(-numel // 256), 256, seed=seed, spread=6), seed).flatten()[:numel]
    values = values if is_signed else values.abs()
    scales, found, out = place(-(-numel // 256)), place(numel, dtype=torch.uint8), place(numel)
    codes.encode(values, found, scales, is_signed=is_signed)
    codes.decode(found, scales, out, is_signed=is_signed)
    every = scales.repeat_interleave(256)[:numel]
    assert same(codes.encode_by(values, every, is_signed), found)
    assert same(codes.decode_by(found, every, is_signed), out)
    return [found, scales, out]


def as_halves(numel, split, seed):
    values = spoiled(any_floats(numel, seed=seed)[None], seed).flatten()
    firsts, counts = np.array([2**32 - 1000, 3 * 2**32 + 5]), np.array([min(split, numel), numel - min(split, numel)])
    halves = [place(numel, dtype=torch.bfloat16) for _ in range(3)]
    key = stochastic_rounding.key_of(seed, "blocks.0.weight", split)
    stochastic_rounding.round_randomly(values, halves[0], firsts, counts, key)
    stochastic_rounding.round_to_two(values, halves[1], halves[2])
    wide = place(numel), place(numel)
    stochastic_rounding.widen(halves[1], None, wide[0])
    stochastic_rounding.widen(halves[1], halves[2], wide[1])
    return [*halves, *wide]


wires = st.builds(
    lambda wire, block: replace(wire, block=block),
    st.sampled_from(FORMATS),
    st.one_of(st.sampled_from([32, 256, 4096]), st.integers(32, 4096)),
)
KERNELS = {
    "records": st.builds(
        partial,
        st.just(as_records),
        wire=wires,
        row_numel=st.one_of(st.integers(32, 300), st.integers(32, 9000), st.sampled_from([64, 256, 768, 4096])),
        rows=st.integers(0, 6),
        dtypes=st.tuples(*[st.sampled_from([torch.float32, torch.bfloat16, torch.float16])] * 3),
        has_held=st.booleans(),
        seed=seeds,
    ),
    "codes": st.builds(partial, st.just(as_codes), numel=numels, is_signed=st.booleans(), seed=seeds),
    "rounding": st.builds(partial, st.just(as_halves), numel=numels, split=st.integers(0, 5000), seed=seeds),
}


@needs_kernels
@pytest.mark.parametrize("name", KERNELS)
@given(data=st.data(), count=st.sampled_from([1, 3]))
def test_a_kernel_has_the_bits_of_torch_and_its_writes_are_seen(name, data, count):
    act = data.draw(KERNELS[name])
    with threads(count):
        in_c = act()
        assert all(each._version or not each.numel() for each in in_c), "autograd has not heard of a write"
        with without_kernels():
            expected = act()
    for number, (one, other) in enumerate(zip(in_c, expected, strict=True)):
        assert same(one, other), number
