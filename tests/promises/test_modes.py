"""Gradients of inputs; evaluation modes before, between and instead of training."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial

import pytest
import torch
from torch import Tensor

from tests.support.ranks import Ranks
from tests.support.worlds import WIDTH, Tower, World, differences, noise


def _input_gradients(world: World) -> None:
    model = world.build(Tower)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for step in range(3):
        x = noise(4, WIDTH, seed=step).requires_grad_()
        world.step(model, optimizer, model(x).square().mean())
        world.note("gradient of the input", x.grad)
        model(noise(4, WIDTH, seed=step)).sum().backward()  # an input without gradient, and a gradient to throw away
        optimizer.zero_grad()
        frozen = noise(4, WIDTH, seed=step).requires_grad_()
        model.requires_grad_(False)
        model(frozen).square().mean().backward()
        world.note("gradient of the input of a frozen model", frozen.grad)
        model.requires_grad_(True)


def _evaluation(mode: Callable[[], AbstractContextManager[object]], world: World) -> None:
    model = world.build(lambda: Tower(dropout=0.2))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)

    def evaluate(x: Tensor) -> None:
        model.eval()
        with mode():
            world.note("output", model(x).clone())
        model.train()

    evaluate(noise(2, WIDTH, seed=7))  # the very first forward
    for step in range(3):
        evaluate(noise(4, WIDTH, seed=step))
        torch.manual_seed(step)
        loss = model(noise(4, WIDTH, seed=step)).square().mean()
        evaluate(noise(4, WIDTH, seed=50 + step))  # between a forward and its backward
        world.step(model, optimizer, loss)
        evaluate(noise(1, WIDTH, seed=step))
    with mode(), torch.enable_grad():  # enable_grad does nothing inside inference_mode
        world.note("output", model.eval()(noise(4, WIDTH, seed=9)).detach().clone())


def _built_in_inference_mode(world: World) -> None:
    """The model is transformed inside `inference_mode`, as a server that later trains might."""
    torch.manual_seed(0)
    plain = Tower()
    with torch.inference_mode():
        model = world.place(plain)
        world.note("output", model(noise(2, WIDTH, seed=1)).clone())
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    for step in range(2):
        world.step(model, optimizer, model(noise(4, WIDTH, seed=step)).square().mean())


def _moved_before_inference(world: World) -> None:
    model = world.build(Tower).double()
    with torch.inference_mode():
        world.note("output", model(noise(2, WIDTH, seed=1).double()).clone())
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    for step in range(2):
        world.step(model, optimizer, model(noise(4, WIDTH, seed=step).double()).square().mean())


TRIALS: dict[str, Callable[[World], None]] = {
    "gradients of inputs": _input_gradients,
    "inference_mode": partial(_evaluation, torch.inference_mode),
    "no_grad": partial(_evaluation, torch.no_grad),
    "transformed in inference_mode": _built_in_inference_mode,
    "moved before inference_mode": _moved_before_inference,
}


@pytest.mark.parametrize("trial", TRIALS)
def test_evaluation_changes_nothing_and_inputs_have_their_gradients(ranks: Ranks, trial: str) -> None:
    assert ranks(2).run(differences, TRIALS[trial]) == [[]] * 2
