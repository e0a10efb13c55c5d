"""Models of the matrix: any width from 1 on, so that shards are uneven and often empty."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeVar

from hypothesis import Phase, settings
from hypothesis import strategies as st

from tests.support.models import Layer, Stack

__all__ = ["Layer", "Sizes", "Stack", "batches", "several", "sizes"]

T = TypeVar("T")

several = settings(max_examples=2, phases=[Phase.explicit, Phase.reuse, Phase.generate])
"""Each example is a list of random models. A failure names its model: shrinking would take minutes of ranks."""


def batches(one: st.SearchStrategy[T]) -> st.SearchStrategy[list[T]]:
    """Lists of random models for `several`. The first list that Hypothesis draws has only the simplest: it may be short."""
    return st.lists(one, min_size=1, max_size=5)


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
