"""Room on a tier, and the host memory through which its bytes pass.

    disk        ranges of one unnamed file on each path; staging buffers, as large as the largest range that is read at once
    host        ranges of one slab, which are used where they lie

One staging buffer is enough on a CPU: a schedule fetches the next unit after the last one was copied to its gathered buffer.
With an accelerator that copy is still under way then, so there are two. A fetch out of schedule gets memory of its own, which
is freed after it.
"""

from __future__ import annotations

import weakref
from itertools import accumulate

import torch
from torch import Tensor

from zero_fn.storage.carrier import Carrier, chosen_carrier
from zero_fn.storage.file import SpillFile
from zero_fn.storage.forked import Owned
from zero_fn.storage.memory import too_small
from zero_fn.storage.request import Request
from zero_fn.storage.ring import Ring
from zero_fn.storage.slab import Slab, whole_pages
from zero_fn.storage.stripes import extents_of, share_of
from zero_fn.storage.transfer import Block, Transfer
from zero_fn.values.tiers import Cpu, Nvme, Tier, is_accelerator

__all__ = ["BLOCK_NBYTES", "Disk", "Shelf", "shelf_of", "stagings_for"]

BLOCK_NBYTES = 8 << 20
"""The most that one request reads or writes."""


def stagings_for(device_type: str) -> int:
    """How many staging buffers a disk has on the way to a device."""
    return 2 if is_accelerator(device_type) else 1


def shelf_of(tier: Tier, what: str) -> Shelf:
    """An empty shelf.

    Raises:
        StorageError: The path takes no files.
    """
    return Shelf(tier, what) if isinstance(tier, Cpu) else Disk(tier, what)


class Shelf:
    """Ranges of whole pages on a tier. In this class the tier is memory of the host, which is used where it lies.

    The place of a range is its first byte.

    Attributes:
        tier: The tier.
        nbytes: Bytes taken of the tier.
        may_fail: Whether reading may fail on one rank alone: it is a disk, or a step that waits is taken before.
    """

    def __init__(self, tier: Tier, what: str) -> None:
        """An empty shelf. `what` says in errors what it holds."""
        self.tier, self._what, self.nbytes = tier, what, 0
        self.may_fail = not isinstance(tier, Cpu)
        self._slabs: list[tuple[int, Slab]] = []  # with their first byte

    @property
    def buffers_nbytes(self) -> int:
        """Bytes of host memory taken for staging buffers."""
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
        """Makes sure that there are `count` staging buffers of `nbytes` bytes.

        Raises:
            TierError: There is less memory.
        """

    def require_own(self) -> None:
        """See `Owned`. Memory of the host may be used in forked processes, too."""

    def borrow(self, place: int, nbytes: int) -> Tensor:
        """Memory for a range, as bytes, until `give_back`: the range itself, or a staging buffer of whole pages."""
        start, slab = next((start, slab) for start, slab in reversed(self._slabs) if start <= place)
        return slab.memory[place - start : place - start + nbytes]

    def give_back(self, memory: Tensor, left: torch.Event | None = None) -> None:
        """Gives back memory from `borrow`. It is used again after a copy of it to the device has ended (`left`), and after
        transfers that nobody waits for."""

    def read(self, place: int, memory: Tensor) -> Transfer | None:
        """Begins to read a range that was written as one; None if the memory is the range itself."""
        return None

    def write(self, place: int, memory: Tensor) -> Transfer | None:
        """Begins to write a range, from memory that must stay as it is until the transfer was waited for; None if the memory
        is the range itself."""
        return None

    def _grow(self, nbytes: int) -> None:
        """Takes room, so that the shelf has so many bytes in all."""
        assert isinstance(self.tier, Cpu)
        limit = self.tier.limit_nbytes
        left = Cpu(self.tier.pinned, None if limit is None else limit - self.nbytes)
        self._slabs.append((self.nbytes, Slab(nbytes - self.nbytes, left, self._what)))


class Disk(Owned, Shelf):
    """Ranges of unnamed files, one file on each path of the tier. As text it says where it is and how it is read and written.

    Attributes:
        files: The files, in the order of the paths.
        stagings: The staging buffers that `borrow` lends.
    """

    def __init__(self, tier: Nvme, what: str, carrier: Carrier | None = None) -> None:
        """Makes the files, empty.

        Args:
            tier: The tier, with its limit.
            what: What it holds, for errors.
            carrier: What carries its requests; None is the carrier of the process.

        Raises:
            StorageError: No file can be made on a path.
        """
        Shelf.__init__(self, tier, what)
        Owned.__init__(self)
        self.tier: Nvme = tier
        self.files = [SpillFile(path, what) for path in tier.paths]
        self._carrier = carrier or chosen_carrier()
        self._blocks: dict[int, Block] = {}
        self.stagings = Ring()
        # Staging buffers to lend, with the copy to the device that must end first.
        self._free: list[tuple[Tensor, torch.Event | None]] = []
        self._lent: dict[int, Tensor] = {}  # those that are lent, by address
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
            self._free, self._lent, self.stagings = [], {}, Ring()  # frees the old buffers first
            self.stagings = Ring(count, size, f"buffers of {self._what}")
            self._free = [(view, None) for view in self.stagings.views]

    def borrow(self, place: int, nbytes: int) -> Tensor:
        self.require_own()
        if not self._free or nbytes > self.stagings.size:
            return Slab(nbytes, Cpu(False, None), f"a buffer of {self._what}", forked=False).memory
        memory, left = self._free.pop(0)  # the one that was given back longest ago
        self._lent[memory.data_ptr()] = memory
        if left is not None:
            left.synchronize()
        self._carrier.settle(memory)
        return memory[: whole_pages(nbytes)]

    def give_back(self, memory: Tensor, left: torch.Event | None = None) -> None:
        whole = self._lent.pop(memory.data_ptr(), None)
        if whole is not None:
            self._free.append((whole, left))
        elif left is not None:  # memory of its own, or of staging buffers that were replaced
            left.synchronize()

    def read(self, place: int, memory: Tensor) -> Transfer:
        return self._transfer(place, memory, is_write=False)

    def write(self, place: int, memory: Tensor) -> Transfer:
        return self._transfer(place, memory, is_write=True)

    def __del__(self) -> None:
        if hasattr(self, "_free"):
            self._await_left()

    def _await_left(self) -> None:
        """Waits for copies to the device, which do not keep the memory alive. Transfers do, and a finalizer cannot wait for
        them."""
        for _, left in self._free:
            if left is not None:
                left.synchronize()

    def _transfer(self, place: int, memory: Tensor, *, is_write: bool) -> Transfer:
        """Begins to read or write a range."""
        self.require_own()
        requests, blocks = [], []
        for start, nbytes, disk, offset in extents_of(place, memory.numel(), len(self.files), BLOCK_NBYTES):
            requests.append(Request(self.files[disk], offset, memory[start : start + nbytes], is_write=is_write))
            blocks.append(self._blocks.setdefault(place + start, Block(nbytes)))
            assert is_write or blocks[-1].nbytes == nbytes, "not written as one"
        return Transfer(self._carrier, requests, blocks)

    def _grow(self, nbytes: int) -> None:
        if self.tier.limit_nbytes is not None:
            others = sum(o.nbytes for o in list(_disks) if o is not self and o.tier == self.tier)
            left = self.tier.limit_nbytes - others
            if nbytes > left:
                what = f"{self._what} in {', '.join(self.tier.paths)}"
                raise too_small(what, nbytes, left, "the limit of the tier", of="disk")
        before = [file.nbytes for file in self.files]
        try:
            for number, file in enumerate(self.files):
                file.reserve(share_of(number, nbytes, len(self.files)))
        except BaseException:
            for file, reserved in zip(self.files, before, strict=True):
                file.shrink(reserved)
            raise


_disks: weakref.WeakSet[Disk] = weakref.WeakSet()  # those of equal tiers share their limit
