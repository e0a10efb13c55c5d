"""G9: parameters that are frozen, thawed, and frozen between forward and backward."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.promises.models import Sizes, batches, several, sizes
from tests.promises.oracle import Run, differences, noise
from tests.support.profiles import SIZES
from tests.support.ranks import Ranks

flags = st.lists(st.booleans(), min_size=16, max_size=16)


@st.composite
def schedules(draw: st.DrawFn) -> tuple[Sizes, list[list[bool]], bool]:
    """A model, the parameters that are trained in each of three steps, and whether stale gradients are kept."""
    return draw(sizes), [draw(flags) for _ in range(3)], draw(st.booleans())


def checked(batch: list[tuple[Sizes, list[list[bool]], bool]], *, late: bool) -> list[str]:
    found = []
    for size, trained, zeroes in batch:

        def program(model: Any, run: Run, number: int, size: Sizes = size, trained: list[list[bool]] = trained) -> None:
            model.requires_grad_(True)
            x = noise(3, size.width, seed=size.seed + number).requires_grad_()
            loss = model(x).square().mean() if late else None
            for parameter, flag in zip(model.parameters(), trained[number], strict=False):
                parameter.requires_grad_(flag)
            run.backward(loss if loss is not None else model(x).square().mean())

        wrong = differences(size, program, steps=3, optimizer=size.optimizer, options=size.options, zeroes=zeroes)
        found += [f"{size} {trained} {zeroes}: {line}" for line in wrong]
    return found


@pytest.mark.parametrize("n", SIZES)
@pytest.mark.parametrize("late", [False, True])
@several
@given(batch=batches(schedules()))
def test_g09_frozen_parameters_keep_their_values_and_stale_gradients(
    ranks: Ranks, n: int, late: bool, batch: list[tuple[Sizes, list[list[bool]], bool]]
) -> None:
    """Frozen after the forward, a gradient had no place to rest, and an assertion failed."""
    assert ranks(n).run(checked, batch, late=late) == [[]] * n


@pytest.mark.parametrize("n", SIZES)
def test_g09_a_unit_frozen_after_the_forward_gets_no_gradient(ranks: Ranks, n: int) -> None:
    def program(model: Any, run: Run, number: int) -> None:
        model.requires_grad_(True)
        loss = model(noise(3, 6, seed=number)).square().mean()
        model.layers[number].requires_grad_(False)
        run.backward(loss)
        model.requires_grad_(False)
        model.leave.requires_grad_(True)
        run.backward(model(noise(3, 6, seed=number)).square().mean())

    assert ranks(n).run(differences, Sizes(6, 9, 3, 1, "sgd", None, 0), program) == [[]] * n
