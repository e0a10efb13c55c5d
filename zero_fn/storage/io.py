"""Reads and writes of a disk: requests, what does them,
and transfers in blocks that each have a checksum and a generation.

Checksums are kept in memory, as the file ends with the process. A read that finds other bytes
than the last write left raises, and says whether they are the bytes of the write before: then the
disk has lost a write. The digest of a write is taken while the disk reads the same memory, at 12
to 37 GB/s on one core. It detects flipped bits, and sectors or words that are lost, stale or in
the wrong place.
"""

from __future__ import annotations

import ctypes
import errno
import os
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Protocol

import xxhash
from torch import Tensor

from zero_fn.errors import StorageError
from zero_fn.storage.files import FULL
from zero_fn.values import watching
from zero_fn.values.tiers import bytes_text
from zero_fn.values.watching import Moment

__all__ = [
    "Block",
    "IoBackend",
    "ProcessLocal",
    "Request",
    "Threads",
    "Transfer",
    "Waited",
    "wait_all",
]

_AGAIN = frozenset((errno.EAGAIN, errno.EINTR))
_SECTOR_NBYTES = 4096
_THREADS = 4


class ProcessLocal:
    """What may be used only by the process that made it.

    A child shares the ring of io_uring with its parent, and has none of the parent's
    threads. Buffers are not copied into children (`MADV_DONTFORK`), so a child that read one
    would be killed.
    """

    def __init__(self) -> None:
        self._pid = os.getpid()

    def require_own(self) -> None:
        """Called before each read, write or wait."""
        if os.getpid() != self._pid:
            raise StorageError(
                "A forked process used what its parent has on a disk.",
                why="reads, writes and the memory they pass through belong to "
                "the process that began them",
                fix="read values before the fork (a state_dict of clones), "
                "or start processes with the method 'spawn'",
            )


class OpenFile(Protocol):
    """A file that is read and written."""

    name: str
    fd: int


class Request:
    """A read or write between a range of memory and a range of a file.

    The kernel may do less than it was asked: after a signal, at a limit, at the end of a
    file. The rest is asked for again, from the last whole sector on, because direct I/O
    begins at sectors only.

    The backend holds the request until it is done, and the request holds the memory. Otherwise an
    exception (an interrupt, say) could drop whoever was to wait, and the memory would go to
    somebody else while a block of the file is still arriving there.
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
        "wanted",
    )

    def __init__(self, file: OpenFile, offset: int, memory: Tensor, *, is_write: bool) -> None:
        self.file = file
        self.memory = memory
        self.is_write = is_write
        self.begin = offset
        # What is left to do.
        self.offset = offset
        self.address = memory.data_ptr()
        self.nbytes = memory.numel()
        self.wanted = self.nbytes  # fewer, where a file ends before its last sector does
        self.is_done = self.nbytes == 0
        self.failure: StorageError | None = None
        self.answers = 0  # of the kernel
        self.ticket: Any = None  # what a backend knows it by

    def advance(self, result: int) -> None:
        """Notes the answer of the kernel: bytes done, or minus an errno."""
        if -result in _AGAIN:
            return
        # What is left begins at a whole sector; only the end of the range may lie within one.
        done = result if result == self.nbytes else result // _SECTOR_NBYTES * _SECTOR_NBYTES
        if not self.is_write and self.memory.numel() - self.nbytes + result >= self.wanted:
            done = self.nbytes
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
        fix = (
            "check the disk (dmesg, smartctl -a); "
            "start again from the last checkpoint, on another path"
        )
        if number in FULL:
            fix = "free space on this file system, or choose another: zf.nvme('/other_disk')"
        return self._error(
            "failed", f"{errno.errorcode.get(number, number)}: {os.strerror(number)}", fix
        )

    def _ended(self, done: int) -> StorageError:
        return self._error(
            "stopped short",
            f"after {self.memory.numel() - self.nbytes + done} B the kernel does no more; "
            f"the file has {os.fstat(self.file.fd).st_size} B",
            "something cut the file, or the disk is failing: start again from the last checkpoint",
        )

    def _error(self, how: str, why: str, fix: str) -> StorageError:
        return StorageError(
            f"{'Writing to' if self.is_write else 'Reading from'} {self.file.name} {how}.",
            file=self.file.name,
            range=f"{bytes_text(self.memory.numel())} at offset {self.begin}, "
            f"stopped at {self.offset}",
            why=why,
            fix=fix,
        )


class IoBackend(Protocol):
    """What hands requests to the kernel, and holds them until they are done.

    As text it says what it is.
    """

    def submit(self, requests: Sequence[Request]) -> None:
        """Begins requests; returns at once."""

    def wait(self, requests: Sequence[Request]) -> None:
        """Waits until all of these are done or have failed."""

    def settle(self, memory: Tensor) -> None:
        """Waits for what nobody waits for any more after an interrupt, and uses this memory."""


class Threads:
    """Does requests by `os.preadv` and `os.pwritev` in a few threads.

    They are as fast as io_uring while the interpreter is idle. Beside a busy main thread each
    request waits for the interpreter, which costs up to two thirds of the speed; so they are the
    second choice.
    """

    def __init__(self, count: int = _THREADS) -> None:
        self._count = count
        self._pool = ThreadPoolExecutor(count, thread_name_prefix="zero_fn_storage")
        self._begun: list[Request] = []

    def __str__(self) -> str:
        return f"{self._count} threads"

    def submit(self, requests: Sequence[Request]) -> None:
        self._begun = [request for request in self._begun if not request.is_done]
        self.wait([other for other in self._begun if any(map(other.meets, requests))])
        for request in requests:
            self._begun.append(request)
            request.ticket = self._pool.submit(_carry, request)

    def wait(self, requests: Sequence[Request]) -> None:
        """Waits until all of these are done or have failed."""
        for request in requests:
            request.ticket = request.ticket or self._pool.submit(_carry, request)
            request.ticket.result()

    def settle(self, memory: Tensor) -> None:
        """See `IoBackend.settle`."""
        self.wait([request for request in self._begun if request.uses(memory)])


def _carry(request: Request) -> None:
    while not request.is_done:
        memory = (ctypes.c_char * request.nbytes).from_address(request.address)
        move = os.pwritev if request.is_write else os.preadv
        try:
            result = move(request.file.fd, [memory], request.offset)
        except OSError as error:
            result = -(error.errno or 5)
        request.advance(result)


class Block:
    """The digest of what was last written at one place of a disk, 64 bits of xxh3."""

    __slots__ = ("_before", "_digest", "_generation", "nbytes")

    def __init__(self, nbytes: int) -> None:
        self.nbytes = nbytes
        self._generation = 0  # how often it was written
        # Of the last write, and of the one before; None if one was interrupted:
        # it has been done, or it has not.
        self._digest: int | None = None
        self._before: int | None = None

    def note(self, request: Request) -> None:
        """Notes what a request writes."""
        self.nbytes = request.memory.numel()
        self._digest = _digest(request)
        self._generation += 1

    def forget(self) -> None:
        """A write begins: until it is noted, nothing is known of what the block holds."""
        self._before = self._digest
        self._digest = None

    def require_undamaged(self, request: Request) -> None:
        """Compares what a request has read with what was written last."""
        found = _digest(request)
        if self._digest is None or found == self._digest:
            return
        is_before = self._generation > 1 and found == self._before
        raise StorageError(
            f"A block of {request.file.name} does not hold what was written to it.",
            file=request.file.name,
            block=f"{self.nbytes} B at offset {request.begin}",
            expected=f"checksum {self._digest:016x} of generation {self._generation}",
            found=f"the bytes of generation {self._generation - 1}"
            if is_before
            else f"checksum {found:016x}",
            why="the disk lost a write"
            if is_before
            else "the disk, its link or memory flipped bits, or the file was written to",
            fix="check the disk (smartctl -a) and memory; "
            "start again from the last checkpoint, on another path",
        )


class Transfer(ProcessLocal):
    """Requests under way.

    Whoever began them must wait before using their memory or giving it up.
    """

    def __init__(
        self, backend: IoBackend, requests: Sequence[Request], blocks: Sequence[Block]
    ) -> None:
        """Begins requests, each for one of the blocks."""
        super().__init__()
        self._backend = backend
        self._requests = requests
        self._blocks = blocks
        for request, block in zip(requests, blocks, strict=True):
            if request.is_write:
                block.forget()
        backend.submit(requests)
        for request, block in zip(requests, blocks, strict=True):
            if request.is_write:
                block.note(request)

    def wait(self) -> None:
        """Waits until every byte is there, and compares digests of what was read.

        May be called again.
        """
        if not self._requests:
            return
        self.require_own()
        for watch in watching.watchers:
            watch.note(Moment.COPY, "nvme")
        self._backend.wait(self._requests)  # after an interrupt the next call waits for them
        requests, self._requests = self._requests, ()
        for request in requests:
            if request.failure is not None:
                raise request.failure
        for request, block in zip(requests, self._blocks, strict=True):
            if not request.is_write:
                block.require_undamaged(request)
        for watch in watching.watchers:
            watch.note(Moment.COPIED)


class Waited(Protocol):
    """One transfer, or several."""

    def wait(self) -> None:
        """See `Transfer.wait`."""


def wait_all(transfers: Iterable[Waited | None]) -> None:
    """Waits for all transfers, and raises the first failure.

    None stands for what needed no transfer.
    """
    failure: StorageError | None = None
    for transfer in transfers:
        try:
            if transfer is not None:
                transfer.wait()
        except StorageError as error:
            failure = failure or error
    if failure is not None:
        raise failure


def _digest(request: Request) -> int:
    return xxhash.xxh3_64_intdigest(request.memory[: request.wanted].numpy().data)
