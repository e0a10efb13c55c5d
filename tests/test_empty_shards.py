"""Norms over parameters of which some ranks hold nothing: the rank without elements once raised, the others hung."""

from __future__ import annotations

from math import inf

import pytest
import torch
from torch import nn

import zero_fn as zf
from tests.ranks import Ranks, axis


def _norm(p: float, foreach: bool) -> float:
    """Of gradients that are the parameters themselves."""
    torch.manual_seed(0)
    model = zf.zero3(nn.Sequential(nn.Linear(3, 5), nn.Linear(5, 2)), axis())
    for parameter in model.parameters():
        parameter.grad = parameter.detach().clone()
    total = torch.nn.utils.get_total_norm(
        [p.grad for p in model.parameters() if p.grad is not None], norm_type=p, foreach=foreach
    )
    return float(total.full_tensor())  # type: ignore[operator]


@pytest.mark.parametrize("foreach", [True, False])
@pytest.mark.parametrize("p", [inf, -inf])
def test_the_greatest_and_least_element_are_found_where_ranks_hold_nothing(
    ranks: Ranks, p: float, foreach: bool
) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 5), nn.Linear(5, 2))
    elements = torch.cat([parameter.detach().abs().reshape(-1) for parameter in model.parameters()])
    expected = elements.max() if p > 0 else elements.min()
    assert ranks(4).run(_norm, p, foreach) == [expected.item()] * 4
