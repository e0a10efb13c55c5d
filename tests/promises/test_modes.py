"""Gradients of inputs; evaluation modes before, between and instead of training."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager

import pytest
import torch
from torch import Tensor

from tests.support.worlds import WIDTH, Tower, World, as_replicas, noise


@as_replicas()
def test_inputs_have_their_gradients(world: World) -> None:
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


@pytest.mark.parametrize("mode", [torch.inference_mode, torch.no_grad])
@as_replicas()
def test_evaluation_changes_nothing(world: World, mode: Callable[[], AbstractContextManager[object]]) -> None:
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


@pytest.mark.parametrize("moves", [False, True])
@as_replicas()
def test_a_model_that_is_transformed_or_moved_before_inference_trains_later(world: World, moves: bool) -> None:
    """As in a server: transformed inside `inference_mode`, or moved before it."""
    torch.manual_seed(0)
    model = world.place(Tower()).double() if moves else Tower()
    with torch.inference_mode():
        model = model if moves else world.place(model)
        world.note("output", model(noise(2, WIDTH, seed=1).to(model.enter.weight.dtype)).clone())
    world.train(model.float(), torch.optim.SGD(model.parameters(), lr=1e-2), 0, 1)
