"""Functions that refer to a module by a closure go along when a transform copies the module."""

from __future__ import annotations

import functools
import inspect
from collections import deque
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import zero_fn as zf
from tests.acceptance.oracle import Run, differences, noise
from tests.ranks import Ranks


class Pair(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(6, 6), nn.Linear(6, 6)
        self.between: Callable[[Tensor], Tensor] = torch.tanh

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.second(self.between(self.first(x)))
        return y


def _closure() -> nn.Module:
    model = Pair()
    model.between = lambda x: torch.tanh(model.first(x))
    return model


def _closure_over_a_list() -> nn.Module:
    model = Pair()
    layers = [model.first, model.first]
    model.between = lambda x: functools.reduce(lambda y, layer: torch.tanh(layer(y)), layers, x)
    return model


def _default() -> nn.Module:
    model = Pair()

    def between(x: Tensor, layer: nn.Module = model.first, *, scale: nn.Module = model.second) -> Tensor:
        y: Tensor = layer(x) * scale.weight.sum()
        return y

    model.between = between
    return model


def _partial() -> nn.Module:
    model = Pair()
    model.between = functools.partial(lambda layer, x: torch.tanh(layer(x)), model.first)
    return model


def _wrapped_partial() -> nn.Module:
    """As libraries put hooks around a forward, and look at its signature later."""
    model = Pair()
    old = model.first.forward
    new = functools.partial(lambda scale, x: scale * old(x), 2)
    model.first.forward = functools.update_wrapper(new, old)  # type: ignore[method-assign]
    return model


def _patched() -> nn.Module:
    model = Pair()
    old = model.first.forward

    @functools.wraps(old)
    def forward(x: Tensor) -> Tensor:
        return 2 * old(x)

    model.first.forward = forward  # type: ignore[method-assign]
    return model


def _hooks() -> nn.Module:
    model = Pair()
    model.second.register_forward_hook(lambda _, args, y: y * model.first.bias.sum())
    model.first.register_forward_pre_hook(lambda _, args: (args[0] + model.first.bias,))
    return model


def _refers_to_itself() -> nn.Module:
    model = Pair()

    def between(x: Tensor, times: int = 2) -> Tensor:
        return x if not times else between(torch.tanh(model.first(x)), times - 1)

    model.between = between
    return model


BUILDS = [_closure, _closure_over_a_list, _default, _partial, _wrapped_partial, _patched, _hooks, _refers_to_itself]


@pytest.mark.parametrize("build", BUILDS)
def test_functions_that_hold_modules_train_the_copy(ranks: Ranks, build: Callable[[], nn.Module]) -> None:
    def program(model: Any, run: Run, number: int) -> None:
        run.backward(model(noise(3, 6, seed=number)).square().mean())

    assert ranks(2).run(differences, build, program) == [[]] * 2


def test_a_wrapped_forward_says_what_it_wraps() -> None:
    copied = zf.offload(_wrapped_partial(), params=zf.cpu())
    forward: Any = inspect.unwrap(copied.first.forward)  # type: ignore[union-attr, arg-type]
    assert forward.__self__ is copied.first


def test_what_refers_to_no_copied_module_stays_shared() -> None:
    model, other, calls = Pair(), nn.Linear(6, 6), []

    def between(x: Tensor) -> Tensor:
        calls.append(other)
        return x

    model.between = between
    layers = [model.first]
    model.second.register_forward_hook(lambda *_: calls.extend(layers))
    copied = zf.materialize(zf.offload(model, params=zf.cpu()), "cpu")
    copied(torch.ones(2, 6))
    assert copied.between is between
    assert calls == [other, copied.first]
    assert layers == [model.first], "the original keeps its own"


class Held(nn.Module):
    def __init__(self, hold: Callable[[nn.Parameter], object]) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 6)
        self.held = hold(self.layer.weight)


@pytest.mark.parametrize(
    "hold",
    [
        lambda weight: lambda x: F.linear(x, weight),
        lambda weight: functools.partial(F.linear, weight=weight),
        lambda weight: [[weight]],
        lambda weight: [weight],  # of a module that does not register it
        lambda weight: {"a": (weight,)},
        lambda weight: deque([weight]),
        lambda weight: SimpleNamespace(weight=weight),
    ],
)
def test_a_place_that_cannot_follow_a_parameter_is_refused(hold: Callable[[nn.Parameter], object]) -> None:
    model = Held(hold)
    with pytest.raises(zf.PlacementError, match=r"'held' holds the parameter 'layer.weight' itself"):
        zf.offload(model, params=zf.cpu())
    model.requires_grad_(False)
    zf.offload(model, params=zf.cpu())  # nobody trains it
