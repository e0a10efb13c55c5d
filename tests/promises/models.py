"""Models of the matrix: any width from 1 on, so that shards are uneven and often empty."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeVar

import torch
from hypothesis import Phase, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from tests.support.profiles import PROFILE

__all__ = ["Layer", "Sizes", "Stack", "batches", "several", "sizes"]

T = TypeVar("T")

several = settings(max_examples=2, phases=[Phase.explicit, Phase.reuse, Phase.generate])
"""Each example is a list of random models. A failure names its model: shrinking would take minutes of ranks."""


def batches(one: st.SearchStrategy[T]) -> st.SearchStrategy[list[T]]:
    """Lists of random models for `several`. The first list that Hypothesis draws has only the simplest: it may be short."""
    least, most = (1, 5) if PROFILE == "dev" else (4, 6)
    return st.lists(one, min_size=least, max_size=most)


class Layer(nn.Module):
    """A residual layer; repeated, so each is a unit."""

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.first = nn.Linear(width, hidden)
        self.second = nn.Linear(hidden, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.second(torch.tanh(self.first(x)))


class Stack(nn.Module):
    """Layers between two linears of the root."""

    def __init__(self, width: int = 6, hidden: int = 9, layers: int = 3) -> None:
        super().__init__()
        self.enter = nn.Linear(width, width)
        self.layers = nn.ModuleList(Layer(width, hidden) for _ in range(layers))
        self.leave = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        x = self.enter(x)
        for layer in self.layers:
            x = self.run(layer, x)
        output: Tensor = self.leave(x)
        return output

    def run(self, layer: nn.Module, x: Tensor) -> Tensor:
        output: Tensor = layer(x)
        return output


@dataclass(frozen=True)
class Sizes:
    """A random `Stack` and how it is trained."""

    width: int
    hidden: int
    layers: int
    microbatches: int
    optimizer: str
    units: str | None
    seed: int

    def __call__(self) -> Stack:
        return Stack(self.width, self.hidden, self.layers)

    @property
    def options(self) -> dict[str, object]:
        """Of the transform."""
        return {} if self.units is None else {"units": self.units}


sizes: st.SearchStrategy[Sizes] = st.builds(
    Sizes,
    width=st.integers(1, 17),
    hidden=st.integers(1, 17),
    layers=st.integers(1, 3),
    microbatches=st.integers(1, 4),
    optimizer=st.sampled_from(["sgd", "adam", "adamw"]),
    units=st.sampled_from([None, "*", "*.first"]),
    seed=st.integers(0, 1000),
)
