"""Hooks at which units are entered: their order among those of users, and what is left after an exception or an interrupt."""

from __future__ import annotations

import copy
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import zero_fn as zf
from tests.support.groups import alone
from tests.support.models import Block
from tests.support.ranks import Ranks, axis
from tests.support.wholes import full
from tests.support.worlds import WIDTH, Tower, World, differences, noise

_packing = torch._C._autograd._top_saved_tensors_default_hooks


class Failure(Exception):
    """Of a hook or a forward."""


def _step(world: World, model: nn.Module, optimizer: torch.optim.Optimizer, seed: int) -> None:
    world.step(model, optimizer, model(noise(4, WIDTH, seed=seed)).square().mean())


def _raise(error: type[BaseException], *_: object) -> None:
    raise error


def _fails(world: World, *, where: str, inside: str, error: type[BaseException]) -> None:
    """A hook raises in the second forward; then two steps as if nothing was."""
    model = world.build(Tower)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    _step(world, model, optimizer, 0)
    resting = 0 if world.is_replica else zf.held(model).parameters
    module = model.get_submodule(inside)
    hook: Any = partial(_raise, error)
    handle = {
        "first of all": lambda: module.register_forward_pre_hook(hook, prepend=True),
        "before": lambda: module.register_forward_pre_hook(hook),
        "after": lambda: module.register_forward_hook(hook, prepend=True),
        "last of all": lambda: module.register_forward_hook(hook),
    }[where]()
    with pytest.raises(error):
        model(noise(4, WIDTH, seed=1))
    handle.remove()
    if error is Failure:
        assert _packing(False) is None, "tensors are packed outside a forward"
        is_over = (where, inside) == ("last of all", "")  # then what the backward needs first is kept
        assert world.is_replica or is_over or zf.held(model).parameters == resting, "a unit stayed gathered"
    _step(world, model, optimizer, 2)
    assert _packing(False) is None
    _step(world, model, optimizer, 3)


@pytest.mark.parametrize(
    ("where", "inside", "error"),
    [
        (where, inside, (Failure, KeyboardInterrupt)[(one + other) % 2])
        for one, where in enumerate(("first of all", "before", "after", "last of all"))
        for other, inside in enumerate(("", "blocks.1", "enter", "blocks.2.up"))
    ],
)
def test_a_hook_that_raises_leaves_nothing(ranks: Ranks, where: str, inside: str, error: type[BaseException]) -> None:
    """torch calls our hook after an exception, and not after an interrupt, of which the next forward finds the traces."""
    trial = partial(_fails, where=where, inside=inside, error=error)
    assert ranks(2).run(differences, trial, stages=["zero1", "zero3"]) == [[]] * 2


def _interrupted(world: World, *, then: str) -> None:
    model = world.build(Tower)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    _step(world, model, optimizer, 0)
    loss = model(noise(4, WIDTH, seed=1)).square().mean()
    handle = model.blocks[1].register_forward_hook(partial(_raise, KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        model(noise(4, WIDTH, seed=2))
    handle.remove()
    if then == "a backward of before":
        world.step(model, optimizer, loss)
    elif then == "a step":
        for parameter in model.parameters():
            parameter.grad = torch.ones_like(parameter)
        optimizer.step()
        optimizer.zero_grad()
    elif then == "a verb" and not world.is_replica:
        with zf.unsharded(model):
            pass
    elif then == "a child":
        model.blocks[2](noise(4, 7, seed=3)).sum()
    _step(world, model, optimizer, 4)


@pytest.mark.parametrize("then", ["a backward of before", "a step", "a verb", "a child"])
def test_whatever_comes_after_an_interrupt_finds_the_model_at_rest(ranks: Ranks, then: str) -> None:
    assert ranks(2).run(differences, partial(_interrupted, then=then), stages=["zero1", "zero3"]) == [[]] * 2


def test_an_interrupt_of_what_is_computed_again_leaves_nothing() -> None:
    """torch calls no hook after it: the unit seemed to run on, and was not entered again."""

    def loss(module: nn.Module) -> Tensor:
        x = torch.ones(4, WIDTH, requires_grad=True)
        output: Tensor = checkpoint(module, x, use_reentrant=False)
        return output.square().mean()

    with alone() as mesh:
        plain = Tower()
        model: Any = zf.zero3(copy.deepcopy(plain), mesh)
        interrupted = loss(model)
        handle = model.blocks[1].register_forward_hook(partial(_raise, KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            interrupted.backward()
        handle.remove()
        model.zero_grad()
        for module in (plain, model):
            loss(module).backward()
        for one, other in zip(model.parameters(), plain.parameters(), strict=True):
            assert torch.equal(full(one.grad), other.grad)


class Recursive(nn.Module):
    """Calls itself."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.gate = nn.Parameter(torch.tensor(0.5))

    def forward(self, x: Tensor, times: int = 2) -> Tensor:
        x = torch.tanh(self.linear(x)) * self.gate
        if times == 1:
            try:
                self(x, times=-1)
            except Failure:
                return x
        if times < 0:
            raise Failure
        y: Tensor = self(x, times - 1)
        return y + self.gate


def test_a_module_that_calls_itself_is_left_when_the_outermost_call_ends(ranks: Ranks) -> None:
    def trial(world: World) -> None:
        model = world.build(Recursive)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        for seed in range(3):
            _step(world, model, optimizer, seed)

    assert ranks(2).run(differences, trial) == [[]] * 2


def _seen() -> list[list[bool]]:
    """Whether hooks of users see whole parameters: those of before the transform, and those of after it."""
    seen: list[list[bool]] = []
    for registers_first in (True, False):
        plain: Any = nn.Sequential(Block(7), Block(7))
        found: list[bool] = []

        def look(module: Any, *_: object, found: list[bool] = found) -> None:
            found.append(type(module.gate if hasattr(module, "gate") else module.up.weight) is Tensor)

        model = plain if registers_first else zf.zero3(plain, axis(), units=Block)
        model[1].register_forward_pre_hook(look)
        model[1].register_forward_hook(look)
        model = zf.zero3(model, axis(), units=Block) if registers_first else model
        model(noise(2, 7, seed=0))
        seen.append(found)
    return seen


def test_hooks_of_before_the_transform_see_whole_parameters_and_those_of_after_it_until_the_forward(
    ranks: Ranks,
) -> None:
    assert ranks(2).run(_seen) == [[[True, True], [True, False]]] * 2


def test_an_exception_that_is_being_handled_is_none_of_the_forward(ranks: Ranks) -> None:
    def trial(world: World) -> None:
        model = world.build(Tower)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        for seed in range(2):
            try:
                raise Failure
            except Failure:
                _step(world, model, optimizer, seed)

    assert ranks(2).run(differences, trial) == [[]] * 2
