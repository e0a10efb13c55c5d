"""Low-rank adapters on a frozen base: the base is sharded and keeps its dtype, only the adapters are reduced."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

import zero_fn as zf
from tests.support.programs import STAGES
from tests.support.ranks import Ranks, axis
from tests.support.worlds import Run, differences, noise, trained

WIDTH, RANK = 6, 2


class Adapted(nn.Module):
    """A frozen linear, quantised or not, and two small matrices beside it. Source: LoRA, Hu et al. 2021."""

    def __init__(self, *, is_quantised: bool) -> None:
        super().__init__()
        weight = torch.randn(WIDTH, WIDTH)
        self.scale = nn.Parameter(weight.abs().amax(1, keepdim=True) / 127, requires_grad=False)
        base = (weight / self.scale).round().to(torch.int8) if is_quantised else weight.bfloat16()
        self.base = nn.Parameter(base, requires_grad=False)
        self.down = nn.Parameter(torch.randn(RANK, WIDTH) / 3)
        self.up = nn.Parameter(torch.zeros(WIDTH, RANK))

    def forward(self, x: Tensor) -> Tensor:
        weight = self.base.float() * self.scale if self.base.dtype == torch.int8 else self.base.float()
        y: Tensor = x + torch.tanh(x @ weight.T + x @ self.down.T @ self.up.T)
        return y


def _build(*, is_quantised: bool) -> nn.Module:
    layers = nn.Sequential(*(Adapted(is_quantised=is_quantised) for _ in range(3)))
    return nn.Sequential(
        nn.Embedding(7, WIDTH).requires_grad_(False), layers, nn.Linear(WIDTH, 4).requires_grad_(False)
    )


def _program(model: Any, run: Run, number: int) -> object:
    tokens = noise(3, seed=number).abs().mul(10).long() % 7
    loss = model(tokens).square().mean()
    run.backward(loss)
    return loss


def _quantised() -> nn.Module:
    return _build(is_quantised=True)


def _plain() -> nn.Module:
    return _build(is_quantised=False)


@pytest.mark.parametrize("build", [_plain, _quantised])
def test_adapters_train_as_in_replicas(ranks: Ranks, build: Any) -> None:
    assert ranks(2).run(differences, trained(build, _program, optimizer="adamw")) == [[]] * 2


def _moved(stage: str) -> tuple[int, set[torch.dtype], int]:
    """Bytes reduced in a step, dtypes of the base at rest, and elements of it on this rank."""
    torch.manual_seed(0)
    model = STAGES[stage](_quantised(), axis(), units="1.*")
    model(torch.tensor([1, 2])).sum().backward()
    model.zero_grad()
    with zf.traffic() as sent:
        model(torch.tensor([1, 2])).sum().backward()
    bases = [parameter for name, parameter in model.named_parameters() if name.endswith("base")]
    held = sum(base.to_local().numel() for base in bases if isinstance(base, DTensor))
    return sent.by_collective["reduce-scatter"], {base.dtype for base in bases}, held


@pytest.mark.parametrize("stage", ["zero2", "zero3"])
def test_only_adapters_are_reduced_and_the_base_is_sharded_in_its_dtype(ranks: Ranks, stage: str) -> None:
    adapters_nbytes = 3 * 4 * (RANK * WIDTH + WIDTH * RANK)
    for reduced_nbytes, dtypes, held in ranks(2).run(_moved, stage):
        assert reduced_nbytes == adapters_nbytes / 2, "each of two ranks sends the half that the other keeps"
        assert dtypes == {torch.int8}
        assert held == 3 * WIDTH * WIDTH // 2
