"""A loss that adds a penalty on resting parameters to what the model gave."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from tests.acceptance.models import Stack
from tests.acceptance.oracle import Run, differences, noise
from tests.composition.grids import composed, loss_of
from tests.profiles import SIZES
from tests.ranks import Ranks
from tests.wholes import full

PENALTIES: dict[str, Callable[[Any], Tensor]] = {
    "squares": lambda model: 0.01 * sum(p.square().sum() for p in model.parameters()),
    "absolutes": lambda model: sum(p.abs().sum() for p in model.layers.parameters()) / 64,
    "largest": lambda model: sum(p.abs().max() for p in model.parameters()) / 32,
    "rows": lambda model: (model.enter.weight[1:] - model.enter.weight[:-1]).square().sum(),
}


def _mse(model: nn.Module, seed: int) -> Tensor:
    return F.mse_loss(model(noise(4, 6, seed=seed)), noise(4, 6, seed=seed + 10))


@pytest.mark.parametrize("n", SIZES)
@pytest.mark.parametrize("name", PENALTIES)
def test_a_penalty_is_added_to_the_mean_of_gradients(ranks: Ranks, n: int, name: str) -> None:
    """Backward had raised that plain tensors and DTensors are mixed, as it does after `fully_shard`."""

    def program(model: nn.Module, run: Run, number: int) -> None:
        loss, penalty = _mse(model, number), PENALTIES[name](model)
        total = loss + penalty
        if isinstance(total, DTensor):
            run.backward((total if number else penalty + loss) * 0.5)
        else:  # after the mean: the order of the sum
            run.backward(loss * 0.5)
            (penalty * 0.5).backward()

    assert ranks(n).run(differences, Stack, program) == [[]] * n


def test_a_penalty_in_a_block_of_accumulate_is_added(ranks: Ranks) -> None:
    def program(model: nn.Module, run: Run, number: int) -> None:
        with run.accumulate():
            _mse(model, number).backward()
            last = _mse(model, number + 1)
            penalty = PENALTIES["squares"](model)
            total = last + penalty
            (total if isinstance(total, DTensor) else last).backward()
        if not isinstance(total, DTensor):
            penalty.backward()

    assert ranks(2).run(differences, Stack, program) == [[]] * 2


def _gradients(composition: str, *, together: bool) -> list[Tensor]:
    model, row = composed(composition)
    loss, penalty = loss_of(model, 0, row), 0.01 * sum(p.square().sum() for p in model.parameters())
    for part in (loss + penalty,) if together else (loss, penalty):
        part.backward(retain_graph=together)  # type: ignore[union-attr]
    return [full(p.grad) for p in model.parameters()]


def _both(composition: str) -> bool:
    return all(map(torch.equal, _gradients(composition, together=True), _gradients(composition, together=False)))


@pytest.mark.parametrize("composition", ["tp", "hybrid"])
def test_a_penalty_is_added_on_two_axes(ranks: Ranks, composition: str) -> None:
    assert ranks(4).run(_both, composition) == [True] * 4
