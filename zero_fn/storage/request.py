"""One read or write of a range of a file, carried on until all of it is done.

The kernel may do less than it was asked: after a signal, at a limit, at the end of a file. The rest is asked for again, from
the last whole sector on, because direct I/O begins at sectors only.
"""

from __future__ import annotations

import errno
import os
from typing import Any

from torch import Tensor

from zero_fn.errors import StorageError
from zero_fn.storage.file import FULL, SpillFile
from zero_fn.values.tiers import bytes_text

__all__ = ["Request"]

_AGAIN = frozenset((errno.EAGAIN, errno.EINTR))
_SECTOR_NBYTES = 4096


class Request:
    """A transfer between a range of memory and a range of a file.

    The carrier holds the request until it is done, and the request holds the memory. Otherwise an exception (an interrupt,
    say) could drop whoever was to wait, and the memory would go to somebody else while a block of the file is still arriving
    there.

    Attributes:
        file: The file.
        begin: The first byte of the range in the file.
        memory: The range of memory, as bytes.
        offset, address, nbytes: What is left to do: its place in the file, its address in memory, its bytes.
        is_write: Whether memory is written to the file.
        is_done: Whether nothing is left to do, or the request failed.
        failure: The error, if it failed.
        answers: How many answers of the kernel were noted.
        ticket: What the carrier knows it by.
    """

    __slots__ = (
        "address",
        "answers",
        "begin",
        "failure",
        "file",
        "is_done",
        "is_write",
        "memory",
        "nbytes",
        "offset",
        "ticket",
    )

    def __init__(self, file: SpillFile, offset: int, memory: Tensor, *, is_write: bool) -> None:
        self.file, self.memory, self.is_write = file, memory, is_write
        self.begin = self.offset = offset
        self.address, self.nbytes = memory.data_ptr(), memory.numel()
        self.is_done = self.nbytes == 0
        self.failure: StorageError | None = None
        self.answers = 0
        self.ticket: Any = None  # for the carrier

    def advance(self, result: int) -> None:
        """Notes the answer of the kernel: bytes done, or minus an errno."""
        if -result in _AGAIN:
            return
        # What is left begins at a whole sector; only the end of the range may lie within one.
        done = result if result == self.nbytes else result // _SECTOR_NBYTES * _SECTOR_NBYTES
        failure = self._failed(-result) if result < 0 else self._ended(result) if not done else None
        done = max(done, 0)
        left = self.nbytes - done
        after = (
            failure,
            self.offset + done,
            self.address + done,
            left,
            self.answers + 1,
            failure is not None or not left,
        )
        # All or nothing: no interrupt comes between these.
        self.failure, self.offset, self.address, self.nbytes, self.answers, self.is_done = after

    def meets(self, other: Request) -> bool:
        """Whether both use the same memory, or the same part of a file that one of them writes."""
        end, their_end = self.begin + self.memory.numel(), other.begin + other.memory.numel()
        is_shared = self.file is other.file and self.begin < their_end and other.begin < end
        return (is_shared and (self.is_write or other.is_write)) or self.uses(other.memory)

    def uses(self, memory: Tensor) -> bool:
        """Whether it reads or writes this memory."""
        mine, theirs = self.memory.data_ptr(), memory.data_ptr()
        return mine < theirs + memory.numel() and theirs < mine + self.memory.numel()

    def _failed(self, number: int) -> StorageError:
        fix = "check the disk (dmesg, smartctl -a); start again from the last checkpoint, on another path"
        if number in FULL:
            fix = "free space on this file system, or choose another: zf.nvme('/other_disk')"
        return self._error("failed", f"{errno.errorcode.get(number, number)}: {os.strerror(number)}", fix)

    def _ended(self, done: int) -> StorageError:
        return self._error(
            "stopped short",
            f"after {self.memory.numel() - self.nbytes + done} B the kernel does no more; the file has "
            f"{os.fstat(self.file.fd).st_size} B",
            "something cut the file, or the disk is failing: start again from the last checkpoint",
        )

    def _error(self, how: str, why: str, fix: str) -> StorageError:
        return StorageError(
            f"{'Writing to' if self.is_write else 'Reading from'} {self.file.name} {how}.",
            file=self.file.name,
            range=f"{bytes_text(self.memory.numel())} at offset {self.begin}, stopped at {self.offset}",
            why=why,
            fix=fix,
        )
