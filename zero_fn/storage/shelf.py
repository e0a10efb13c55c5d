"""Room on a tier, and the host memory that its bytes pass through.

    disk        ranges of one unnamed file; staging buffers, as large as the largest range that is read at once
    host        ranges of one slab, of which fetched ranges are views

One staging buffer is enough on a CPU: a schedule fetches the next unit once the previous one has been copied to its
gathered buffer. With an accelerator that copy is still under way then, so there are two. A fetch out of schedule gets
memory of its own, which is freed after it.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from contextlib import suppress
from itertools import accumulate

import torch
from torch import Tensor

from zero_fn.errors import StorageError
from zero_fn.storage.carrier import Carrier, chosen_carrier
from zero_fn.storage.file import SpillFile, too_small
from zero_fn.storage.forked import Owned
from zero_fn.storage.request import Request
from zero_fn.storage.ring import Ring
from zero_fn.storage.slab import Slab, whole_pages
from zero_fn.storage.stripes import extents_of, share_of
from zero_fn.storage.transfer import Block, Transfer, wait_all
from zero_fn.values.tiers import Cpu, Nvme, Tier, is_accelerator

__all__ = ["BLOCK_NBYTES", "Disk", "Shelf", "shelf_of", "stagings_for"]

BLOCK_NBYTES = 8 << 20
"""The most that one request reads or writes."""


def stagings_for(device_type: str) -> int:
    """How many stagings a disk has on the way to a device."""
    return 2 if is_accelerator(device_type) else 1


def shelf_of(tier: Tier, what: str) -> Shelf:
    """An empty shelf.

    Raises:
        StorageError: The path takes no files.
    """
    return Shelf(tier, what) if isinstance(tier, Cpu) else Disk(tier, what)


class Shelf:
    """Ranges of whole pages on a tier, which here is memory of the host: it is read and written where it lies.

    The place of a range is its first byte.

    Attributes:
        tier: The tier.
        nbytes: Bytes taken of it.
        may_fail: Whether reading may fail on one rank alone: it is a disk, or a step that waits is taken before.
    """

    def __init__(self, tier: Tier, what: str) -> None:
        """An empty one, for what is named so in errors."""
        self.tier, self._what, self.nbytes = tier, what, 0
        self.may_fail = not isinstance(tier, Cpu)
        self._slabs: list[tuple[int, Slab]] = []  # with their first byte

    @property
    def buffers_nbytes(self) -> int:
        """Bytes of host memory taken for stagings."""
        return 0

    def reserve(self, sizes: list[int]) -> list[int]:
        """Makes room for ranges of these sizes in bytes, and returns their places.

        Raises:
            TierError: The tier is too small. Nothing was taken.
        """
        *places, end = accumulate(map(whole_pages, sizes), initial=self.nbytes)
        if end > self.nbytes:
            self._grow(end)
            self.nbytes = end
        return places

    def stage(self, nbytes: int, count: int) -> None:
        """Makes so many stagings for ranges of so many bytes, unless there are such.

        Raises:
            TierError: There is not so much memory.
        """

    def require_own(self) -> None:
        """Memory of the host is there in forked processes, too. See `Owned`."""

    def borrow(self, place: int, nbytes: int) -> Tensor:
        """Memory for a range, uint8, until it is given back: on the way to a disk whole pages."""
        start, slab = next((start, slab) for start, slab in reversed(self._slabs) if start <= place)
        return slab.memory[place - start : place - start + nbytes]

    def give_back(self, memory: Tensor, left: torch.Event | None = None, under_way: Sequence[Transfer] = ()) -> None:
        """The memory that `borrow` gave is no longer needed, once it has left for the device, if it is on its way there, and
        transfers have ended that nobody waits for."""

    def read(self, place: int, memory: Tensor) -> Transfer | None:
        """Begins to fill memory with a range that was written as one; None if it is there."""
        return None

    def write(self, place: int, memory: Tensor) -> Transfer | None:
        """Begins to put a range back, from memory that is left alone until the transfer was waited for; None if it is
        there."""
        return None

    def _grow(self, nbytes: int) -> None:
        """Takes room for so many bytes in all."""
        assert isinstance(self.tier, Cpu)
        limit = self.tier.limit_nbytes
        left = Cpu(self.tier.pinned, None if limit is None else limit - self.nbytes)
        self._slabs.append((self.nbytes, Slab(nbytes - self.nbytes, left, self._what)))


class Disk(Owned, Shelf):
    """Ranges of unnamed files, one on each path of the tier. Printed, it says where it is and how it is read and written.

    Attributes:
        files: The files of the shelf, by path.
        stagings: The memory that `borrow` gives.
    """

    def __init__(self, tier: Nvme, what: str, carrier: Carrier | None = None) -> None:
        """Makes an empty file.

        Args:
            tier: The tier, with its limit.
            what: What it holds, for errors.
            carrier: What carries its reads and writes; None is that of the process.

        Raises:
            StorageError: No file can be made there.
        """
        Shelf.__init__(self, tier, what)
        Owned.__init__(self)
        self.tier: Nvme = tier
        self.files = [SpillFile(path, what) for path in tier.paths]
        self._carrier = carrier or chosen_carrier()
        self._blocks: dict[int, Block] = {}
        self.stagings = Ring()
        self._free: list[tuple[Tensor, torch.Event | None, Sequence[Transfer]]] = []  # with what is under way in them
        self._lent: dict[int, Tensor] = {}  # the others, by their first byte
        _disks.add(self)

    def __str__(self) -> str:
        how = "direct" if all(file.is_direct for file in self.files) else "through the page cache"
        return f"{self.tier}, {how} by {self._carrier}"

    @property
    def buffers_nbytes(self) -> int:
        return self.stagings.nbytes

    def stage(self, nbytes: int, count: int) -> None:
        count, size = max(count, self.stagings.count), max(whole_pages(nbytes), self.stagings.size)
        if (count, size) != (self.stagings.count, self.stagings.size):
            self._await_left()
            self._free, self._lent, self.stagings = [], {}, Ring()  # what was there goes first
            self.stagings = Ring(count, size, f"buffers of {self._what}")
            self._free = [(view, None, ()) for view in self.stagings.views]

    def borrow(self, place: int, nbytes: int) -> Tensor:
        self.require_own()
        if not self._free or nbytes > self.stagings.size:
            return Slab(nbytes, Cpu(False, None), f"a buffer of {self._what}", forked=False).memory
        memory, left, under_way = self._free.pop(0)  # the one that was given back first
        self._lent[memory.data_ptr()] = memory
        if left is not None:
            left.synchronize()
        with suppress(StorageError):  # whoever began these did not wait for them
            wait_all(under_way)
        return memory[: whole_pages(nbytes)]

    def give_back(self, memory: Tensor, left: torch.Event | None = None, under_way: Sequence[Transfer] = ()) -> None:
        whole = self._lent.pop(memory.data_ptr(), None)
        if whole is not None:
            self._free.append((whole, left, under_way))
        elif left is not None:  # memory out of schedule, or of stagings that were too small
            left.synchronize()

    def read(self, place: int, memory: Tensor) -> Transfer:
        requests, blocks = self._cut(place, memory, is_write=False)
        assert all(b.nbytes == r.nbytes for b, r in zip(blocks, requests, strict=True)), "not written as one"
        return Transfer(self._carrier, requests, blocks)

    def write(self, place: int, memory: Tensor) -> Transfer:
        requests, blocks = self._cut(place, memory, is_write=True)
        transfer = Transfer(self._carrier, requests)
        for request, block in zip(requests, blocks, strict=True):
            block.note(request)
        return transfer

    def __del__(self) -> None:
        if hasattr(self, "_free"):
            self._await_left()

    def _await_left(self) -> None:
        """Copies to the device do not hold the memory. Transfers do, and a finalizer cannot wait for them."""
        for _, left, _ in self._free:
            if left is not None:
                left.synchronize()

    def _cut(self, place: int, memory: Tensor, *, is_write: bool) -> tuple[list[Request], list[Block]]:
        """The requests that a range takes, and the block of each."""
        self.require_own()
        requests, blocks = [], []
        for start, nbytes, disk, offset in extents_of(place, memory.numel(), len(self.files), BLOCK_NBYTES):
            requests.append(Request(self.files[disk], offset, memory[start : start + nbytes], is_write=is_write))
            blocks.append(self._blocks.setdefault(place + start, Block(nbytes)))
        return requests, blocks

    def _grow(self, nbytes: int) -> None:
        if self.tier.limit_nbytes is not None:
            others = sum(o.nbytes for o in list(_disks) if o is not self and o.tier == self.tier)
            left = self.tier.limit_nbytes - others
            if nbytes > left:
                raise too_small(f"{self._what} in {', '.join(self.tier.paths)}", nbytes, left, "the limit of the tier")
        before = [file.nbytes for file in self.files]
        try:
            for number, file in enumerate(self.files):
                file.reserve(share_of(number, nbytes, len(self.files)))
        except BaseException:
            for file, reserved in zip(self.files, before, strict=True):
                file.shrink(reserved)
            raise


_disks: weakref.WeakSet[Disk] = weakref.WeakSet()  # those of equal tiers share their limit
