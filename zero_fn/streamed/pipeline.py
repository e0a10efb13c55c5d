"""Fetches chunks ahead, hands each to a function, and writes it back, in a few buffers.

    chunk        0      1      2      3      4         with four buffers
    fetch        ====   ====   ====   ....   ....      two ahead of the one that is computed
    compute             ####   ####   ####
    write back                 ====   ====   ====

Reads and writes are under way beside each other and beside the computation; what is slowest decides.

[Note: back and forth] The chunks that were computed last are still in the buffers. A pass that visits them in the other
direction begins with those: it reads four buffers less, and has work from its first moment, while the disk fetches the rest.
So whatever the disk could not be asked to do before (a norm over all gradients decides by how much they are clipped) costs
a step no waiting for it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any, Protocol

from zero_fn.errors import StorageError
from zero_fn.storage import Waited, wait_all
from zero_fn.streamed.store import BUFFERS

__all__ = ["Lane", "Pass", "Transfers", "each_chunk"]

Transfers = Sequence[Waited | None]
"""What is under way; None was there already."""


class Lane(Protocol):
    """The way of one part of each chunk."""

    def fetch(self, chunk: Any) -> tuple[Any, Transfers]:
        """Memory for the part, and what is bringing it there. Called once for each chunk of a pass, in order.

        The memory of the chunk that came four before may be taken: it has been written back.
        """

    def keep(self, chunk: Any, memory: Any) -> Transfers:
        """Begins to put the part back."""

    def forget(self) -> None:
        """A pass failed: what memory holds can not be relied on."""


class Pass:
    """Brings chunks into memory, in order, computes with each, and puts it back; as far as it is asked to.

    Attributes:
        done: How many were computed.
    """

    def __init__(
        self, lanes: Sequence[Lane], order: Sequence[Any], compute: Callable[..., None], *, writes: bool = True
    ) -> None:
        """A pass that has not begun.

        Args:
            lanes: The ways of the parts of a chunk; `compute` gets the memory of each.
            order: What to visit. Parts that are not stored yet come with memory of any content.
            compute: What to do with each, as `compute(chunk, *memory)`; it may change the memory.
            writes: Whether it does, and parts are to be put back.
        """
        self.done = 0
        self._lanes, self._order, self._compute, self._writes = lanes, order, compute, writes
        self._fetches: dict[int, list[tuple[Any, Transfers]]] = {}
        self._puts: dict[int, list[Transfers]] = {}  # by lane

    def fetch(self) -> None:
        """Begins to bring the next chunks.

        Raises:
            StorageError: A write failed.
        """
        turn = self.done
        for later in range(turn + len(self._fetches), min(turn + BUFFERS // 2 + 1, len(self._order))):
            _wait(self._puts.pop(later - BUFFERS, ()))
            self._fetches[later] = []
            for lane in self._lanes:
                self._fetches[later].append(lane.fetch(self._order[later]))

    def reach(self, count: int) -> None:
        """Computes until so many chunks are done.

        Raises:
            StorageError: A read or a write failed.
        """
        for turn in range(self.done, count):
            chunk = self._order[turn]
            self.fetch()
            _wait([transfers for _, transfers in self._fetches[turn]])
            memory = [part for part, _ in self._fetches.pop(turn)]
            self._compute(chunk, *memory)
            if self._writes:
                self._puts[turn] = []
                for lane, part in zip(self._lanes, memory, strict=True):
                    self._puts[turn].append(lane.keep(chunk, part))
            self.done += 1

    def wait(self, only: Lane | None = None) -> None:
        """Waits until what was computed is back: all of it, or what went through one lane.

        Raises:
            StorageError: A write failed.
        """
        for turn in sorted(self._puts):
            if only is None:
                _wait(self._puts.pop(turn))
            else:
                at = self._lanes.index(only)
                transfers, self._puts[turn][at] = self._puts[turn][at], ()
                wait_all(transfers)

    def close(self) -> None:
        """Lets nothing be under way; what was not computed stays as it was."""
        is_whole = self.done == len(self._order) and not self._puts
        left = [transfers for fetched in self._fetches.values() for _, transfers in fetched]
        for transfers in (*left, *(each for put in self._puts.values() for each in put)):
            with suppress(StorageError):  # the first failure is the one that is told
                wait_all(transfers)
        self._fetches, self._puts = {}, {}
        if not is_whole:
            for lane in self._lanes:
                lane.forget()


def _wait(transfers: Sequence[Transfers]) -> None:
    wait_all(transfer for each in transfers for transfer in each)


def each_chunk(
    lanes: Sequence[Lane],
    chunks: Sequence[Any],
    compute: Callable[..., None],
    *,
    writes: bool = True,
    backwards: bool = False,
) -> None:
    """A whole `Pass` over chunks.

    Args:
        lanes, compute, writes: See `Pass`.
        chunks: What to visit.
        backwards: Whether to begin with the last. [Note: back and forth]

    Raises:
        StorageError: A read or a write failed. Nothing is under way any more.
    """
    order = list(reversed(chunks)) if backwards else chunks
    visits = Pass(lanes, order, compute, writes=writes)
    try:
        visits.reach(len(order))
        visits.wait()
    finally:
        visits.close()
