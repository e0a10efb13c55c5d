"""What refers to a module goes along when a transform copies it, or is refused: functions do not."""

import functools
import inspect
from collections import deque
from types import MethodType, SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import zero_fn as zf
from tests.support.messages import refused
from tests.support.worlds import as_replicas, noise


class Pair(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(6, 6), nn.Linear(6, 6)
        self.between = torch.tanh
        self.count = 0

    def forward(self, x):
        y = self.second(self.between(self.first(x)))
        return y

    def scaled(self, _module, _args, y):
        """A hook."""
        return y * self.first.bias.sum()

    def note(self, _parameter):
        """A hook of a parameter."""
        self.count += 1


def _default(model):
    def between(x, layer=model.first, *, scale=model.second):
        y = layer(x) * scale.weight.sum()
        return y

    model.between = between


def _refers_to_itself(model):
    def between(x, times=2):
        return x if not times else between(torch.tanh(model.first(x)), times - 1)

    model.between = between


def _list_in_a_closure(model):
    layers = [model.first, model.first]
    model.between = lambda x: functools.reduce(lambda y, layer: torch.tanh(layer(y)), layers, x)


REFUSED = [
    ("between", lambda m: setattr(m, "between", lambda x: torch.tanh(m.first(x)))),
    ("between", _list_in_a_closure),
    ("between", _default),
    ("between", _refers_to_itself),
    ("between", lambda m: setattr(m, "between", functools.partial(lambda scale, x: scale * m.first(x), 2))),
    ("all", lambda m: setattr(m, "all", [torch.tanh, lambda x: m.first(x)])),
    ("second._forward_hooks", lambda m: m.second.register_forward_hook(lambda _, args, y: y * m.first.bias.sum())),
    ("a hook of first.weight", lambda m: m.first.weight.register_hook(lambda grad: grad * m.second.bias.sum())),
    (
        "a hook of first.weight",
        lambda m: m.first.weight.register_post_accumulate_grad_hook(functools.partial(lambda _, p: None, m.second)),
    ),
]
"""Where a function is put, and how."""


@pytest.mark.parametrize(("path", "change"), REFUSED)
def test_a_function_that_holds_a_module_is_refused(path, change):
    model = Pair()
    change(model)
    with pytest.raises(zf.errors.LayoutError, match=f"'{path}' is, or holds, a function that holds the module"):
        zf.offload(model, params=zf.cpu())
    model(torch.ones(2, 6)).sum().backward()  # as before


def _wrapped():
    model = Pair()
    old = model.first.forward
    model.first.forward = functools.wraps(old)(lambda x: 2 * old(x))
    return model


def _wrapped_by_name():
    """As trl does: the new forward holds the module, and never calls what it replaces."""
    model = Pair()
    first = model.first
    first.forward = lambda x, scale=2: scale * torch.nn.functional.linear(x, first.weight, first.bias)
    return model


@pytest.mark.parametrize("whole", [False, True])
def test_what_was_compiled_before_the_transform_is_refused(whole):
    model = Pair()
    if whole:
        model.first = torch.compile(model.first, backend="eager")
    else:
        model.first.forward = torch.compile(model.first.forward, backend="eager")
    with pytest.raises(zf.ZeroError, match="compile after the transform"):
        zf.offload(model, params=zf.cpu())


def _partial():
    model = Pair()
    model.between = functools.partial(lambda layer, x: torch.tanh(layer(x)), model.first)
    return model


def _methods():
    model = Pair()
    model.between = MethodType(lambda self, x: torch.tanh(self.first(x)), model)
    model.second.register_forward_hook(model.scaled)
    return model


def _adapted():
    """As libraries put hooks around a forward, and look at its signature later."""
    model = Pair()
    model.first.old_forward = old = model.first.forward
    new = functools.partial(lambda module, x: 2 * module.old_forward(x), model.first)
    model.first.forward = functools.update_wrapper(new, old)
    return model


def _hooks_that_are_given_modules():
    model = Pair()
    model.second.register_forward_hook(lambda module, args, y: y * module.bias.sum())
    model.first.register_forward_pre_hook(lambda module, args: (args[0] + module.bias,))
    return model


FOLLOWED = [_wrapped, _wrapped_by_name, _partial, _adapted, _hooks_that_are_given_modules, _methods]


@pytest.mark.parametrize("build", FOLLOWED)
@as_replicas(transform=lambda model: zf.offload(model, params=zf.cpu()))
def test_what_a_copy_follows_trains_the_copy(model, run, number):
    """And the copy of the copy."""
    run.backward(model(noise(3, 6, seed=number)).square().mean())


def test_a_wrapped_forward_says_what_it_wraps():
    copied = zf.offload(_adapted(), params=zf.cpu())
    forward = inspect.unwrap(copied.first.forward)
    assert forward.__self__ is copied.first


def test_a_method_that_is_a_hook_of_a_parameter_is_one_of_the_copy():
    model = Pair()
    model.first.weight.register_post_accumulate_grad_hook(model.note)
    copied = zf.offload(model, params=zf.cpu())
    copied(torch.ones(2, 6)).sum().backward()
    assert (model.count, copied.count) == (0, 1)


def test_what_refers_to_no_copied_module_stays_shared():
    model, other, calls = Pair(), nn.Linear(6, 6), []

    def between(x):
        calls.append(other)
        return x

    model.between = between
    model.second.weight.register_hook(calls.append)
    copied = zf.offload(model, params=zf.cpu())
    copied(torch.ones(2, 6)).sum().backward()
    assert copied.between is between
    assert calls[0] is other and len(calls) == 2


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
def test_a_place_that_cannot_follow_a_parameter_is_refused(hold):
    model = Pair()
    model.held = hold(model.first.weight)
    with refused("closure_over_a_parameter"):
        zf.offload(model, params=zf.cpu())
    model.requires_grad_(False)
    zf.offload(model, params=zf.cpu())  # nobody trains it
