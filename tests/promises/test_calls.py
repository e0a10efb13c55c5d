"""G16, G18 and G19: what is called in which order, and how often backward passes through it."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext, suppress
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from tests.promises.models import Layer, Stack, batches, several
from tests.promises.oracle import Run, differences, noise
from tests.support.profiles import SIZES, UNEVEN
from tests.support.ranks import Ranks
from tests.support.worlds import World
from tests.support.worlds import differences as differences_of_trials


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


class InChunks(torch.autograd.Function):
    """A loss whose chunks are backed through at once, so that one chunk of outputs exists at a time."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, head: nn.Module) -> Tensor:
        leaf, total = hidden.detach().requires_grad_(), hidden.new_zeros(())
        with torch.enable_grad():
            for chunk in leaf.chunk(3):
                loss = head(chunk).square().sum() / len(hidden)
                loss.backward()
                total += loss.detach()
        ctx.save_for_backward(leaf.grad)
        return total

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return ctx.saved_tensors[0] * grads[0], None


class BacksInside(Stack):
    """Forwards that back through a part of their graph, and go on."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.layers[1].requires_grad_("frozen" not in kind)
        self.double()

    def run(self, layer: nn.Module, x: Tensor) -> Tensor:
        return checkpoint(layer, x, use_reentrant=False) if "checkpointed" in self.kind else layer(x)

    def forward(self, x: Tensor) -> Tensor:
        if self.kind.startswith("forces"):
            energy = super().forward(x.requires_grad_()).square().sum()
            (force,) = torch.autograd.grad(energy, x, create_graph=True)
            return (self.enter(force) - self.layers[0](force)).square().mean()
        hidden = first = self.enter(x.requires_grad_())
        for layer in self.layers:
            hidden = self.run(layer, hidden)
        if self.kind == "a head":
            return InChunks.apply(hidden, self.leave)  # type: ignore[no-any-return]
        if self.kind == "a unit":
            return InChunks.apply(self.layers[0](hidden), self.layers[2])  # type: ignore[no-any-return]
        if self.kind == "raises":
            first.register_hook(_fail_once())
            with suppress(ZeroDivisionError):
                torch.autograd.grad(hidden.sum(), x, retain_graph=True)
        else:
            hidden.abs().mean().backward(retain_graph=True)
        return self.leave(self.layers[1](hidden)).square().mean()


def _fail_once() -> Callable[[Tensor], None]:
    still = [ZeroDivisionError]

    def fail(_grad: Tensor) -> None:
        if still:
            raise still.pop()

    return fail


@pytest.mark.parametrize("n", SIZES)
@pytest.mark.parametrize("accumulates", [False, True])
@pytest.mark.parametrize(
    "kind", ["a head", "a unit", "all so far", "frozen", "checkpointed", "forces", "forces, checkpointed", "raises"]
)
def test_g19_a_forward_may_back_through_what_it_has_computed(
    ranks: Ranks, n: int, kind: str, accumulates: bool
) -> None:
    """To the bit where each parameter has one sum. Where backwards are reduced one by one, their sum over ranks has another
    order than that of replicas."""

    def trial(world: World) -> None:
        model = world.build(lambda: BacksInside(kind))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        for number in range(3):
            with world.accumulate(model) if accumulates else nullcontext():
                loss = model(noise(6, 6, seed=number, dtype=torch.float64))
                loss.backward()
            world.reduce(model)
            world.note("loss", loss)
            world.note_model(model)
            optimizer.step()
            model.zero_grad()

    assert ranks(n).run(differences_of_trials, trial, tolerance=1e-13) == [[]] * n
