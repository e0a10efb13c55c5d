"""One read or write of a range of a file, carried on until all of it is done.

The kernel may do less than it was asked: a signal, a limit, the end of a file. What is left is asked for again, from
the last whole sector, because direct I/O takes no other.
"""

from __future__ import annotations

import errno
import os

from torch import Tensor

from zero_fn.errors import StorageError
from zero_fn.storage.file import FULL, SpillFile
from zero_fn.values.tiers import bytes_text

__all__ = ["Request"]

_AGAIN = frozenset((errno.EAGAIN, errno.EINTR))
_SECTOR_NBYTES = 4096


class Request:
    """A transfer between a range of memory and a range of a file.

    It holds the memory, as its carrier holds it until it is done: an exception that drops what would have waited for it
    (an interrupt, say) must not give the memory to somebody else, who would find a block of a file in it.

    Attributes:
        file: The file.
        begin: The offset at which it began.
        memory: All of the memory, bytes.
        offset, address, nbytes: What is left to do: where in the file, where in memory, how much.
        is_write: The direction.
        is_done: Whether nothing is left, or it failed.
        failure: What went wrong, if anything did.
    """

    __slots__ = ("address", "begin", "failure", "file", "is_done", "is_write", "memory", "nbytes", "offset", "ticket")

    def __init__(self, file: SpillFile, offset: int, memory: Tensor, *, is_write: bool) -> None:
        self.file, self.memory, self.is_write = file, memory, is_write
        self.begin = self.offset = offset
        self.address, self.nbytes = memory.data_ptr(), memory.numel()
        self.is_done = self.nbytes == 0
        self.failure: StorageError | None = None
        self.ticket: object = None  # of the carrier that carries it

    def advance(self, result: int) -> None:
        """Takes note of what the kernel answered: bytes done, or minus an errno."""
        if -result in _AGAIN:
            return
        # The end of the last piece may lie within a sector; other pieces are continued at one.
        done = result if result == self.nbytes else result // _SECTOR_NBYTES * _SECTOR_NBYTES
        if result < 0:
            self.failure = self._failed(-result)
        elif not done:
            self.failure = self._ended(result)
        else:
            self.offset, self.address, self.nbytes = self.offset + done, self.address + done, self.nbytes - done
        self.is_done = self.failure is not None or not self.nbytes

    def _failed(self, number: int) -> StorageError:
        fix = "check the disk (dmesg, smartctl -a); start again from the last checkpoint, on another path"
        if number in FULL:
            fix = "free space on this file system, or choose another: zf.nvme('/other_disk')"
        verb = "Writing to" if self.is_write else "Reading from"
        why = f"{errno.errorcode.get(number, number)}: {os.strerror(number)}"
        return self._error(f"{verb} {self.file.name} failed.", why, fix)

    def _ended(self, done: int) -> StorageError:
        verb = "Writing to" if self.is_write else "Reading from"
        return self._error(
            f"{verb} {self.file.name} stopped short.",
            f"after {self.memory.numel() - self.nbytes + done} B the kernel does no more; the file has "
            f"{os.fstat(self.file.fd).st_size} B",
            "something cut the file, or the disk is failing: start again from the last checkpoint",
        )

    def _error(self, summary: str, why: str, fix: str) -> StorageError:
        return StorageError(
            summary,
            file=self.file.name,
            range=f"{bytes_text(self.memory.numel())} at offset {self.begin}, stopped at {self.offset}",
            why=why,
            fix=fix,
        )
