"""Outputs of any structure, and objects that nobody can look into."""

from __future__ import annotations

from collections import OrderedDict, namedtuple
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn

import zero_fn as zf
from tests.support.groups import pretended
from tests.support.models import Layer, Stack
from tests.support.ranks import Ranks
from tests.support.worlds import Run, as_replicas, differences, noise, trained
from zero_fn.runtime.door import units_of
from zero_fn.runtime.groups import Phase

Pair = namedtuple("Pair", ["left", "right"])


class Typed(NamedTuple):
    value: Any
    note: str


@dataclass
class Record:
    value: Any
    extra: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Frozen:
    value: Any


class Opaque:
    """No container that anyone knows."""

    def __init__(self, value: Any) -> None:
        self._hidden = value


class Slotted:
    __slots__ = ("value",)

    def __init__(self, value: Any) -> None:
        self.value = value


class Lazy:
    """Gives its tensor when called."""

    def __init__(self, value: Any) -> None:
        self._give = lambda: value

    def __call__(self) -> Any:
        return self._give()


WAYS: dict[str, tuple[Callable[[Any], Any], Callable[[Any], Any]]] = {
    "tuple": (lambda x: (x, None, 3), lambda x: x[0]),
    "list": (lambda x: ["a", x], lambda x: x[1]),
    "dict": (lambda x: {"key": x, 7: "b"}, lambda x: x["key"]),
    "ordered": (lambda x: OrderedDict(out=x), lambda x: x["out"]),
    "namedtuple": (lambda x: Pair(x, 1.5), lambda x: x.left),
    "typed": (lambda x: Typed(x, "note"), lambda x: x.value),
    "record": (lambda x: Record(x, {"n": 1}), lambda x: x.value),
    "frozen": (Frozen, lambda x: x.value),
    "opaque": (Opaque, lambda x: x._hidden),
    "slotted": (Slotted, lambda x: x.value),
    "lazy": (Lazy, lambda x: x()),
}
"""How a value is put into a container, and taken out."""


def wrapped(nesting: list[str], value: Any) -> Any:
    for kind in nesting:
        value = WAYS[kind][0](value)
    return value


def unwrapped(nesting: list[str], value: Any) -> Any:
    for kind in reversed(nesting):
        value = WAYS[kind][1](value)
    return value


class WrappedLayer(Layer):
    def __init__(self, nesting: list[str]) -> None:
        super().__init__()
        self.nesting = nesting

    def forward(self, x: Tensor) -> Any:
        return wrapped(self.nesting, super().forward(unwrapped(self.nesting, x)))


class Wrapped(Stack):
    """Inputs and outputs of the root and of every layer are wrapped."""

    def __init__(self, outer: list[str], inner: list[str]) -> None:
        super().__init__()
        self.outer, self.inner = outer, inner
        self.layers = nn.ModuleList(WrappedLayer(inner) for _ in range(3))

    def forward(self, x: Any) -> Any:
        return wrapped(self.outer, super().forward(unwrapped(self.outer, x)))

    def run(self, layer: nn.Module, x: Tensor) -> Tensor:
        return unwrapped(self.inner, layer(wrapped(self.inner, x)))


NESTS = [*(([kind], [kind]) for kind in WAYS), (["dict", "opaque", "tuple"], ["record", "lazy"])]
NESTS.append((["lazy", "typed", "slotted", "list"], ["ordered", "frozen"]))


@pytest.mark.parametrize(("outer", "inner"), NESTS)
def test_outputs_of_the_root_and_of_units_may_be_nested_in_anything(
    ranks: Ranks, outer: list[str], inner: list[str]
) -> None:
    """In FSDP2 gradients of a root that returns an opaque object stay local, and the optimizer does nothing."""

    def program(model: Any, run: Run, number: int) -> Tensor:
        with run.accumulate():
            for i in range(1 + number % 2):
                output = unwrapped(outer, model(wrapped(outer, noise(3, 6, seed=10 * number + i))))
                run.backward(output.square().mean())
        return output

    assert ranks(2).run(differences, trained(lambda: Wrapped(outer, inner), program)) == [[]] * 2


class WithLoss(Stack):
    def forward(self, x: Tensor) -> Any:
        output = super().forward(x)
        return Opaque({"loss": output.square().mean(), "logits": output.detach(), "hidden": [output * 2]})


@as_replicas(WithLoss)
def test_a_loss_made_inside_and_returned_in_an_object(model: Any, run: Run, number: int) -> object:
    outputs = model(noise(3, 6, seed=number))._hidden
    run.backward(outputs["loss"], retain_graph=True)
    run.backward(outputs["hidden"][0].sum())
    return outputs["logits"]


class Hidden(nn.Module):
    def __init__(self, note: Callable[[Tensor], None]) -> None:
        super().__init__()
        self.linear, self.note = nn.Linear(4, 4), note

    def forward(self, x: Opaque) -> Opaque:
        y = self.linear(x._hidden).tanh()
        y.register_hook(self.note)
        return Opaque(y)


def test_two_frozen_units_at_most_are_whole_whatever_their_outputs_are_in() -> None:
    """No gradient of theirs tells that backward has left them; only their outputs do."""
    whole: list[int] = []

    def note(_: Tensor) -> None:
        whole.append(sum(unit.groups.phase is Phase.GATHERED for unit in units_of(model)))

    with pretended(2) as mesh:
        layers = nn.Sequential(*(Hidden(note) for _ in range(5))).requires_grad_(False)
        model = zf.zero3(layers, mesh, units=Hidden)
        for _ in range(2):
            model(Opaque(torch.ones(2, 4, requires_grad=True)))._hidden.sum().backward()
    assert max(whole) == 2
