"""Outputs of any structure, and objects that nobody can look into."""

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import nn

import zero_fn as zf
from tests.support.groups import pretended
from tests.support.models import Layer, Stack
from tests.support.worlds import as_replicas, differences, noise, trained
from zero_fn.runtime.registry import units_of


@dataclass
class Record:
    value: Any
    extra: dict


@dataclass(frozen=True)
class Frozen:
    value: Any


class Opaque:
    """No container that anyone knows."""

    def __init__(self, value):
        self._hidden = value


class Slotted:
    __slots__ = ("value",)

    def __init__(self, value):
        self.value = value


class Lazy:
    """Gives its tensor when called."""

    def __init__(self, value):
        self._give = lambda: value

    def __call__(self):
        return self._give()


WAYS = {
    "tuple": (lambda x: (x, None, 3), lambda x: x[0]),
    "list": (lambda x: ["a", x], lambda x: x[1]),
    "dict": (lambda x: {"key": x, 7: "b"}, lambda x: x["key"]),
    "record": (lambda x: Record(x, {"n": 1}), lambda x: x.value),
    "frozen": (Frozen, lambda x: x.value),
    "opaque": (Opaque, lambda x: x._hidden),
    "slotted": (Slotted, lambda x: x.value),
    "lazy": (Lazy, lambda x: x()),
}
"""How a value is put into a container, and taken out."""


def wrapped(nesting, value):
    for kind in nesting:
        value = WAYS[kind][0](value)
    return value


def unwrapped(nesting, value):
    for kind in reversed(nesting):
        value = WAYS[kind][1](value)
    return value


class WrappedLayer(Layer):
    def __init__(self, nesting):
        super().__init__()
        self.nesting = nesting

    def forward(self, x):
        return wrapped(self.nesting, super().forward(unwrapped(self.nesting, x)))


class Wrapped(Stack):
    """Inputs and outputs of the root and of every layer are wrapped."""

    def __init__(self, outer, inner):
        super().__init__()
        self.outer, self.inner = outer, inner
        self.layers = nn.ModuleList(WrappedLayer(inner) for _ in range(3))

    def forward(self, x):
        return wrapped(self.outer, super().forward(unwrapped(self.outer, x)))

    def run(self, layer, x):
        return unwrapped(self.inner, layer(wrapped(self.inner, x)))


NESTS = [
    *(([kind], [kind]) for kind in ("list", "frozen", "slotted", "lazy")),
    (["dict", "opaque", "tuple"], ["record", "lazy"]),
    (["lazy", "slotted", "list"], ["opaque", "frozen"]),
]
"""Of dicts, pairs, records and opaque objects alone: the laws."""


@pytest.mark.parametrize(("outer", "inner"), NESTS)
def test_outputs_of_the_root_and_of_units_may_be_nested_in_anything(ranks, outer, inner):
    """In FSDP2 gradients of a root that returns an opaque object stay local, and the optimizer does nothing."""

    def program(model, run, number):
        with run.accumulate():
            for i in range(1 + number % 2):
                output = unwrapped(outer, model(wrapped(outer, noise(3, 6, seed=10 * number + i))))
                run.backward(output.square().mean())
        return output

    assert ranks(2).run(differences, trained(lambda: Wrapped(outer, inner), program)) == [[]] * 2


class WithLoss(Stack):
    def forward(self, x):
        output = super().forward(x)
        return Opaque({"loss": output.square().mean(), "logits": output.detach(), "hidden": [output * 2]})


@as_replicas(WithLoss)
def test_a_loss_made_inside_and_returned_in_an_object(model, run, number):
    outputs = model(noise(3, 6, seed=number))._hidden
    run.backward(outputs["loss"], retain_graph=True)
    run.backward(outputs["hidden"][0].sum())
    return outputs["logits"]


class Hidden(nn.Module):
    def __init__(self, note):
        super().__init__()
        self.linear, self.note = nn.Linear(4, 4), note

    def forward(self, x):
        y = self.linear(x._hidden).tanh()
        y.register_hook(self.note)
        return Opaque(y)


def test_two_frozen_units_at_most_are_whole_whatever_their_outputs_are_in():
    """No gradient of theirs tells that backward has left them; only their outputs do."""
    whole = []

    def note(_):
        whole.append(sum(unit.gather.is_whole for unit in units_of(model)))

    with pretended(2) as mesh:
        layers = nn.Sequential(*(Hidden(note) for _ in range(5))).requires_grad_(False)
        model = zf.shard_params(layers, mesh, units=Hidden)
        for _ in range(2):
            model(Opaque(torch.ones(2, 4, requires_grad=True)))._hidden.sum().backward()
    assert max(whole) == 2
