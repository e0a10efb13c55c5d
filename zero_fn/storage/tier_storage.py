"""Room on a tier, and the host memory through which its bytes pass.

    TierStorage     ranges of slabs, which are used where they lie
    DiskStorage     ranges of unnamed files, one on each path; staging buffers,
                    as large as the largest range read at once
    Stretch         a range in memory, and the transfers under way between the two

One staging buffer is enough on a CPU: a schedule fetches the next unit after the last one was
copied to its gathered buffer. With an accelerator that copy is still under way then, so there are
two. A fetch out of schedule gets memory of its own, which is freed after it.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Sequence
from contextlib import suppress
from itertools import accumulate

import torch
from torch import Tensor

from zero_fn.errors import StorageError
from zero_fn.storage.files import SpillFile, extents_of, share_of
from zero_fn.storage.host_memory import Slab, too_small, whole_pages
from zero_fn.storage.io import Block, IoBackend, ProcessLocal, Request, Transfer, Waited, wait_all
from zero_fn.storage.uring import io_backend
from zero_fn.values import watching
from zero_fn.values.tiers import Cpu, Nvme, Tier, bytes_text, is_accelerator

__all__ = [
    "BLOCK_NBYTES",
    "BUFFERS",
    "NOTHING",
    "DiskStorage",
    "InMemory",
    "StagingBuffers",
    "Stretch",
    "TierStorage",
    "staging_for",
    "staging_form",
    "stagings_for",
    "storage_on",
]

BLOCK_NBYTES = 8 << 20
"""The most that one request reads or writes."""

BUFFERS = 4
NOTHING = torch.empty(0, dtype=torch.uint8)


class TierStorage:
    """Ranges of whole pages on a tier: here in memory of the host, where they are used in place.

    The place of a range is its first byte.
    """

    # Whether a range is used where it lies, without transfers.
    is_addressable = True
    # Whether reading may fail on one rank alone: it is a disk,
    # or a step that waits is taken before.
    may_fail = False

    def __init__(self, tier: Tier, what: str) -> None:
        """Empty storage. `what` says in errors what it holds."""
        self.tier = tier
        self.nbytes = 0  # taken of the tier
        self._what = what
        self.stagings = StagingBuffers()
        self._slabs: list[tuple[int, Slab]] = []  # with their first byte

    @property
    def buffers_nbytes(self) -> int:
        """Bytes of host memory taken for staging buffers."""
        return self.stagings.nbytes

    def reserve(self, sizes: list[int]) -> list[int]:
        """Makes room for ranges of these sizes in bytes, and returns their places."""
        *places, end = accumulate(map(whole_pages, sizes), initial=self.nbytes)
        if end > self.nbytes:
            self._grow(end)
            self.nbytes = end
        return places

    def _grow(self, end: int) -> None:
        """Makes room for all bytes before `end`."""
        assert isinstance(self.tier, Cpu)
        limit = self.tier.limit_nbytes
        left = Cpu(self.tier.pinned, None if limit is None else limit - self.nbytes)
        self._slabs.append((self.nbytes, Slab(end - self.nbytes, left, self._what)))

    def stage(self, nbytes: int, count: int) -> None:
        """Makes sure that there are `count` staging buffers of `nbytes` bytes."""

    def require_own(self) -> None:
        """See `ProcessLocal`. Memory of the host may be used in forked processes, too."""

    def borrow(self, place: int, nbytes: int) -> Tensor:
        """Memory for a range, as bytes, until `give_back`.

        It is the range itself, or a staging buffer of whole pages.
        """
        start, slab = next((start, slab) for start, slab in reversed(self._slabs) if start <= place)
        return slab.memory[place - start : place - start + nbytes]

    def give_back(self, memory: Tensor, left: torch.Event | None = None) -> None:
        """Gives back memory from `borrow`.

        It is used again after a copy of it to the device has ended (`left`), and after transfers
        that nobody waits for.
        """

    def read(self, place: int, memory: Tensor) -> Transfer | None:
        """Begins to read a range that was written as one; None if
        the memory is the range itself."""

    def write(self, place: int, memory: Tensor) -> Transfer | None:
        """Begins to write a range; None if the memory is the range itself.

        The memory must stay as it is until the transfer was waited for.
        """


class InMemory:
    """Memory, and the transfers under way there."""

    __slots__ = ("memory", "transfers")

    def __init__(self, memory: Tensor) -> None:
        self.memory = memory
        self.transfers: list[Waited | None] = []

    def wait(self) -> None:
        """Waits for all transfers, and raises the first failure."""
        wait_all(self.transfers)
        self.transfers = []


class Stretch(InMemory):
    """A range of a tier in memory: the range itself, a staging buffer, or memory that was given."""

    __slots__ = ("_storage", "place")

    def __init__(
        self, storage: TierStorage, place: int, nbytes: int, memory: Tensor | None = None
    ) -> None:
        """Takes memory for a range. Nothing is read."""
        if memory is None:
            memory = storage.borrow(place, nbytes) if nbytes else NOTHING
        super().__init__(memory)
        self.place = place
        self._storage = storage

    def part(self, place: int, nbytes: int) -> Tensor:
        """The memory of a range that lies within."""
        return self.memory[place - self.place : place - self.place + nbytes]

    def close(self, left: torch.Event | None = None) -> None:
        """Waits for transfers, and gives the memory back. `left`: see `TierStorage.give_back`."""
        with suppress(StorageError):
            self.wait()
        self.abandon(left)

    def abandon(self, left: torch.Event | None = None) -> None:
        """Gives the memory back without waiting for transfers, as a finalizer must.

        Whoever borrows it next waits for them.
        """
        memory, self.memory = self.memory, NOTHING
        self._storage.give_back(memory, left)


def storage_on(tier: Tier, what: str) -> TierStorage:
    """Empty storage. `what` says in errors what it holds."""
    return TierStorage(tier, what) if isinstance(tier, Cpu) else DiskStorage(tier, what)


class DiskStorage(ProcessLocal, TierStorage):
    """Unnamed files, one on each path.

    As text it says where it is and how it is read and written.
    """

    is_addressable = False
    may_fail = True
    _block_type = Block

    def __init__(self, tier: Nvme, what: str, backend: IoBackend | None = None) -> None:
        """Makes the files, empty. A `backend` of None is that of the process."""
        ProcessLocal.__init__(self)
        TierStorage.__init__(self, tier, what)
        self.files = [SpillFile(path, what) for path in tier.paths]
        self._backend = backend or io_backend()
        self._blocks: dict[int, Block] = {}
        # Staging buffers to lend, with the copy to the device that must end first.
        self._free: list[tuple[Tensor, torch.Event | None]] = []
        self._lent: dict[int, Tensor] = {}  # those that are lent, by address
        if self.files:
            _disks.add(self)

    def __str__(self) -> str:
        how = "direct" if all(file.is_direct for file in self.files) else "through the page cache"
        return f"{self.tier}, {how} by {self._backend}"

    def _grow(self, end: int) -> None:
        self._require_below_limit(end)
        before = [file.nbytes for file in self.files]
        try:
            for number, file in enumerate(self.files):
                file.reserve(share_of(number, end, len(self.files)))
        except BaseException:
            for file, reserved in zip(self.files, before, strict=True):
                file.shrink(reserved)
            raise

    def _require_below_limit(self, nbytes: int) -> None:
        if self.tier.limit_nbytes is not None:
            left = self.tier.limit_nbytes - sum(
                o.nbytes for o in list(_disks) if o is not self and o.tier == self.tier
            )
            if nbytes > left:
                where = ", ".join(getattr(self.tier, "paths", ()))
                raise too_small(
                    f"{self._what} in {where}", nbytes, left, "the limit of the tier", of="disk"
                )

    def stage(self, nbytes: int, count: int) -> None:
        count, size = max(count, self.stagings.count), max(whole_pages(nbytes), self.stagings.size)
        if (count, size) != (self.stagings.count, self.stagings.size):
            self._await_left()
            before = self.stagings.count, self.stagings.size
            try:
                self._take_buffers(count, size)
            except BaseException:
                self._take_buffers(*before)  # what fitted those still passes through them
                raise

    def _take_buffers(self, count: int, size: int) -> None:
        # The old buffers are freed first.
        self._free = []
        self._lent = {}
        self.stagings = StagingBuffers()
        self.stagings = StagingBuffers(count, size, f"buffers of {self._what}")
        self._free = [(view, None) for view in self.stagings.views]

    def borrow(self, place: int, nbytes: int) -> Tensor:
        self.require_own()
        if not self._free or nbytes > self.stagings.size:
            return Slab(nbytes, Cpu(False, None), f"a buffer of {self._what}", forked=False).memory
        memory, left = self._free.pop(0)  # the one that was given back longest ago
        try:
            if left is not None:
                left.synchronize()
            self._backend.settle(memory)
        except BaseException:  # an interrupt: nobody was lent it
            self._free.insert(0, (memory, left))
            raise
        self._lent[memory.data_ptr()] = memory
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
        """Waits for copies to the device, which do not keep the memory alive.

        Transfers do, and a finalizer cannot wait for them.
        """
        for _, left in self._free:
            if left is not None:
                left.synchronize()

    def _transfer(self, place: int, memory: Tensor, *, is_write: bool) -> Transfer:
        self.require_own()
        requests, blocks = [], []
        for start, request in self._requests(place, memory, is_write=is_write):
            nbytes = request.memory.numel()
            requests.append(request)
            blocks.append(self._blocks.setdefault(place + start, self._block_type(nbytes)))
            assert is_write or blocks[-1].nbytes == nbytes, "not written as one"
        for watch in watching.watchers:
            watch.moving("nvme", memory.numel(), is_read=not is_write)
        return Transfer(self._backend, requests, blocks)

    def _requests(
        self, place: int, memory: Tensor, *, is_write: bool
    ) -> Iterator[tuple[int, Request]]:
        """What is asked of the disks for a range, and where each begins in it."""
        for start, nbytes, disk, offset in extents_of(
            place, memory.numel(), len(self.files), BLOCK_NBYTES
        ):
            yield (
                start,
                Request(
                    self.files[disk], offset, memory[start : start + nbytes], is_write=is_write
                ),
            )


_disks: weakref.WeakSet[DiskStorage] = weakref.WeakSet()  # those of equal tiers share their limit


def stagings_for(device_type: str) -> int:
    """How many staging buffers a disk has on the way to a device."""
    return 2 if is_accelerator(device_type) else 1


def staging_form(count: int, largest_nbytes: int) -> tuple[int, int]:
    """The number and the bytes of the buffers for so many byte strings,
    the largest of so many bytes."""
    return min(count, BUFFERS), whole_pages(largest_nbytes)


def staging_for(sizes: Sequence[int], what: str) -> StagingBuffers:
    """One buffer for each byte string of these sizes, but at most four;
    each as large as the largest."""
    return StagingBuffers(*staging_form(len(sizes), max(sizes, default=0)), f"buffers of {what}")


class StagingBuffers(ProcessLocal):
    """Some buffers of one size in host memory, equal ranges of one slab."""

    def __init__(self, count: int = 0, nbytes: int = 0, what: str = "") -> None:
        """Takes memory for `count` buffers of `nbytes`. `what` says in errors what they are for."""
        super().__init__()
        self.count = count
        self.size = whole_pages(nbytes)
        self.nbytes = 0
        self._views: tuple[Tensor, ...] = ()
        if self.count and self.size:
            slab = Slab(self.size * self.count, Cpu(True, None), what, forked=False)
            self.nbytes = slab.nbytes
            self._views = torch.split(slab.memory, self.size)

    @property
    def views(self) -> tuple[Tensor, ...]:
        """The buffers, uint8."""
        self.require_own()
        return self._views

    def buffer(self, turn: int, nbytes: int) -> Tensor:
        """The buffer of a turn, cut to so many bytes, in whole pages."""
        return self.views[turn % self.count][: whole_pages(nbytes)]

    def __str__(self) -> str:
        return f"{self.count} buffer{'s' * (self.count > 1)} of {bytes_text(self.size)}"
