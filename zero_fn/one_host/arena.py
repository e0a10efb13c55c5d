"""Shared memory of the ranks of one host: each rank has an *arena*,
in which it writes and its peers read.

An arena is an unnamed memory file (`memfd`). So it has no path, takes no room in /dev/shm, and is
freed when the processes end, however they end. It is half as large as the memory of the machine,
but only pages that were written take memory. Blocks are given out at the lowest free address, so
that these pages stay few.
"""

from __future__ import annotations

import ctypes
import mmap
import os

import torch

from zero_fn.storage.host_memory import too_small
from zero_fn.values.layout import ALIGNMENT_NBYTES

__all__ = ["WORD_NBYTES", "Arena", "Mapped", "map_arena"]

WORD_NBYTES = 8
_TOKEN_NBYTES = 16


class Mapped:
    """The memory of an arena, this rank's or a peer's, as this process sees it."""

    def __init__(self, fd: int, nbytes: int) -> None:
        self._file = mmap.mmap(fd, nbytes)
        self.memory = torch.frombuffer(self._file, dtype=torch.uint8)
        self.words = memoryview(self._file).cast("q")  # the same memory, for single values
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(self._file))

    def discard(self, start: int) -> None:
        """Gives the pages from byte `start` on back to the system.

        They read as zeros afterwards.
        """
        page = mmap.PAGESIZE
        start = -(-start // page) * page
        self._file.madvise(mmap.MADV_REMOVE, start, len(self._file) - start)


class Arena:
    """This rank's own arena."""

    def __init__(self, head_nbytes: int = 0) -> None:
        """Makes an arena.

        `head_nbytes` from byte `ALIGNMENT_NBYTES` on are not given out as blocks.
        """
        capacity = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2
        # The file is open until `close_file`; peers map it through /proc.
        self.fd = os.memfd_create("zero_fn", os.MFD_CLOEXEC)
        os.ftruncate(self.fd, capacity)
        self.mapped = Mapped(self.fd, capacity)
        # The first bytes: a peer knows by them that it mapped the right file.
        self.token = os.urandom(_TOKEN_NBYTES)
        self.mapped.memory[:_TOKEN_NBYTES] = torch.frombuffer(
            bytearray(self.token), dtype=torch.uint8
        )
        self._blocks = [(0, ALIGNMENT_NBYTES + head_nbytes)]  # (start, end), in order of address
        self._capacity = capacity

    def close_file(self) -> None:
        """Closes the file, once peers have mapped it: the memory lives as
        long as any process maps it."""
        os.close(self.fd)

    def allocate(self, nbytes: int) -> int:
        """The start of a free block of `nbytes` bytes. No two blocks start at one address.

        Raises:
            TierError: There is no room.
        """
        nbytes = max(nbytes, 1)
        start = 0
        for begin, end in self._blocks:
            if begin - start >= nbytes:
                break
            start = max(start, -(-end // ALIGNMENT_NBYTES) * ALIGNMENT_NBYTES)
        if start + nbytes > self._capacity:
            room_nbytes, what = max(self._capacity - start, 0), "Messages to ranks of this host"
            raise too_small(what, nbytes, room_nbytes, "half the memory of the machine")
        # No call lies between the choice of a block and this line, which notes it.
        self._blocks = sorted([*self._blocks, (start, start + nbytes)])
        return start

    def free(self, start: int) -> None:
        """Frees the block that starts at `start`."""
        self._blocks = [block for block in self._blocks if block[0] != start]

    def trim(self) -> None:
        """Gives the pages after the last block back to the system."""
        self.mapped.discard(self._blocks[-1][1])


def map_arena(pid: int, fd: int, token: bytes) -> Mapped | None:
    """The memory of a peer's arena; None if this process cannot map it (another host,
    container or system)."""
    try:
        file = os.open(f"/proc/{pid}/fd/{fd}", os.O_RDWR | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        mapped = Mapped(file, os.fstat(file).st_size)
    except (OSError, ValueError):
        return None
    finally:
        os.close(file)
    return mapped if bytes(mapped.memory[:_TOKEN_NBYTES].tolist()) == token else None
