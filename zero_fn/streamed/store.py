"""Where chunks rest, and the memory they are stepped in.

device    tensors of the device: nothing moves
host      ranges of a shelf, which are stepped where they are
disk      ranges of a shelf, which pass through four of its buffers: one is computed in, one or two are being filled, one or
          two written back
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import Protocol

import torch
from torch import Tensor

from zero_fn.storage import Disk, Ring, Transfer, shelf_of, whole_pages
from zero_fn.tiers import Tier, bytes_text

__all__ = ["BUFFERS", "NOTHING", "Store", "Stored", "ring_form", "ring_of"]

BUFFERS = 4
NOTHING = torch.empty(0, dtype=torch.uint8)


def ring_form(count: int, largest_nbytes: int) -> tuple[int, int]:
    """How many buffers so many chunks have, and of how many bytes."""
    return min(count, BUFFERS), whole_pages(largest_nbytes)


def ring_of(sizes: Sequence[int], what: str) -> Ring:
    """As many buffers as there are chunks of these sizes, but at most four, each as large as the largest.

    Raises:
        TierError: There is not so much memory.
    """
    return Ring(*ring_form(len(sizes), max(sizes, default=0)), f"buffers of {what}")


class Stored(Protocol):
    """What rests in a store as one.

    Attributes:
        nbytes: Its bytes.
        place: Where it rests.
        is_stored: Whether it does: false before it was put there.
    """

    nbytes: int
    place: int
    is_stored: bool


class Store:
    """Room for chunks, and the lane by which they come and go. Printed, it says where they rest and how they get there."""

    def __init__(self, tier: Tier | None, what: str) -> None:
        """An empty store; a tier of None is the memory of the device itself.

        Raises:
            StorageError: The path takes no files.
        """
        self._shelf = shelf_of(tier, what) if tier is not None else None
        self._on_device: list[Tensor] = []
        self._sizes: list[int] = []
        self._held: dict[int, Tensor] = {}  # chunks in memory, by their place, those used last at the end

    def __str__(self) -> str:
        taken = bytes_text(self.nbytes)
        if isinstance(self._shelf, Disk):
            return f"{taken} in {self._shelf}, {self._shelf.stagings}"
        return f"{taken} of memory of the {'device' if self._shelf is None else 'host'}"

    @property
    def nbytes(self) -> int:
        """Bytes that it takes of its tier."""
        return self._shelf.nbytes if self._shelf is not None else sum(map(len, self._on_device))

    @property
    def buffers_nbytes(self) -> int:
        """Bytes of host memory that chunks pass through."""
        return self._shelf.buffers_nbytes if self._shelf is not None else 0

    def reserve(self, chunks: Sequence[Stored], device: torch.device) -> None:
        """Gives chunks of parameters on a device a place. Not while chunks are in memory.

        Raises:
            TierError: The tier, or memory for buffers, is too small.
        """
        sizes = [chunk.nbytes for chunk in chunks]
        if not chunks:
            return
        if self._shelf is None:
            places = [len(self._on_device) + number for number in range(len(chunks))]
            self._on_device += [torch.zeros(nbytes, dtype=torch.uint8, device=device) for nbytes in sizes]
        elif isinstance(self._shelf, Disk):
            places = self._shelf.reserve(sizes)
            self._sizes += sizes
            count, largest_nbytes = ring_form(len(self._sizes), max(self._sizes))
            self.forget()  # what was there goes first
            self._shelf.stage(largest_nbytes, count)
        else:
            (begin,) = self._shelf.reserve([sum(sizes)])
            places = list(accumulate(sizes[:-1], initial=begin))
        for chunk, place in zip(chunks, places, strict=True):
            chunk.place = place

    def fetch(self, chunk: Stored) -> tuple[Tensor, Sequence[Transfer | None]]:
        """Memory of a chunk, and what is bringing its bytes there. That of the chunk that came four before may be taken."""
        if self._shelf is None:
            return self._on_device[chunk.place], ()
        if not chunk.nbytes:
            return NOTHING, ()
        self._shelf.require_own()
        memory = self._held.pop(chunk.place, None)
        is_there = memory is not None or not chunk.is_stored
        if memory is None:
            if len(self._held) == BUFFERS:
                self._shelf.give_back(self._held.pop(next(iter(self._held))))
            memory = self._shelf.borrow(chunk.place, chunk.nbytes)
        self._held[chunk.place] = memory
        return memory, [] if is_there else [self._shelf.read(chunk.place, memory)]

    def keep(self, chunk: Stored, memory: Tensor) -> Sequence[Transfer | None]:
        """Begins to put a chunk back."""
        chunk.is_stored = True
        return [self._shelf.write(chunk.place, memory)] if self._shelf is not None and chunk.nbytes else ()

    def forget(self) -> None:
        """What is in buffers can not be relied on: a computation or a transfer failed."""
        while self._shelf is not None and self._held:
            self._shelf.give_back(self._held.popitem()[1])
