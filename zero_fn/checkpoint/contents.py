"""A checkpoint that is read, whoever has written it: tensors of a model and an optimizer, options of groups, other values."""

from __future__ import annotations

from abc import abstractmethod
from pathlib import Path
from typing import Any

from zero_fn.checkpoint.pieces import Key, Pieces

__all__ = ["Contents"]


class Contents(Pieces):
    """A checkpoint.

    Attributes:
        ranks: How many have written it.
        parts: What each of them says.
        options: Of the group of each parameter, with the rank that says so.
    """

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self.ranks = 0
        self.parts: list[dict[str, Any]] = []
        self.options: dict[str, tuple[int, Any]] = {}
        self._values: dict[str, tuple[int, Any]] = {}
        self._states: dict[str, list[tuple[str, Key]]] = {}

    def states_of(self, parameter: str) -> list[tuple[str, Key]]:
        """The states of a parameter that are tensors: their names and keys."""
        return self._states.get(parameter, [])

    def values_of(self, parameter: str) -> dict[str, Any]:
        """The states of a parameter that are none."""
        rank, values = self._values.get(parameter, (0, {}))
        return {name: self.value(rank, value) for name, value in values.items()}

    @abstractmethod
    def value(self, rank: int, encoded: Any) -> Any:
        """A value that a rank has saved."""

    @abstractmethod
    def is_parted(self, what: str, name: str) -> bool:
        """Whether ranks have saved different values of `extra`, or of their buffers, under a name."""
