"""Homes: what transforms join, by example; the laws of joining are in property_tests/test_value_laws.py."""

import pytest
import torch

import zero_fn as zf
from tests.support.messages import Headed, refusals
from zero_fn.errors import LayoutError
from zero_fn.values.home import Home
from zero_fn.values.tiers import Tiers

CHOICES = {
    "compute dtypes": {"compute": (torch.bfloat16, torch.float16)},
    "reduce dtypes": {"reduce": (torch.bfloat16, torch.float16)},
    "grads dtypes": {"grads": (torch.bfloat16, torch.float16)},
    "formats": {"gather": (zf.wire.int8(), zf.wire.int8(block=64))},
    "fractions": {"tiers": [Tiers(optim=zf.cpu(), fraction=fraction) for fraction in (0.5, 0.25)]},
}


@pytest.mark.parametrize("what", CHOICES)
def test_join_refuses_two_choices_for_one_parameter(what):
    ((name, choices),) = CHOICES[what].items()
    one, other = (Home(**{name: choice}) for choice in choices)
    with pytest.raises(LayoutError, match=f"different {what}"):
        one.join(other)
    assert one.join(Home()) == Home().join(one) == one


@pytest.mark.parametrize(
    ("resting", "home", "expected"),
    [
        (torch.float64, Home(), torch.float64),
        (torch.bfloat16, Home(), torch.float32),
        (torch.float32, Home(compute=torch.bfloat16), torch.float32),
        (torch.float32, Home(compute=torch.bfloat16, reduce=torch.bfloat16), torch.bfloat16),
        (torch.complex64, Home(), torch.complex64),
    ],
)
def test_sixteen_bit_gradients_are_summed_in_float32_unless_asked(resting, home, expected):
    assert home.sum_dtype(resting) == expected


test_refusals = refusals(
    {
        "reshard_after_no_moment": lambda two: zf.shard_params(Headed(), two, reshard_after="step"),
        "precision_rounds_in_no_way": lambda: zf.precision(Headed().bfloat16(), round="nearest"),
        "precision_seed_of_kahan": lambda: zf.precision(Headed().bfloat16(), round="kahan", seed=3),
        "format_of_small_blocks": lambda: zf.wire.int8(block=8),
        "format_of_other_floats": lambda: zf.wire.float8(dtype=torch.float16),
        "format_that_is_none": lambda: zf.wire.Wire("float8_e5m2", is_symmetric=False),
        "tier_of_no_size": lambda: zf.nvme(".", limit="much"),
        "tier_of_one_path_twice": lambda: zf.nvme("/disk0", "/disk1", "/disk0"),
    }
)
