"""Homes: what transforms join, by example; the laws of joining are in property_tests/test_value_laws.py."""

import pytest
import torch

from zero_fn.errors import LayoutError
from zero_fn.values.home import Home
from zero_fn.values.tiers import Tiers, cpu


@pytest.mark.parametrize("name", ["compute", "reduce", "grads"])
def test_join_refuses_two_dtypes_for_one_parameter(name):
    one, other = (Home(**{name: dtype}) for dtype in (torch.bfloat16, torch.float16))
    with pytest.raises(LayoutError, match=f"different {name} dtypes") as caught:
        one.join(other)
    assert caught.value.facts == {"first": torch.bfloat16, "second": torch.float16}


@pytest.mark.parametrize(
    ("resting", "home", "expected"),
    [
        (torch.float32, Home(), torch.float32),
        (torch.float64, Home(), torch.float64),
        (torch.bfloat16, Home(), torch.float32),
        (torch.float16, Home(), torch.float32),
        (torch.float32, Home(compute=torch.bfloat16), torch.float32),
        (torch.float32, Home(compute=torch.bfloat16, reduce=torch.bfloat16), torch.bfloat16),
        (torch.bfloat16, Home(reduce=torch.float64), torch.float64),
        (torch.complex64, Home(), torch.complex64),
    ],
)
def test_sixteen_bit_gradients_are_summed_in_float32_unless_asked(resting, home, expected):
    assert home.sum_dtype(resting) == expected


def test_join_refuses_two_fractions_of_states_in_one_tier():
    one, other = (Home(tiers=Tiers(optim=cpu(), fraction=fraction)) for fraction in (0.5, 0.25))
    with pytest.raises(LayoutError, match="different fractions") as caught:
        one.join(other)
    assert caught.value.facts == {"first": 0.5, "second": 0.25}
    assert one.join(Home()) == Home().join(one) == one
