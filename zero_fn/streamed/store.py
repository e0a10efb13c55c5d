"""Where chunks rest, and the memory they are stepped in."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from zero_fn.storage import Slab, Spill, Transfer, chosen_carrier, whole_pages
from zero_fn.tiers import Cpu, Nvme, Tier, bytes_text

__all__ = ["Store", "store_of"]

_NOTHING = torch.empty(0, dtype=torch.uint8)
_BUFFERS = 4  # one is computed in, one or two are being filled, one or two written back


class Store(Protocol):
    """Where chunks rest. Printed, it says how they get there."""

    @property
    def buffers(self) -> int:
        """How many chunks may be in memory at a time, in turn."""

    @property
    def nbytes(self) -> int:
        """Bytes of host memory that it takes."""

    def reserve(self, sizes: list[int]) -> list[int]:
        """Makes room for chunks of these sizes in bytes, and returns the place of each. Not while chunks are in memory.

        Raises:
            TierError: The tier, or memory for buffers, is too small.
        """

    def buffer(self, number: int, place: int, nbytes: int) -> Tensor:
        """The memory in which the chunk of this number is stepped, uint8. Numbers that are apart by less than `buffers`
        have different memory."""

    def fetch(self, place: int, buffer: Tensor) -> Transfer | None:
        """Begins to bring a chunk; None if it is there."""

    def keep(self, place: int, buffer: Tensor) -> Transfer | None:
        """Begins to put a chunk back; None if it is there."""

    def forget(self) -> None:
        """What is in buffers can not be relied on: a computation or a transfer failed."""


def store_of(tier: Tier, what: str) -> Store:
    """An empty store.

    Raises:
        StorageError: The path takes no files.
    """
    return _Memory(tier, what) if isinstance(tier, Cpu) else _Disk(tier, what)


class _Memory:
    """Chunks are stepped where they rest."""

    buffers = 2

    def __init__(self, tier: Cpu, what: str) -> None:
        self._tier, self._what = tier, what
        self._chunks: list[Tensor] = []
        self.nbytes = 0
        self._is_pinned = False

    def __str__(self) -> str:
        kind = "pinned memory of the host" if self._is_pinned else "memory of the host"
        return f"{bytes_text(self.nbytes)} of {kind}"

    def reserve(self, sizes: list[int]) -> list[int]:
        limit = self._tier.limit_nbytes
        left = Cpu(self._tier.pinned, None if limit is None else limit - self.nbytes)
        slab = Slab(sum(sizes), left, self._what)
        begin, offset = len(self._chunks), 0
        for nbytes in sizes:
            self._chunks.append(slab.memory[offset : offset + nbytes])
            offset += nbytes
        self.nbytes += slab.nbytes
        self._is_pinned = slab.is_pinned
        return list(range(begin, len(self._chunks)))

    def buffer(self, number: int, place: int, nbytes: int) -> Tensor:
        return self._chunks[place][:nbytes]

    def fetch(self, place: int, buffer: Tensor) -> Transfer | None:
        return None

    def keep(self, place: int, buffer: Tensor) -> Transfer | None:
        return None

    def forget(self) -> None:
        """Nothing to do: chunks are where they rest."""


class _Disk:
    """Chunks pass through a few buffers of one slab, which the kernel reads and writes directly.

    There are as many buffers as chunks, but at most four, each as large as the largest chunk.
    """

    def __init__(self, tier: Nvme, what: str) -> None:
        self._slab: Slab | None = None
        self._views: tuple[Tensor, ...] = ()
        self._within: dict[int, int] = {}  # by the address of a buffer, the place of the chunk that it holds
        self._what = what
        self._chunks = self._largest_nbytes = 0
        self._carrier = chosen_carrier()
        self._spill = Spill(tier, what, self._carrier)

    def __str__(self) -> str:
        file = self._spill.file
        how = "direct" if file.is_direct else "through the page cache"
        buffers = f"{self.buffers} buffer{'s' * (self.buffers > 1)} of {bytes_text(self._largest_nbytes)}"
        return f"{bytes_text(file.nbytes)} in {file.tier}, {how} by {self._carrier}, {buffers}"

    def __del__(self) -> None:
        self._forget_buffers()

    @property
    def buffers(self) -> int:
        return min(self._chunks, _BUFFERS)

    @property
    def nbytes(self) -> int:
        return self._slab.nbytes if self._slab is not None else 0

    def reserve(self, sizes: list[int]) -> list[int]:
        places, offset = [], self._spill.reserve(sum(map(whole_pages, sizes)))
        for nbytes in sizes:
            places.append(offset)
            offset += whole_pages(nbytes)
        self._make_buffers(self._chunks + len(sizes), max(map(whole_pages, sizes), default=0))
        return places

    def _make_buffers(self, chunks: int, largest_nbytes: int) -> None:
        before = self.buffers, self._largest_nbytes
        self._chunks, self._largest_nbytes = chunks, max(self._largest_nbytes, largest_nbytes)
        if (self.buffers, self._largest_nbytes) == before or not self._largest_nbytes:
            return
        self._forget_buffers()
        size = self._largest_nbytes
        self._slab = Slab(size * self.buffers, Cpu(True, None), f"buffers of {self._what}", forked=False)
        self._views = torch.split(self._slab.memory, size)
        self._carrier.register(self._slab.memory)

    def _forget_buffers(self) -> None:
        if self._slab is not None:
            self._carrier.forget(self._slab.memory)
        self._slab, self._views, self._within = None, (), {}

    def buffer(self, number: int, place: int, nbytes: int) -> Tensor:
        return self._views[number % self.buffers][: whole_pages(nbytes)] if nbytes else _NOTHING

    def fetch(self, place: int, buffer: Tensor) -> Transfer | None:
        if self._within.get(buffer.data_ptr()) == place:
            return None
        self._within[buffer.data_ptr()] = place
        return self._spill.read(place, buffer)

    def keep(self, place: int, buffer: Tensor) -> Transfer | None:
        self._within[buffer.data_ptr()] = place
        return self._spill.write(place, buffer)

    def forget(self) -> None:
        self._within.clear()
