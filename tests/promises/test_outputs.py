"""G24: outputs of any structure, and objects that nobody can look into."""

from __future__ import annotations

from collections import OrderedDict, namedtuple
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import pytest
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from tests.promises.models import Layer, Stack, batches, several
from tests.promises.oracle import Run, differences, noise
from tests.support.profiles import SIZES
from tests.support.ranks import Ranks

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


WRAP: dict[str, Callable[[Any], Any]] = {
    "tuple": lambda x: (x, None, 3),
    "list": lambda x: ["a", x],
    "dict": lambda x: {"key": x, 7: "b"},
    "ordered": lambda x: OrderedDict(out=x),
    "namedtuple": lambda x: Pair(x, 1.5),
    "typed": lambda x: Typed(x, "note"),
    "record": lambda x: Record(x, {"n": 1}),
    "frozen": Frozen,
    "opaque": Opaque,
    "slotted": Slotted,
    "lazy": Lazy,
}

UNWRAP: dict[str, Callable[[Any], Any]] = {
    "tuple": lambda x: x[0],
    "list": lambda x: x[1],
    "dict": lambda x: x["key"],
    "ordered": lambda x: x["out"],
    "namedtuple": lambda x: x.left,
    "typed": lambda x: x.value,
    "record": lambda x: x.value,
    "frozen": lambda x: x.value,
    "opaque": lambda x: x._hidden,
    "slotted": lambda x: x.value,
    "lazy": lambda x: x(),
}

nestings = st.lists(st.sampled_from(sorted(WRAP)), min_size=1, max_size=4)


def wrapped(nesting: list[str], value: Any) -> Any:
    for kind in nesting:
        value = WRAP[kind](value)
    return value


def unwrapped(nesting: list[str], value: Any) -> Any:
    for kind in reversed(nesting):
        value = UNWRAP[kind](value)
    return value


class WrappedLayer(Layer):
    def __init__(self, nesting: list[str]) -> None:
        super().__init__(6, 9)
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


def checked(pairs: list[tuple[list[str], list[str]]]) -> list[str]:
    found = []
    for outer, inner in pairs:

        def program(model: Any, run: Run, number: int, outer: list[str] = outer) -> Tensor:
            with run.accumulate():
                for i in range(1 + number % 2):
                    x = wrapped(outer, noise(3, 6, seed=10 * number + i))
                    output = unwrapped(outer, model(x))
                    run.backward(output.square().mean())
            return output

        def build(outer: list[str] = outer, inner: list[str] = inner) -> nn.Module:
            return Wrapped(outer, inner)

        found += [f"{outer} {inner}: {line}" for line in differences(build, program)]
    return found


@pytest.mark.parametrize("n", SIZES)
@several
@given(pairs=batches(st.tuples(nestings, nestings)))
def test_g24_outputs_may_be_nested_in_anything(ranks: Ranks, n: int, pairs: list[tuple[list[str], list[str]]]) -> None:
    assert ranks(n).run(checked, pairs) == [[]] * n


@pytest.mark.parametrize("n", SIZES)
@pytest.mark.parametrize("kind", sorted(WRAP))
def test_g24_an_object_of_the_root_and_of_units(ranks: Ranks, n: int, kind: str) -> None:
    """In FSDP2 gradients of a root that returns an opaque object stay local, and the optimizer does nothing."""
    assert ranks(n).run(checked, [([kind], [kind])]) == [[]] * n


@pytest.mark.parametrize("n", SIZES)
def test_g24_a_loss_made_inside_and_returned_in_an_object(ranks: Ranks, n: int) -> None:
    class WithLoss(Stack):
        def forward(self, x: Tensor) -> Any:
            output = super().forward(x)
            return Opaque({"loss": output.square().mean(), "logits": output.detach(), "hidden": [output * 2]})

    def program(model: Any, run: Run, number: int) -> object:
        outputs = model(noise(3, 6, seed=number))._hidden
        run.backward(outputs["loss"], retain_graph=True)
        run.backward(outputs["hidden"][0].sum())
        return outputs["logits"]

    assert ranks(n).run(differences, WithLoss, program) == [[]] * n
