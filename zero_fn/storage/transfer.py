"""Transfers between memory and a disk, in blocks that each have a checksum and a generation.

Both are kept in memory, as the file ends with the process. A read that finds other bytes than the last write left raises, and
says whether they are the bytes of the write before: then the disk has lost a write.

The digest of a write is taken while the disk reads the same memory: 64 bits of xxh3, at some 37 GB/s on one core. It detects
flipped bits, and sectors or words that are lost, stale or in the wrong place.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Protocol

import xxhash

from zero_fn.errors import StorageError
from zero_fn.storage.carrier import Carrier
from zero_fn.storage.forked import Owned
from zero_fn.storage.request import Request

__all__ = ["Block", "Transfer", "Waited", "wait_all"]


class Block:
    """The digest of what was last written at one place of a disk.

    Attributes:
        nbytes: Bytes of the block.
    """

    __slots__ = ("_before", "_digest", "_generation", "nbytes")

    def __init__(self, nbytes: int) -> None:
        self.nbytes = nbytes
        self._generation = 0  # how often it was written
        self._digest: int | None = (
            None  # of the last write; None if that was interrupted: it has been done, or it has not
        )
        self._before: int | None = None  # of the one before

    def note(self, request: Request) -> None:
        """Notes what a request writes."""
        self.nbytes = request.memory.numel()
        self._digest = _digest(request)
        self._generation += 1

    def forget(self) -> None:
        """A write begins: until it is noted, nothing is known of what the block holds."""
        self._before, self._digest = self._digest, None

    def require_undamaged(self, request: Request) -> None:
        """Compares what a request has read with what was written last.

        Raises:
            StorageError: They differ.
        """
        found = _digest(request)
        if self._digest is None or found == self._digest:
            return
        is_before = self._generation > 1 and found == self._before
        raise StorageError(
            f"A block of {request.file.name} does not hold what was written to it.",
            file=request.file.name,
            block=f"{self.nbytes} B at offset {request.begin}",
            expected=f"checksum {self._digest:016x} of generation {self._generation}",
            found=f"the bytes of generation {self._generation - 1}" if is_before else f"checksum {found:016x}",
            why="the disk lost a write"
            if is_before
            else "the disk, its link or memory flipped bits, or the file was written to",
            fix="check the disk (smartctl -a) and memory; start again from the last checkpoint, on another path",
        )


class Transfer(Owned):
    """Requests under way. Whoever began them must wait before using their memory or giving it up."""

    def __init__(self, carrier: Carrier, requests: Sequence[Request], blocks: Sequence[Block]) -> None:
        """Begins requests, each for one of the blocks."""
        super().__init__()
        self._carrier, self._requests, self._blocks = carrier, requests, blocks
        for request, block in zip(requests, blocks, strict=True):
            if request.is_write:
                block.forget()
        carrier.submit(requests)
        for request, block in zip(requests, blocks, strict=True):
            if request.is_write:
                block.note(request)

    def wait(self) -> None:
        """Waits until every byte is there, and compares digests of what was read. May be called again.

        Raises:
            StorageError: The disk failed, or gave other bytes than were written; nothing is under way any more. Or this
                process was forked from the one that began the transfer.
        """
        if not self._requests:
            return
        self.require_own()
        self._carrier.wait(self._requests)  # after an interrupt the next call waits for them
        requests, self._requests = self._requests, ()
        for request in requests:
            if request.failure is not None:
                raise request.failure
        for request, block in zip(requests, self._blocks, strict=True):
            if not request.is_write:
                block.require_undamaged(request)


class Waited(Protocol):
    """One transfer, or several."""

    def wait(self) -> None:
        """See `Transfer.wait`."""


def wait_all(transfers: Iterable[Waited | None]) -> None:
    """Waits for all transfers, and raises the first failure. None stands for what needed no transfer."""
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
    return xxhash.xxh3_64_intdigest(request.memory.numpy().data)
