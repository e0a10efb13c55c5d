"""What this rank sends, counted where it is sent."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

__all__ = ["PAYLOAD", "Sent", "count", "open_counts", "traffic"]


class Sent:
    """Bytes that this rank has sent; counted by `traffic`.

    Attributes:
        by_collective: Bytes of payload sent, by `"all-gather"`, `"reduce-scatter"` and `"control"` (agreement between
            ranks: a few bytes per step).
        calls: Number of collectives issued, by the same names.
        by_axis: Bytes of parameters and gradients sent, by the name of the data axis they were sent along.
    """

    def __init__(self) -> None:
        self.by_collective: Counter[str] = Counter()
        self.calls: Counter[str] = Counter()
        self.by_axis: Counter[str] = Counter()

    @property
    def nbytes(self) -> int:
        """Bytes of parameters and gradients sent: everything but control messages."""
        return sum(self.by_collective[name] for name in PAYLOAD)

    def __repr__(self) -> str:
        parts = ", ".join(f"{name} {nbytes} B in {self.calls[name]}" for name, nbytes in self.by_collective.items())
        return f"Sent({parts or 'nothing'})"


PAYLOAD = ("all-gather", "reduce-scatter")
"""Collectives of parameters and gradients; every other is of control messages."""

open_counts: list[Sent] = []
"""The counts that are open now."""


@contextmanager
def traffic() -> Iterator[Sent]:
    """Counts the bytes that this rank sends inside the block.

    Counted are the bytes handed to the transport, on every data axis: for an exchange the pieces sent, for a native
    all-gather or reduce-scatter over `n` ranks `(n - 1)/n` of the gathered buffer, what a ring sends. What torch sends along
    model axes is not counted.

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
