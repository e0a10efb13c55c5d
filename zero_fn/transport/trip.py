"""Collectives one after the other, each of which begins when the one before it was waited for."""

from __future__ import annotations

from collections.abc import Iterator

from zero_fn.transport.line import Work

__all__ = ["Trip"]


class Trip:
    """Tensors under way. The first leg is begun at once, the others when it is waited for."""

    def __init__(self, legs: Iterator[Work | Trip]) -> None:
        self._legs = legs
        self._work = next(legs, None)

    def wait(self) -> None:
        """Waits until all have arrived."""
        while self._work is not None:
            self._work.wait()
            self._work = next(self._legs, None)
