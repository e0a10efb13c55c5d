"""What a unit does with gradients that autograd gives it: they are added up, and never written."""

import torch
from torch import nn

import zero_fn as zf
from tests.support.groups import alone
from zero_fn.runtime.registry import units_of


def test_a_gradient_that_two_parameters_share_is_not_summed_in_place():
    """`a + b` has one gradient, which autograd gives to both."""
    with alone() as axis:
        model = zf.shard_params(nn.LayerNorm(3), axis)
        (unit,) = units_of(model)
        shared = torch.ones(3)
        unit.gradients.add([shared, shared], exact=True)  # a sum of the unit's own, as where it has several uses
        unit.gradients.take()
        for _ in range(2):
            unit.gradients.add([shared, shared], exact=False)
        assert torch.equal(shared, torch.ones(3))
        assert [grad.tolist() for grad in unit.gradients.local if grad is not None] == [[2.0] * 3] * 2
