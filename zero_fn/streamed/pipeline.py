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
from typing import Protocol, TypeVar

from torch import Tensor

from zero_fn.errors import StorageError
from zero_fn.storage import Transfer, Waited, wait_all
from zero_fn.streamed.store import BUFFERS, Store

__all__ = ["Lane", "StoreLane", "Stored", "each_chunk"]


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

    def fetch(self, chunk: V) -> tuple[Tensor, Transfer | None]:
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


def each_chunk(
    lanes: Sequence[Lane[C]],
    chunks: Sequence[C],
    compute: Callable[..., None],
    *,
    writes: bool = True,
    backwards: bool = False,
) -> None:
    """Brings each chunk into memory, in order, calls `compute(chunk, *memory)`, and puts it back.

    Args:
        lanes: The ways of the parts of a chunk; `compute` gets the memory of each.
        chunks: What to visit. Parts that are not stored yet come with memory of any content.
        compute: What to do with each; it may change the memory.
        writes: Whether it does, and parts are to be put back.
        backwards: Whether to begin with the last. [Note: back and forth]

    Raises:
        StorageError: A read or a write failed. Nothing is under way any more.
    """
    order = list(reversed(chunks)) if backwards else chunks
    is_whole = False
    fetches: dict[int, list[tuple[Tensor, Transfer | None]]] = {}
    puts: dict[int, list[Waited | None]] = {}
    try:
        for turn, chunk in enumerate(order):
            for later in range(turn + len(fetches), min(turn + BUFFERS // 2 + 1, len(order))):
                wait_all(puts.pop(later - BUFFERS, ()))
                fetches[later] = []
                for lane in lanes:
                    fetches[later].append(lane.fetch(order[later]))
            wait_all([transfer for _, transfer in fetches[turn]])
            memory = [buffer for buffer, _ in fetches.pop(turn)]
            compute(chunk, *memory)
            if writes:
                puts[turn] = []
                for lane, buffer in zip(lanes, memory, strict=True):
                    puts[turn].append(lane.keep(chunk, buffer))
        while puts:
            wait_all(puts.pop(min(puts)))
        is_whole = True
    finally:
        left: list[Waited | None] = [transfer for fetched in fetches.values() for _, transfer in fetched]
        for transfer in (*left, *(put for each in puts.values() for put in each)):
            with suppress(StorageError):  # the first failure is the one that is told
                wait_all([transfer])
        if not is_whole:
            for lane in lanes:
                lane.forget()
