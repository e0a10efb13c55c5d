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

from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Generic, Protocol, TypeVar

from torch import Tensor

from zero_fn.errors import StorageError
from zero_fn.storage import Transfer, Waited, wait_all
from zero_fn.streamed.store import BUFFERS, Store

__all__ = ["Lane", "Pass", "StoreLane", "Stored", "each_chunk"]


class Stored(Protocol):
    """What rests in a store as one."""

    store: Store
    nbytes: int
    place: int
    is_stored: bool


C = TypeVar("C")
V = TypeVar("V", contravariant=True)


class Lane(Protocol[V]):
    """The way of one part of each chunk, in one pass."""

    def fetch(self, chunk: V) -> tuple[Tensor, Waited | None]:
        """Memory for the part, and what is bringing it there, if anything is. Called once for each chunk, in order.

        The memory of the chunk that came four before may be taken: it has been written back.
        """

    def keep(self, chunk: V, memory: Tensor) -> Waited | None:
        """Begins to put the part back; None if it is there."""

    def forget(self) -> None:
        """A pass failed: what memory holds can not be relied on."""


class StoreLane:
    """Chunks of stores, each with buffers of its own. A chunk has the same buffer in every pass over the same chunks."""

    def __init__(self, chunks: Sequence[Stored]) -> None:
        """A lane for a pass over these chunks, in either direction."""
        self._stores: dict[int, Store] = {}
        self._numbers: dict[int, int] = {}  # of each chunk among those of its store
        counts: Counter[int] = Counter()
        for chunk in chunks:
            self._stores[id(chunk.store)] = chunk.store
            self._numbers[id(chunk)] = counts[id(chunk.store)]
            counts[id(chunk.store)] += 1

    def fetch(self, chunk: Stored) -> tuple[Tensor, Transfer | None]:
        store = chunk.store
        buffer = store.buffer(self._numbers[id(chunk)], chunk.place, chunk.nbytes)
        return buffer, store.fetch(chunk.place, buffer) if chunk.is_stored and chunk.nbytes else None

    def forget(self) -> None:
        for store in self._stores.values():
            store.forget()

    def keep(self, chunk: Stored, memory: Tensor) -> Transfer | None:
        chunk.is_stored = True
        return chunk.store.keep(chunk.place, memory) if chunk.nbytes else None


class Pass(Generic[C]):
    """Brings chunks into memory, in order, computes with each, and puts it back; as far as it is asked to.

    Attributes:
        done: How many were computed.
    """

    def __init__(
        self, lanes: Sequence[Lane[C]], order: Sequence[C], compute: Callable[..., None], *, writes: bool = True
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
        self._fetches: dict[int, list[tuple[Tensor, Waited | None]]] = {}
        self._puts: dict[int, list[Waited | None]] = {}

    def fetch(self) -> None:
        """Begins to bring the next chunks.

        Raises:
            StorageError: A write failed.
        """
        turn = self.done
        for later in range(turn + len(self._fetches), min(turn + BUFFERS // 2 + 1, len(self._order))):
            wait_all(self._puts.pop(later - BUFFERS, ()))
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
            wait_all([transfer for _, transfer in self._fetches[turn]])
            memory = [buffer for buffer, _ in self._fetches.pop(turn)]
            self._compute(chunk, *memory)
            if self._writes:
                self._puts[turn] = []
                for lane, buffer in zip(self._lanes, memory, strict=True):
                    self._puts[turn].append(lane.keep(chunk, buffer))
            self.done += 1

    def wait(self, lanes: Sequence[Lane[C]] | None = None) -> None:
        """Waits until what was computed is back: all of it, or what went through some lanes.

        Raises:
            StorageError: A write failed.
        """
        if lanes is None:
            while self._puts:
                wait_all(self._puts.pop(min(self._puts)))
            return
        for turn, each in self._puts.items():
            wait_all([put for put, lane in zip(each, self._lanes, strict=True) if lane in lanes])
            self._puts[turn] = [None if lane in lanes else put for put, lane in zip(each, self._lanes, strict=True)]

    def close(self) -> None:
        """Lets nothing be under way; what was not computed stays as it was."""
        is_whole = self.done == len(self._order) and not self._puts
        left: list[Waited | None] = [transfer for fetched in self._fetches.values() for _, transfer in fetched]
        for transfer in (*left, *(put for each in self._puts.values() for put in each)):
            with suppress(StorageError):  # the first failure is the one that is told
                wait_all([transfer])
        self._fetches, self._puts = {}, {}
        if not is_whole:
            for lane in self._lanes:
                lane.forget()


def each_chunk(
    lanes: Sequence[Lane[C]],
    chunks: Sequence[C],
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
