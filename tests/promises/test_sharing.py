"""G6 to G8: parameters and modules that are used, or named, several times."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from torch import Tensor, nn

import zero_fn as zf
from tests.promises.models import Layer, Sizes, Stack, batches, several, sizes
from tests.promises.oracle import Run, differences, noise
from tests.support.profiles import SIZES
from tests.support.programs import STAGES
from tests.support.ranks import Ranks, axis
from tests.support.wholes import full, named_fulls


class Repeated(Stack):
    """A layer and a linear run twice; one module has two names."""

    def __init__(self, width: int = 6, hidden: int = 9, layers: int = 3) -> None:
        super().__init__(width, hidden, layers)
        for layer in self.layers:
            layer.again = layer.second

    def forward(self, x: Tensor) -> Tensor:
        x = self.layers[0](self.enter(x))
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
        super().__init__(width, width, max(layers, 2))
        self.layers[1].first.weight = self.layers[0].first.weight
        self.layers[0].second.weight = self.leave.weight
        self.layers[-1].second.bias = self.enter.bias


class Language(nn.Module):
    """The head of a language model is its embedding."""

    def __init__(self, width: int, vocabulary: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        self.layers = nn.ModuleList(Layer(width, width) for _ in range(2))
        self.head = nn.Linear(width, vocabulary, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def checked(batch: list[Sizes], kind: type[Stack]) -> list[str]:
    found = []
    for size in batch:

        def program(model: Any, run: Run, number: int, size: Sizes = size) -> None:
            run.backward(model(noise(3, size.width, seed=size.seed + number)).square().mean())

        def build(size: Sizes = size) -> Stack:
            return kind(size.width, size.hidden, size.layers)

        wrong = differences(build, program, optimizer=size.optimizer, options=size.options)
        found += [f"{size}: {line}" for line in wrong]
    return found


@pytest.mark.parametrize("n", SIZES)
@several
@given(batch=batches(sizes))
def test_g06_what_runs_several_times_is_summed_once(ranks: Ranks, n: int, batch: list[Sizes]) -> None:
    assert ranks(n).run(checked, batch, Repeated) == [[]] * n


@pytest.mark.parametrize("n", SIZES)
@several
@given(batch=batches(sizes))
def test_g07_ties_in_a_unit_are_one_parameter(ranks: Ranks, n: int, batch: list[Sizes]) -> None:
    assert ranks(n).run(checked, batch, TiedInside) == [[]] * n


@pytest.mark.parametrize(("n", "vocabulary"), [(2, 17), (3, 7)])
def test_g07_the_last_rank_updates_its_rows_of_a_tied_embedding(ranks: Ranks, n: int, vocabulary: int) -> None:
    """In FSDP2 the rows of the last rank are never updated where they are fewer than those of the others."""

    def build() -> nn.Module:
        return Language(5, vocabulary)

    def program(model: Any, run: Run, number: int) -> None:
        tokens = torch.arange(vocabulary)
        before = full(model.head.weight)
        run.backward(F.cross_entropy(model(tokens), tokens.roll(number)))
        run.optimizer.step()
        assert not (before == full(model.head.weight)).all(1).any(), "every row has moved"

    assert ranks(n).run(differences, build, program, optimizer="adam") == [[]] * n


@pytest.mark.parametrize("n", SIZES)
@several
@given(batch=batches(sizes))
def test_g08_ties_across_units_are_one_parameter(ranks: Ranks, n: int, batch: list[Sizes]) -> None:
    assert ranks(n).run(checked, batch, TiedAcross) == [[]] * n


@pytest.mark.parametrize("build", [TiedInside, TiedAcross])
def test_g08_ties_survive_transforms_steps_and_state_dicts(ranks: Ranks, build: type[Stack]) -> None:
    def case() -> None:
        for stage in STAGES.values():
            plain = build()
            model: Any = stage(plain, axis())
            assert list(model.state_dict()) == list(plain.state_dict())
            assert len(list(model.parameters())) == len(list(plain.parameters()))
            names = {name for name, _ in model.named_parameters(remove_duplicate=False)}
            assert names == {name for name, _ in plain.named_parameters(remove_duplicate=False)}
            other = zf.zero3(build(), axis())
            other.load_state_dict(model.state_dict())
            optimizer = torch.optim.Adam(other.parameters(), lr=0.1)
            other(noise(3, 6, seed=1)).sum().backward()
            optimizer.step()
            values = named_fulls(dict(other.named_parameters(remove_duplicate=False)))
            with torch.no_grad():
                plain.load_state_dict(values)  # one value for each tie, or the last one would win
            for name, parameter in plain.named_parameters(remove_duplicate=False):
                assert torch.equal(parameter, values[name])

    ranks(3).run(case)
