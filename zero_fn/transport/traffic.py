"""`traffic()`: counts the bytes that this rank sends."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

__all__ = ["PAYLOAD", "Sent", "count", "open_counts", "traffic"]


@dataclass(eq=False)
class Sent:
    """Bytes that this rank has sent, as counted by `traffic`.

    Attributes:
        by_collective: Bytes of payload sent, by `"all-gather"`, `"reduce-scatter"`, `"all-to-all"`
            and `"control"` (agreement between ranks: a few bytes per step).
        calls: Number of collectives issued, by the same names.
        by_axis: Bytes of parameters and gradients sent, by the name of the
            data axis they were sent along.
    """

    by_collective: Counter[str] = field(default_factory=Counter)
    calls: Counter[str] = field(default_factory=Counter)
    by_axis: Counter[str] = field(default_factory=Counter)

    @property
    def nbytes(self) -> int:
        """Bytes of parameters and gradients sent, without control messages."""
        return sum(self.by_collective[name] for name in PAYLOAD)

    def __repr__(self) -> str:
        parts = ", ".join(
            f"{name} {nbytes} B in {self.calls[name]}"
            for name, nbytes in self.by_collective.items()
        )
        return f"Sent({parts or 'nothing'})"


PAYLOAD = ("all-gather", "reduce-scatter", "all-to-all")
"""Collectives of parameters and gradients. All others send control messages."""

open_counts: list[Sent] = []
"""The counts that are open now."""


@contextmanager
def traffic() -> Iterator[Sent]:
    """Counts the bytes that this rank sends inside the block.

    Bytes that are handed to transports are counted, on all data axes. For a direct exchange or an
    all-to-all these are the pieces sent; for the backend's own all-gather or reduce-scatter over
    `n` ranks, `(n - 1)/n` of the gathered buffer, which a ring sends. Bytes that torch sends along
    model axes are not counted.

    Returns:
        A context manager that yields a `Sent`, which may be read during and after the block.
    """
    sent = Sent()
    open_counts.append(sent)
    try:
        yield sent
    finally:
        open_counts.remove(sent)


def count(collective: str, nbytes: int, axis: str = "") -> None:
    """Adds one collective along an axis to every open count."""
    for sent in open_counts:
        sent.by_collective[collective] += nbytes
        sent.calls[collective] += 1
        if collective in PAYLOAD:
            sent.by_axis[axis] += nbytes
