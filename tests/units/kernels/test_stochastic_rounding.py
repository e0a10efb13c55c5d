"""Stochastic rounding gives one of two neighbours, and in the mean the number itself. `test_agree.py` has its bits."""

import math

import numpy as np
import torch

from tests.units.kernels.drawn import any_floats
from zero_fn.kernels.stochastic_rounding import key_of, round_randomly, round_to_two

SPECIAL = [0.0, -0.0, math.inf, -math.inf, math.nan, 3.4e38, -3.4e38, 1e-45, -1e-40, 1.0]


def _rounded(values, key=0):
    into = torch.empty(values.numel(), dtype=torch.bfloat16)
    round_randomly(values, into, np.zeros(1, np.int64), np.array([values.numel()]), key)
    return into


def test_two_halves_have_sixteen_bits_of_a_number():
    values = any_floats(65_535, seed=0)
    values[: len(SPECIAL)] = torch.tensor(SPECIAL)
    into, lost = torch.empty(2, values.numel(), dtype=torch.bfloat16)
    round_to_two(values, into, lost)
    finite = into.isfinite()
    assert torch.equal(into[finite], values[finite].bfloat16())
    assert lost.isfinite().all()
    normal = finite & (values.abs() > 1e-30)
    error = (into.double() + lost.double() - values.double()).abs() / values.double().abs()
    assert error[normal].max() <= 2**-16


def test_what_bfloat16_has_stays_and_the_rest_goes_to_a_neighbour():
    for key in range(64):
        kept = _rounded(torch.tensor(SPECIAL[:5] + SPECIAL[9:]), key).float()
        assert torch.equal(kept.nan_to_num(7.0), torch.tensor(SPECIAL[:5] + SPECIAL[9:]).nan_to_num(7.0))
        largest = _rounded(torch.tensor([3.4028235e38, -3.4028235e38]), key).float()
        assert not largest.isnan().any()
    values = torch.randn(100_000, generator=torch.Generator().manual_seed(0))
    found = _rounded(values)
    below = (values.view(torch.int32) & -(1 << 16)).view(torch.float32)
    above = ((below.view(torch.int32)) + (1 << 16)).view(torch.float32)
    assert ((found.float() == below) | (found.float() == above)).all()


def test_the_mean_is_the_number_itself():
    """Ups of independent cases with probabilities p have a variance of sum p (1 - p): five of its roots are allowed."""
    values = 1 + torch.rand(1 << 20, generator=torch.Generator().manual_seed(0))
    odds = (values.view(torch.int32) & 0xFFFF).double() / 65536
    for key in range(8):  # over elements
        ups = (_rounded(values, key).float() > values).double()
        assert abs(float((ups - odds).sum())) < 5 * float((odds * (1 - odds)).sum()) ** 0.5
        for apart in (1, 2, 64, 4096):  # neighbours go up independently
            products = (ups - odds)[apart:] * (ups - odds)[:-apart]
            assert abs(float(products.sum())) < 5 * float(products.square().sum()) ** 0.5
    values, steps = 1 + torch.arange(256) / 256 / 128, 2000  # over steps, of each element
    ups = sum((_rounded(values, key_of(0, "weight", step)).float() > values).double() for step in range(steps))
    odds = (values.view(torch.int32) & 0xFFFF).double() / 65536
    assert ((ups - steps * odds).abs() <= 5 * (steps * odds * (1 - odds)).sqrt()).all()
