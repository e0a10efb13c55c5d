"""Parameters that are frozen, thawed, and frozen between forward and backward."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.support.models import Layer, Stack
from tests.support.ranks import Ranks
from tests.support.worlds import Run, as_replicas, differences, noise, one_backward, trained


@pytest.mark.parametrize("zeroes", [True, False])
@pytest.mark.parametrize("units", ["layers.*", "*"])
@pytest.mark.parametrize("late", [False, True])
def test_frozen_parameters_keep_their_values_and_stale_gradients(
    ranks: Ranks, late: bool, units: str, zeroes: bool
) -> None:
    """Frozen after the forward, a gradient had no place to rest, and an assertion failed."""

    def program(model: Any, run: Run, number: int) -> None:
        draw = random.Random(number)
        model.requires_grad_(True)
        x = noise(3, 6, seed=number).requires_grad_()
        loss = model(x).square().mean() if late else None
        for parameter in model.parameters():
            parameter.requires_grad_(draw.random() < 0.5)
        run.backward(loss if loss is not None else model(x).square().mean())

    trial = trained(Stack, program, steps=3, optimizer="adamw", options={"units": units}, zeroes=zeroes)
    assert ranks(2).run(differences, trial) == [[]] * 2


@as_replicas(Stack)
def test_a_unit_frozen_after_the_forward_gets_no_gradient(model: Any, run: Run, number: int) -> None:
    model.requires_grad_(True)
    loss = model(noise(3, 6, seed=number)).square().mean()
    model.layers[number].requires_grad_(False)
    run.backward(loss)
    model.requires_grad_(False)
    model.leave.requires_grad_(True)
    one_backward(model, run, number)


class Adding(nn.Module):
    """A frozen branch is added in place, without a graph, between uses of a trained one."""

    def __init__(self) -> None:
        super().__init__()
        self.frozen, self.trained = Layer().requires_grad_(False), nn.ModuleList(Layer() for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            x += self.frozen(x)
        for layer in self.trained:
            x = layer(x)
        with torch.no_grad():
            y = self.frozen(x)
        z: Tensor = self.trained[0](x) + y
        return z


@as_replicas(Adding)
def test_a_frozen_branch_may_run_several_times(model: Any, run: Run, number: int) -> None:
    one_backward(model, run, number)
