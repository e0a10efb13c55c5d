"""Where chunks rest, and the memory they are stepped in."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from zero_fn.storage import Buffers, Slab, Spill, Transfer, chosen_carrier, whole_pages
from zero_fn.tiers import Cpu, Nvme, Tier, bytes_text

__all__ = ["BUFFERS", "NOWHERE", "Ring", "Store", "ring_form", "store_of"]

_NOTHING = torch.empty(0, dtype=torch.uint8)
BUFFERS = 4  # one is computed in, one or two are being filled, one or two written back


class Store(Protocol):
    """Where chunks rest. Printed, it says how they get there.

    Attributes:
        is_on_host: Whether they are stepped on the host.
    """

    is_on_host: bool

    @property
    def buffers_nbytes(self) -> int:
        """Bytes of host memory that chunks pass through."""

    @property
    def nbytes(self) -> int:
        """Bytes that it takes of its tier."""

    def reserve(self, sizes: list[int], device: torch.device) -> list[int]:
        """Makes room for chunks of these sizes in bytes, of parameters on a device, and returns the place of each. Not
        while chunks are in memory.

        Raises:
            TierError: The tier, or memory for buffers, is too small.
        """

    def buffer(self, number: int, place: int, nbytes: int) -> Tensor:
        """The memory in which the chunk of this number is stepped, uint8. Numbers that are less than `BUFFERS` apart
        have different memory."""

    def fetch(self, place: int, buffer: Tensor) -> Transfer | None:
        """Begins to bring a chunk; None if it is there."""

    def keep(self, place: int, buffer: Tensor) -> Transfer | None:
        """Begins to put a chunk back; None if it is there."""

    def forget(self) -> None:
        """What is in buffers can not be relied on: a computation or a transfer failed."""


def store_of(tier: Tier | None, what: str) -> Store:
    """An empty store; without a tier, in the memory of the device itself.

    Raises:
        StorageError: The path takes no files.
    """
    if tier is None:
        return _Device()
    return _Memory(tier, what) if isinstance(tier, Cpu) else _Disk(tier, what)


class _Device:
    """Chunks rest on the device of their parameters."""

    is_on_host = False

    def __init__(self) -> None:
        self._chunks: list[Tensor] = []
        self.nbytes = self.buffers_nbytes = 0

    def __str__(self) -> str:
        return f"{bytes_text(self.nbytes)} of memory of the device"

    def reserve(self, sizes: list[int], device: torch.device) -> list[int]:
        begin = len(self._chunks)
        self._chunks += [torch.zeros(nbytes, dtype=torch.uint8, device=device) for nbytes in sizes]
        self.nbytes += sum(sizes)
        return list(range(begin, len(self._chunks)))

    def buffer(self, turn: int, place: int, nbytes: int) -> Tensor:
        return self._chunks[place]

    def fetch(self, place: int, buffer: Tensor) -> Transfer | None:
        return None

    def keep(self, place: int, buffer: Tensor) -> Transfer | None:
        return None

    def forget(self) -> None:
        """Nothing to do: chunks are where they rest."""


NOWHERE: Store = _Device()
"""Of chunks that have no room yet."""


class _Memory:
    """Chunks are stepped where they rest."""

    is_on_host = True

    def __init__(self, tier: Cpu, what: str) -> None:
        self._tier, self._what = tier, what
        self._chunks: list[Tensor] = []
        self.nbytes = self.buffers_nbytes = 0
        self._is_pinned = False

    def __str__(self) -> str:
        kind = "pinned memory of the host" if self._is_pinned else "memory of the host"
        return f"{bytes_text(self.nbytes)} of {kind}"

    def reserve(self, sizes: list[int], device: torch.device) -> list[int]:
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


def ring_form(count: int, largest_nbytes: int) -> tuple[int, int]:
    """How many buffers a ring for so many chunks has, and of how many bytes."""
    return min(count, BUFFERS), whole_pages(largest_nbytes)


class Ring(Buffers):
    """Buffers that are taken in turn."""

    def __init__(self, count: int, largest_nbytes: int, what: str) -> None:
        """Takes as many buffers as chunks, but at most four, each as large as the largest.

        Raises:
            TierError: There is not so much memory.
        """
        super().__init__(*ring_form(count, largest_nbytes), f"buffers of {what}")

    def buffer(self, turn: int, nbytes: int) -> Tensor:
        """Memory for that many bytes, in whole pages."""
        return self.views[turn % self.count][: whole_pages(nbytes)] if nbytes else _NOTHING


class _Disk:
    """Chunks pass through a ring of buffers."""

    is_on_host = True

    def __init__(self, tier: Nvme, what: str) -> None:
        self._within: dict[int, int] = {}  # by the address of a buffer, the place of the chunk that it holds
        self._what = what
        self._chunks = self._largest_nbytes = 0
        self._ring = Ring(0, 0, what)
        self._spill = Spill(tier, what, chosen_carrier())

    def __str__(self) -> str:
        return f"{bytes_text(self.nbytes)} in {self._spill}, {self._ring}"

    @property
    def buffers_nbytes(self) -> int:
        return self._ring.nbytes

    @property
    def nbytes(self) -> int:
        return self._spill.file.nbytes

    def reserve(self, sizes: list[int], device: torch.device) -> list[int]:
        places, offset = [], self._spill.reserve(sum(map(whole_pages, sizes)))
        for nbytes in sizes:
            places.append(offset)
            offset += whole_pages(nbytes)
        self._make_buffers(self._chunks + len(sizes), max(map(whole_pages, sizes), default=0))
        return places

    def _make_buffers(self, chunks: int, largest_nbytes: int) -> None:
        self._chunks, self._largest_nbytes = chunks, max(self._largest_nbytes, largest_nbytes)
        if (min(chunks, BUFFERS), self._largest_nbytes) != (self._ring.count, self._ring.size):
            self._ring = Ring(0, 0, self._what)  # what was there goes first
            self._within.clear()
            self._ring = Ring(chunks, self._largest_nbytes, self._what)

    def buffer(self, number: int, place: int, nbytes: int) -> Tensor:
        return self._ring.buffer(number, nbytes)

    def fetch(self, place: int, buffer: Tensor) -> Transfer | None:
        if self._within.get(buffer.data_ptr()) == place:
            return None
        self._hold(place, buffer)
        return self._spill.read(place, buffer)

    def keep(self, place: int, buffer: Tensor) -> Transfer | None:
        self._hold(place, buffer)
        return self._spill.write(place, buffer)

    def forget(self) -> None:
        self._within.clear()

    def _hold(self, place: int, buffer: Tensor) -> None:
        """A buffer holds a chunk now, and no other one does: a pass over fewer chunks, some having no gradients, steps it
        in another buffer than the pass before, where its bytes are of before."""
        self._within = {address: held for address, held in self._within.items() if held != place}
        self._within[buffer.data_ptr()] = place
