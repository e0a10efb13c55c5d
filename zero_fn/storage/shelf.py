"""Room on a tier for the tensors of one module, and the host memory they pass through.

    disk        ranges of one unnamed file; staging buffers, as large as the largest range that is read at once
    host        ranges of one slab, of which fetched ranges are views

One staging is enough on a CPU: a schedule fetches the next unit once the one before has left for its gathered buffer. Beside
an accelerator that one is still on its way then, and there are two. Whoever needs another, out of schedule, gets memory that
is freed again.
"""

from __future__ import annotations

import threading
from typing import Protocol

import torch
from torch import Tensor

from zero_fn.storage.buffers import Buffers
from zero_fn.storage.carrier import chosen_carrier
from zero_fn.storage.slab import Slab, whole_pages
from zero_fn.storage.spill import Spill, Transfer
from zero_fn.tiers import Cpu, Nvme, Tier, is_accelerator

__all__ = ["Shelf", "shelf_of", "stagings_for"]


def stagings_for(device_type: str) -> int:
    """How many stagings a disk has on the way to a device."""
    return 2 if is_accelerator(device_type) else 1


class Shelf(Protocol):
    """Room on a tier. Places are offsets in it, in bytes; ranges are whole pages."""

    tier: Tier

    @property
    def nbytes(self) -> int:
        """Bytes taken of the tier."""

    @property
    def buffers_nbytes(self) -> int:
        """Bytes of host memory taken for stagings."""

    def reserve(self, sizes: list[int]) -> list[int]:
        """Makes room for ranges of these sizes in bytes, and returns their places.

        Raises:
            TierError: The tier is too small. Nothing was taken.
        """

    def stage(self, nbytes: int, device: torch.device) -> None:
        """Makes stagings for ranges of so many bytes that are on their way to a device, unless there are such.

        Raises:
            TierError: There is not so much memory.
        """

    def borrow(self, place: int, nbytes: int) -> Tensor:
        """Memory for a range, uint8, until it is given back."""

    def give_back(self, memory: Tensor, left: torch.Event | None = None) -> None:
        """The memory that `borrow` gave is no longer needed once a copy from it to the device has ended, if there is one;
        nothing else is under way in it."""

    def read(self, place: int, memory: Tensor) -> Transfer | None:
        """Begins to fill memory with a range; None if it is there."""

    def write(self, place: int, memory: Tensor) -> Transfer | None:
        """Begins to put a range back; None if it is there."""


def shelf_of(tier: Tier, what: str) -> Shelf:
    """An empty shelf.

    Raises:
        StorageError: The path takes no files.
    """
    return _Host(tier, what) if isinstance(tier, Cpu) else _Disk(tier, what)


class _Host:
    """Ranges of the host's memory, for a model on an accelerator."""

    def __init__(self, tier: Cpu, what: str) -> None:
        self.tier: Tier = tier
        self._limit_nbytes, self._pinned, self._what = tier.limit_nbytes, tier.pinned, what
        self._slabs: list[tuple[int, Slab]] = []
        self.nbytes = 0

    @property
    def buffers_nbytes(self) -> int:
        return 0

    def reserve(self, sizes: list[int]) -> list[int]:
        places, offset = [], self.nbytes
        for nbytes in sizes:
            places.append(offset)
            offset += whole_pages(nbytes)
        if offset > self.nbytes:
            left = None if self._limit_nbytes is None else self._limit_nbytes - self.nbytes
            self._slabs.append((self.nbytes, Slab(offset - self.nbytes, Cpu(self._pinned, left), self._what)))
            self.nbytes = offset
        return places

    def borrow(self, place: int, nbytes: int) -> Tensor:
        start, slab = next((start, slab) for start, slab in reversed(self._slabs) if start <= place)
        return slab.memory[place - start : place - start + nbytes]

    def stage(self, nbytes: int, device: torch.device) -> None:
        pass

    def give_back(self, memory: Tensor, left: torch.Event | None = None) -> None:
        pass

    def read(self, place: int, memory: Tensor) -> Transfer | None:
        return None

    def write(self, place: int, memory: Tensor) -> Transfer | None:
        return None


class _Disk:
    """Ranges of one unnamed file."""

    def __init__(self, tier: Nvme, what: str) -> None:
        self.tier: Tier = tier
        self._what = what
        self._free: list[tuple[Tensor, torch.Event | None]] = []  # with the end of a copy from it
        self._spill = Spill(tier, what, chosen_carrier())
        self._stagings = Buffers()
        self._lock = threading.Lock()

    def __str__(self) -> str:
        return str(self._spill)

    @property
    def nbytes(self) -> int:
        return self._spill.file.nbytes

    @property
    def buffers_nbytes(self) -> int:
        return self._stagings.nbytes

    def reserve(self, sizes: list[int]) -> list[int]:
        pages = [whole_pages(nbytes) for nbytes in sizes]
        offset, places = self._spill.reserve(sum(pages)), []
        for nbytes in pages:
            places.append(offset)
            offset += nbytes
        return places

    def stage(self, nbytes: int, device: torch.device) -> None:
        count, size = stagings_for(device.type), whole_pages(nbytes)
        if count > self._stagings.count or size > self._stagings.size:
            self._await_left()
            self._stagings = Buffers(
                max(count, self._stagings.count), max(size, self._stagings.size), f"stagings of {self._what}"
            )
            self._free = [(view, None) for view in self._stagings.views]

    def borrow(self, place: int, nbytes: int) -> Tensor:
        with self._lock:
            if self._free and nbytes <= self._stagings.size:
                memory, left = self._free.pop(0)  # the one that was given back first
                if left is not None:
                    left.synchronize()
                return memory[:nbytes]
        return Slab(nbytes, Cpu(False, None), f"a staging of {self._what}", forked=False).memory

    def give_back(self, memory: Tensor, left: torch.Event | None = None) -> None:
        with self._lock:
            number = self._stagings.number_of(memory)
            if number is not None:
                self._free.append((self._stagings.views[number], left))
            elif left is not None:  # memory out of schedule, or of stagings that were too small
                left.synchronize()

    def __del__(self) -> None:
        self._await_left()

    def _await_left(self) -> None:
        for _, left in self._free:
            if left is not None:
                left.synchronize()

    def read(self, place: int, memory: Tensor) -> Transfer | None:
        return self._spill.read(place, memory)

    def write(self, place: int, memory: Tensor) -> Transfer | None:
        return self._spill.write(place, memory)
