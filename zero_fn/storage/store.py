"""Room for byte strings on a tier, and the memory in which they are used.

device    tensors of the device: nothing moves
host      ranges that are used where they lie
disk      ranges that pass through four buffers: one is in use,
          one or two are being filled, one or two written
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

import torch
from torch import Tensor

from zero_fn.storage.tier_storage import (
    BUFFERS,
    NOTHING,
    DiskStorage,
    InMemory,
    Stretch,
    staging_form,
    storage_on,
)
from zero_fn.values.tiers import Tier, bytes_text

__all__ = ["Store", "Stored"]


class Stored:
    """A byte string of a store."""

    nbytes: int
    place = -1  # in the store; negative before there is one
    is_stored = False  # whether it was ever written there


class Store:
    """Room for byte strings, and their way in and out.

    As text it says where they rest and how they get there.

    Reads and writes raise `StorageError` when they are waited for, if the disk fails or does not
    hold what was written to it.
    """

    def __init__(self, tier: Tier | None, what: str) -> None:
        """An empty store. A tier of None is the memory of the device itself."""
        self._storage = storage_on(tier, what) if tier is not None else None
        self._on_device: list[InMemory] = []
        self._count = 0  # of places on a disk
        self._free: dict[int, list[int]] = {}  # places that were given up, by their bytes
        self._held: dict[int, Stretch] = {}  # of those used last, by place, the latest at the end

    def __str__(self) -> str:
        taken = bytes_text(self.nbytes)
        if isinstance(self._storage, DiskStorage):
            return f"{taken} in {self._storage}, {self._storage.stagings}"
        return f"{taken} of memory of the {'device' if self._storage is None else 'host'}"

    @property
    def nbytes(self) -> int:
        """Bytes taken of the tier."""
        if self._storage is not None:
            return self._storage.nbytes
        return sum(len(each.memory) for each in self._on_device)

    @property
    def buffers_nbytes(self) -> int:
        """Bytes of the buffers in host memory that byte strings pass through."""
        return self._storage.buffers_nbytes if self._storage is not None else 0

    def reserve(self, members: Sequence[Stored], device: torch.device) -> None:
        """Gives each byte string a place, one that was given up or a new one.

        `device` is used if the tier is the device.
        """
        new = []
        for member in members:
            free = self._free.get(member.nbytes)
            if free:
                member.place = free.pop()
                self._let_go(member.place)  # the memory of what was there before
            else:
                new.append(member)
        sizes = [member.nbytes for member in new]
        if not new:
            return
        if self._storage is None:
            places = [len(self._on_device) + number for number in range(len(new))]
            rooms = [torch.zeros(nbytes, dtype=torch.uint8, device=device) for nbytes in sizes]
            self._on_device += map(InMemory, rooms)
        elif isinstance(self._storage, DiskStorage):
            count, size = staging_form(self._count + len(sizes), max(sizes))
            if count > self._storage.stagings.count or size > self._storage.stagings.size:
                self.forget()  # frees the old buffers first
                self._storage.stage(size, count)
            places = self._storage.reserve(sizes)
            # Noted last: those for which there is no room would count for all that come later.
            self._count += len(sizes)
        else:
            (begin,) = self._storage.reserve([sum(sizes)])
            places = list(accumulate(sizes[:-1], initial=begin))
        for member, place in zip(new, places, strict=True):
            member.place = place

    def free(self, member: Stored) -> None:
        """Gives up the place of a byte string on a tier.

        A finalizer may call it: it waits for nothing.
        """
        self._free.setdefault(member.nbytes, []).append(member.place)

    def fetch(self, member: Stored) -> InMemory:
        """Memory for a byte string, with the transfers of its bytes as they come, or were written.

        The memory of the one that came four before may be taken.
        """
        if self._storage is None:
            return self._on_device[member.place]
        if not member.nbytes:
            return InMemory(NOTHING)
        self._storage.require_own()
        stretch = self._held.pop(member.place, None)
        if stretch is None:
            if len(self._held) == BUFFERS:
                self._let_go(next(iter(self._held)))
            stretch = Stretch(self._storage, member.place, member.nbytes)
            try:
                if member.is_stored:
                    stretch.transfers = [self._storage.read(member.place, stretch.memory)]
            except BaseException:  # nobody else knows of the memory yet
                stretch.abandon()
                raise
        self._held[member.place] = stretch
        return stretch

    def get(self, member: Stored) -> Tensor:
        """The bytes of a byte string, in memory. Waits."""
        found = self.fetch(member)
        try:
            found.wait()
        except BaseException:
            self._let_go(member.place)
            raise
        return found.memory[: member.nbytes]

    def keep(self, member: Stored, found: InMemory) -> InMemory:
        """Begins to write a byte string from its memory, which may be read meanwhile."""
        if self._storage is not None and member.nbytes:
            found.transfers = [self._storage.write(member.place, found.memory)]
        member.is_stored = True
        return found

    def forget(self) -> None:
        """Gives up what is in buffers, which cannot be relied on after a failure."""
        while self._held:
            self._let_go(next(iter(self._held)))

    def _let_go(self, place: int) -> None:
        """Waits for what is under way in the memory of a place, and gives the memory to others."""
        stretch = self._held.pop(place, None)
        if stretch is not None:
            try:
                stretch.wait()
            finally:
                stretch.abandon()
