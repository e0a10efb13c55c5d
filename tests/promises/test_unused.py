"""Parameters that no rank, or only some ranks, use."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.support.models import Stack
from tests.support.ranks import Ranks, axis
from tests.support.worlds import Program, Run, differences, noise, one_backward, trained


def accumulated(model: Any, run: Run, number: int) -> None:
    with run.accumulate():
        one_backward(model, run, 10 * number)
        one_backward(model, run, 10 * number + 1)


def other_numbers_of_batches(model: Any, run: Run, number: int) -> None:
    """In place of `Join`: a block takes what there is on each rank."""
    with run.accumulate(unshard=True):
        for microbatch in range(1 + 2 * axis().get_local_rank()):
            one_backward(model, run, 10 * number + microbatch)


def one_of_two_losses(model: Any, run: Run, number: int) -> None:
    """Each rank picks one of two losses, or backs through a head that others leave out.

    A kept unit was gathered again between two uses, on the ranks that ran the second: the others hung.
    """
    rank = axis().get_local_rank()
    first = model(noise(3, 6, seed=number))
    second = model(noise(3, 6, seed=number + 50))
    run.backward((first if (rank + number) % 2 else second).square().mean())
    hidden = model.enter(noise(2, 6, seed=number))
    outputs = [layer(hidden) for layer in model.layers]
    head = model.leave(outputs[0]).sum()  # forwards are the same on all ranks
    run.backward(outputs[rank % 3].sum() + (head if rank == number % 2 else 0))


def one_by_one(model: Any, run: Run, number: int) -> None:
    for output in model(noise(3, 6, seed=number)):
        run.backward(output.square().mean())


def one_by_one_of_several(model: Any, run: Run, number: int) -> None:
    outputs = [output for turn in range(2) for output in model(noise(3, 6, seed=10 * number + turn))]
    with run.accumulate():
        for output in outputs:
            run.backward(output.square().mean())


class Unused(Stack):
    """A parameter of the root and one inside a unit are never used, one whole layer never runs."""

    def __init__(self) -> None:
        super().__init__()
        self.spare = nn.Parameter(torch.randn(5, 3))
        self.layers[1].spare = nn.Parameter(torch.randn(4))
        self.turn = 0

    def forward(self, x: Tensor) -> Tensor:
        return self.leave(self.layers[1](self.layers[0](self.enter(x))))


class SomeRanks(Unused):
    """All ranks run all layers; which outputs reach the loss depends on the rank and on the step."""

    def forward(self, x: Tensor) -> Tensor:
        x = self.enter(x)
        outputs = [layer(x) for layer in self.layers]
        number = (axis().get_local_rank() + self.turn) % 4
        self.turn += 1
        if axis().get_local_rank() == 1:
            x = x * self.spare.sum()
        return self.leave(outputs[number] if number < 3 else x)


class OneRank(Unused):
    """Rank 0 alone gives every layer a gradient."""

    def forward(self, x: Tensor) -> Tensor:
        x = self.enter(x)
        outputs = [layer(x) for layer in self.layers]
        return self.leave(torch.stack(outputs).sum(0) if axis().get_local_rank() == 0 else x)


class Branches(Stack):
    """Two layers side by side. A parameter of the root scales the first on even ranks, the second on odd ones."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.randn(6))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        inputs = [x, x * self.scale]
        odd = axis().get_local_rank() % 2
        return self.layers[0](inputs[1 - odd]), self.layers[1](inputs[odd])


@pytest.mark.parametrize("program", [one_backward, accumulated])
def test_what_no_rank_uses_has_no_gradient(ranks: Ranks, program: Program) -> None:
    assert ranks(2).run(differences, trained(Unused, program, optimizer="adamw")) == [[]] * 2


@pytest.mark.parametrize(
    ("n", "build", "program"),
    [
        (3, SomeRanks, one_backward),
        (3, SomeRanks, accumulated),
        (3, OneRank, one_backward),
        (2, Stack, other_numbers_of_batches),
        (2, Stack, one_of_two_losses),
        (2, Branches, one_by_one),
        (2, Branches, one_by_one_of_several),
    ],
)
def test_a_rank_that_does_not_use_a_parameter_contributes_zero(
    ranks: Ranks, n: int, build: type[Stack], program: Program
) -> None:
    """What a rank would use only in the second backward was forgotten after the first, which other ranks ran it in."""
    assert ranks(n).run(differences, trained(build, program)) == [[]] * n
