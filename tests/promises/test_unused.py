"""G4, G5 and G17: parameters that no rank, or only some ranks, use."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.promises.models import Stack
from tests.promises.oracle import Run, differences, noise
from tests.support.profiles import SIZES, UNEVEN
from tests.support.ranks import Ranks, axis


class Unused(Stack):
    """A parameter of the root and one inside a unit are never used, one whole layer never runs."""

    def __init__(self) -> None:
        super().__init__()
        self.spare = nn.Parameter(torch.randn(5, 3))
        self.layers[1].spare = nn.Parameter(torch.randn(4))

    def forward(self, x: Tensor) -> Tensor:
        return self.leave(self.layers[1](self.layers[0](self.enter(x))))


def plain(model: Any, run: Run, number: int) -> None:
    run.backward(model(noise(3, 6, seed=number)).square().mean())


def accumulated(model: Any, run: Run, number: int) -> None:
    with run.accumulate():
        plain(model, run, 10 * number)
        plain(model, run, 10 * number + 1)


@pytest.mark.parametrize("n", SIZES)
@pytest.mark.parametrize(("program", "optimizer"), [(plain, "adamw"), (accumulated, "sgd")])
def test_g04_what_no_rank_uses_has_no_gradient(ranks: Ranks, n: int, program: object, optimizer: str) -> None:
    assert ranks(n).run(differences, Unused, program, optimizer=optimizer) == [[]] * n


class SomeRanks(Unused):
    """All ranks run all layers; which outputs reach the loss depends on the rank and on the step."""

    def forward(self, x: Tensor) -> Tensor:
        x = self.enter(x)
        outputs = [layer(x) for layer in self.layers]
        number = (axis().get_local_rank() + int(self.turn)) % 4
        self.turn += 1
        if axis().get_local_rank() == 1:
            x = x * self.spare.sum()
        return self.leave(outputs[number] if number < 3 else x)

    def __init__(self) -> None:
        super().__init__()
        self.turn = 0


class OneLayer(SomeRanks):
    """Rank 0 alone gives every layer a gradient."""

    def forward(self, x: Tensor) -> Tensor:
        x = self.enter(x)
        outputs = [layer(x) for layer in self.layers]
        return self.leave(torch.stack(outputs).sum(0) if axis().get_local_rank() == 0 else x)


@pytest.mark.parametrize("n", UNEVEN)
@pytest.mark.parametrize(("program", "build"), [(plain, SomeRanks), (accumulated, SomeRanks), (plain, OneLayer)])
def test_g05_a_rank_that_does_not_use_a_parameter_contributes_zero(
    ranks: Ranks, n: int, program: object, build: type[Stack]
) -> None:
    assert ranks(n).run(differences, build, program) == [[]] * n


@pytest.mark.parametrize("n", SIZES)
def test_g17_backwards_that_differ_between_ranks_are_exact(ranks: Ranks, n: int) -> None:
    """Each rank picks one of two losses, or backs through a head that others leave out.

    A kept unit was gathered again between two uses, on the ranks that ran the second: the others hung.
    """

    def program(model: Any, run: Run, number: int) -> None:
        rank = axis().get_local_rank()
        first = model(noise(3, 6, seed=number))
        second = model(noise(3, 6, seed=number + 50))
        run.backward((first if (rank + number) % 2 else second).square().mean())
        hidden = model.enter(noise(2, 6, seed=number))
        outputs = [layer(hidden) for layer in model.layers]
        head = model.leave(outputs[0]).sum()  # forwards are the same on all ranks
        run.backward(outputs[rank % 3].sum() + (head if rank == number % 2 else 0))

    assert ranks(n).run(differences, Stack, program) == [[]] * n


class Branches(Stack):
    """Two layers side by side. A parameter of the root scales the first on even ranks, the second on odd ones."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.randn(6))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        inputs = [x, x * self.scale]
        odd = axis().get_local_rank() % 2
        return self.layers[0](inputs[1 - odd]), self.layers[1](inputs[odd])


def one_by_one(model: Any, run: Run, number: int) -> None:
    for output in model(noise(3, 6, seed=number)):
        run.backward(output.square().mean())


def one_by_one_of_several(model: Any, run: Run, number: int) -> None:
    outputs = [output for turn in range(2) for output in model(noise(3, 6, seed=10 * number + turn))]
    with run.accumulate():
        for output in outputs:
            run.backward(output.square().mean())


@pytest.mark.parametrize("n", SIZES)
@pytest.mark.parametrize("program", [one_by_one, one_by_one_of_several])
def test_g17_parts_of_a_forward_are_backed_through_one_by_one(ranks: Ranks, n: int, program: object) -> None:
    """What a rank would use only in the second backward was forgotten after the first, which other ranks ran it in."""
    assert ranks(n).run(differences, Branches, program) == [[]] * n
