"""G16, G18 and G19: what is called in which order, and how often backward passes through it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from tests.acceptance.models import Layer, Stack, batches, several
from tests.acceptance.oracle import Run, differences, noise
from tests.profiles import SIZES, UNEVEN
from tests.ranks import Ranks


class Nested(nn.Module):
    """Stacks in a stack, in a plain list and a dict of their own."""

    def __init__(self) -> None:
        super().__init__()
        self.stacks = nn.ModuleList(Stack(4, 5, 2) for _ in range(2))
        self.named = nn.ModuleDict({"layer": Layer(4, 3), "linear": nn.Linear(4, 4)})
        self.plain = [self.stacks[0].layers[1], self.named["layer"]]  # type: ignore[index]

    def forward(self, x: Tensor) -> Tensor:
        for module in (*self.stacks, *self.named.values(), *self.plain):
            x = torch.tanh(module(x))
        return x


NAMES = [
    "", "stacks.0", "stacks.1", "stacks.0.enter", "stacks.0.layers.0", "stacks.0.layers.0.first", "stacks.0.layers.1",
    "stacks.1.layers.1.second", "stacks.1.leave", "named.layer", "named.layer.first", "named.linear",
]  # fmt: skip
WIDTHS = {"stacks.1.layers.1.second": 5}
calls = st.lists(st.tuples(st.sampled_from(NAMES), st.booleans()), min_size=1, max_size=5)


@pytest.mark.parametrize("n", SIZES)
@several
@given(orders=batches(calls), units=st.sampled_from([None, "*", "stacks.*"]))
def test_g16_any_module_is_an_entry_in_any_order(
    ranks: Ranks, n: int, orders: list[list[tuple[str, bool]]], units: str | None
) -> None:
    """Children before the root, alone, with gradients or without; what they give is used in one backward each."""

    def case() -> list[str]:
        found = []
        for order in orders:

            def program(model: Any, run: Run, number: int, order: list[tuple[str, bool]] = order) -> object:
                outputs = []
                for i, (name, is_trained) in enumerate(order):
                    with torch.set_grad_enabled(is_trained):
                        x = noise(3, WIDTHS.get(name, 4), seed=10 * number + i)
                        outputs.append(model.get_submodule(name)(x))
                    if is_trained and i % 2:
                        run.backward(outputs[-1].square().mean())
                run.backward(model(noise(3, 4, seed=number)).square().mean())
                return outputs

            options = {} if units is None else {"units": units}
            found += [f"{order}: {line}" for line in differences(Nested, program, options=options)]
        return found

    assert ranks(n).run(case) == [[]] * n


@pytest.mark.parametrize("n", SIZES)
def test_g16_the_first_call_of_all_may_be_a_child(ranks: Ranks, n: int) -> None:
    def program(model: Any, run: Run, number: int) -> None:
        child = model.layers[number]
        run.backward(child.second(torch.tanh(child.first(noise(3, 6, seed=number)))).square().mean())
        run.backward(child(noise(3, 6, seed=number)).square().mean())
        run.backward(model(noise(3, 6, seed=number)).square().mean())

    assert ranks(n).run(differences, Stack, program, steps=3) == [[]] * n


def forward(model: Any, number: int) -> Tensor:
    return model(noise(3, 6, seed=number)).square().mean()


@pytest.mark.parametrize("n", SIZES)
def test_layers_may_be_taken_out_between_steps(ranks: Ranks, n: int) -> None:
    """Schedules were recorded with them, forward and backward."""

    def program(model: Any, run: Run, number: int) -> None:
        if number == 2:
            del model.layers[1]
        if number == 3:
            model.layers = model.layers[:1]
        run.backward(forward(model, number))

    assert ranks(n).run(differences, Stack, program, steps=5) == [[]] * n


@pytest.mark.parametrize("n", SIZES)
def test_g18_two_forwards_then_one_backward(ranks: Ranks, n: int) -> None:
    def program(model: Any, run: Run, number: int) -> None:
        run.backward(forward(model, number) + forward(model, number + 50))

    assert ranks(n).run(differences, Stack, program) == [[]] * n


@pytest.mark.parametrize("n", SIZES)
@pytest.mark.parametrize("order", [(0, 1, 2), (1, 2, 0)])
def test_g18_several_forwards_then_a_backward_each(ranks: Ranks, n: int, order: tuple[int, ...]) -> None:
    def program(model: Any, run: Run, number: int) -> None:
        losses = [forward(model, 10 * number + i) for i in range(3)]
        for i in order:
            run.backward(losses[i])

    assert ranks(n).run(differences, Stack, program) == [[]] * n


@pytest.mark.parametrize("n", SIZES)
def test_g18_forwards_and_backwards_interleave(ranks: Ranks, n: int) -> None:
    def program(model: Any, run: Run, number: int) -> None:
        first = forward(model, 10 * number)
        second = forward(model, 10 * number + 1)
        run.backward(first)
        third = forward(model, 10 * number + 2)
        discarded = forward(model, 10 * number + 3)
        run.backward(second + third)
        del discarded
        with run.accumulate():
            fourth, fifth = forward(model, 10 * number + 4), forward(model, 10 * number + 5)
            run.backward(fifth)
            run.backward(fourth)

    assert ranks(n).run(differences, Stack, program) == [[]] * n


class Exact(nn.Module):
    """Whole numbers: no order of summation rounds."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(5, 5) for _ in range(3))
        for number, parameter in enumerate(self.parameters()):
            generator = torch.Generator().manual_seed(number)
            parameter.data = torch.randint(-1, 2, parameter.shape, generator=generator).double()

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


@pytest.mark.parametrize("n", UNEVEN)
@several
@given(parts=st.lists(st.integers(1, 5), min_size=1, max_size=4), accumulates=st.booleans())
def test_g18_any_number_of_forwards_share_a_backward(ranks: Ranks, n: int, parts: list[int], accumulates: bool) -> None:
    """Sums of more than two uses may be made in another order than autograd's: in whole numbers they are the same."""

    def program(model: Any, run: Run, number: int) -> None:
        for i, forwards in enumerate(parts if accumulates or n != 3 else parts[:1]):
            xs = [noise(2, 5, seed=10 * i + j, dtype=torch.float64).sign() for j in range(forwards)]
            run.backward(sum(model(x).sum() for x in xs))

    def program_in_block(model: Any, run: Run, number: int) -> None:
        with run.accumulate():
            program(model, run, number)

    chosen = program_in_block if accumulates else program
    assert ranks(n).run(differences, Exact, chosen, steps=1) == [[]] * n


class Heads(Stack):
    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:  # type: ignore[override]
        hidden = self.layers[0](self.enter(x))
        return self.layers[1](hidden), self.leave(self.layers[2](hidden)), hidden


@pytest.mark.parametrize("n", SIZES)
@pytest.mark.parametrize("chosen", [(0,), (2,), (1, 2)])
def test_g19_backward_of_part_of_the_outputs(ranks: Ranks, n: int, chosen: tuple[int, ...]) -> None:
    def program(model: Any, run: Run, number: int) -> None:
        outputs = model(noise(3, 6, seed=number))
        run.backward(sum(outputs[i].square().mean() for i in chosen))

    assert ranks(n).run(differences, Heads, program) == [[]] * n


@pytest.mark.parametrize("n", SIZES)
@pytest.mark.parametrize("order", [(0, 1, 2), (1, 1, 0)])
def test_g19_a_retained_graph_is_backed_through_again(ranks: Ranks, n: int, order: tuple[int, ...]) -> None:
    def program(model: Any, run: Run, number: int) -> None:
        outputs = model(noise(3, 6, seed=number))
        losses = [output.square().mean() for output in outputs]
        for i in order:
            run.backward(losses[i], retain_graph=True)

    assert ranks(n).run(differences, Heads, program) == [[]] * n
