"""Parameters, buffers and modules that are used, or named, several times."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import zero_fn as zf
from tests.support.models import Language, Stack
from tests.support.on_ranks import on_ranks
from tests.support.programs import STAGES
from tests.support.ranks import Ranks, axis
from tests.support.wholes import full
from tests.support.worlds import Run, differences, noise, trained


class Repeated(Stack):
    """A layer and a linear run twice; one module and one buffer have two names."""

    scale: Tensor

    def __init__(self, width: int = 6, hidden: int = 9, layers: int = 3) -> None:
        super().__init__(width, hidden, layers)
        scale = torch.full((width,), 0.5)
        for layer in (self, *self.layers):
            layer.register_buffer("scale", scale)
        for layer in self.layers:
            layer.again = layer.second

    def forward(self, x: Tensor) -> Tensor:
        assert self.layers[0].scale is self.scale
        x = self.layers[0](self.enter(x) * self.scale)
        x = self.layers[0](x)
        return self.leave(self.leave(x))


class TiedInside(Stack):
    """Two linears of one layer, a unit, share weights; so do two of the root. Their rows are uneven."""

    def __init__(self, width: int = 6, hidden: int = 9, layers: int = 3) -> None:
        super().__init__(width, width, layers)
        for layer in self.layers:
            layer.second.weight = layer.first.weight
        self.leave.weight = self.enter.weight
        self.leave.bias = self.enter.bias


class TiedAcross(Stack):
    """Weights shared between layers, and between the root and a layer."""

    def __init__(self, width: int = 6, hidden: int = 9, layers: int = 3) -> None:
        super().__init__(width, width, layers)
        self.layers[1].first.weight = self.layers[0].first.weight
        self.layers[0].second.weight = self.leave.weight
        self.layers[-1].second.bias = self.enter.bias


@pytest.mark.parametrize(("width", "layers", "units"), [(6, 3, None), (1, 2, "*"), (17, 2, "*.first")])
@pytest.mark.parametrize("kind", [Repeated, TiedInside, TiedAcross])
def test_what_is_shared_is_one_parameter_whose_uses_are_summed_once(
    ranks: Ranks, kind: type[Stack], width: int, layers: int, units: str | None
) -> None:
    def program(model: Any, run: Run, number: int) -> None:
        run.backward(model(noise(3, width, seed=number)).square().mean())

    options = {} if units is None else {"units": units}
    trial = trained(lambda: kind(width, 9, layers), program, optimizer="adamw", options=options)
    assert ranks(2).run(differences, trial) == [[]] * 2


@pytest.mark.parametrize(("n", "vocabulary"), [(2, 17), (3, 7)])
def test_the_last_rank_updates_its_rows_of_a_tied_embedding(ranks: Ranks, n: int, vocabulary: int) -> None:
    """In FSDP2 the rows of the last rank are never updated where they are fewer than those of the others."""

    def program(model: Any, run: Run, number: int) -> None:
        tokens = torch.arange(vocabulary)
        before = full(model.head.weight)
        run.backward(F.cross_entropy(model(tokens), tokens.roll(number)))
        run.optimizer.step()
        assert not (before == full(model.head.weight)).all(1).any(), "every row has moved"

    assert ranks(n).run(differences, trained(lambda: Language(vocabulary, 5), program, optimizer="adam")) == [[]] * n


@pytest.mark.parametrize("stage", STAGES)
@on_ranks(2)
def test_a_part_of_a_transformed_model_is_transformed_as_the_model_was(stage: str) -> None:
    """Transformed again, they rest as the whole was asked to: they were replicated, without a word."""
    torch.manual_seed(0)
    model: Any = zf.precision(STAGES[stage](Language(), axis()), output=torch.float64)
    placements = [p.placements for p in model.blocks.parameters()]
    part: Any = zf.precision(model.blocks)  # repeated: as it was asked for
    assert [p.placements for p in part.parameters()] == placements
    assert part[0](torch.ones(2, 4, 10)).dtype == torch.bfloat16
    again: Any = STAGES[stage](nn.Sequential(part), axis())
    assert [p.placements for p in again.parameters()] == placements
    tied: Any = nn.Sequential(nn.Linear(10, 10), nn.Linear(10, 10, bias=False))
    tied[1].weight = tied[0].weight
    whole: Any = STAGES[stage](tied, axis())
    head: Any = zf.precision(whole[1], compute=torch.float32)
    alone: Any = STAGES[stage](nn.Linear(10, 10), axis())
    assert head.weight.placements == alone.weight.placements
