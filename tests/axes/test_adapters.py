"""Low-rank adapters on a frozen base: the base is sharded and keeps its dtype, only the adapters are reduced."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

import zero_fn as zf
from tests.support.on_ranks import on_ranks
from tests.support.programs import STAGES
from tests.support.ranks import axis

WIDTH, RANK = 6, 2


class Adapted(nn.Module):
    """A frozen quantised linear, and two small matrices beside it. Source: LoRA, Hu et al. 2021."""

    def __init__(self) -> None:
        super().__init__()
        weight = torch.randn(WIDTH, WIDTH)
        self.scale = nn.Parameter(weight.abs().amax(1, keepdim=True) / 127, requires_grad=False)
        self.base = nn.Parameter((weight / self.scale).round().to(torch.int8), requires_grad=False)
        self.down = nn.Parameter(torch.randn(RANK, WIDTH) / 3)
        self.up = nn.Parameter(torch.zeros(WIDTH, RANK))

    def forward(self, x: Tensor) -> Tensor:
        weight = self.base.float() * self.scale
        y: Tensor = x + torch.tanh(x @ weight.T + x @ self.down.T @ self.up.T)
        return y


def _build() -> nn.Module:
    layers = nn.Sequential(*(Adapted() for _ in range(3)))
    return nn.Sequential(
        nn.Embedding(7, WIDTH).requires_grad_(False), layers, nn.Linear(WIDTH, 4).requires_grad_(False)
    )


@pytest.mark.parametrize("stage", ["zero2", "zero3"])
@on_ranks(2)
def test_only_adapters_are_reduced_and_the_base_is_sharded_in_its_dtype(stage: str) -> None:
    torch.manual_seed(0)
    model = STAGES[stage](_build(), axis(), units="1.*")
    model(torch.tensor([1, 2])).sum().backward()
    model.zero_grad()
    with zf.traffic() as sent:
        model(torch.tensor([1, 2])).sum().backward()
    adapters_nbytes = 3 * 4 * (RANK * WIDTH + WIDTH * RANK)
    assert sent.by_collective["reduce-scatter"] == adapters_nbytes / 2, "each sends the half that the other keeps"
    bases = [parameter for name, parameter in model.named_parameters() if name.endswith("base")]
    assert {base.dtype for base in bases} == {torch.int8}
    assert sum(base.to_local().numel() for base in bases if isinstance(base, DTensor)) == 3 * WIDTH * WIDTH // 2
