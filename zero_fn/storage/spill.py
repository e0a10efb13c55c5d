"""Blocks in an unnamed file, each with its checksum and its generation.

Both are kept in memory, as the file dies with the process anyway. A read that finds other bytes than the last write
left raises, and says whether they are those of the write before: a disk that lost a write.

The digests of a write are taken while the disk reads the same memory: 64 bits of xxh3, at some 37 GB/s on one core. They see
flipped bits, and sectors or words that are lost, stale or in the wrong place.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

import xxhash
from torch import Tensor

from zero_fn.errors import StorageError
from zero_fn.storage.carrier import Carrier
from zero_fn.storage.forked import Owned
from zero_fn.storage.request import Request
from zero_fn.storage.stripes import Extent, Stripes
from zero_fn.tiers import Nvme

__all__ = ["BLOCK_NBYTES", "Spill", "Transfer", "Waited", "wait_all"]

BLOCK_NBYTES = 8 << 20
_ALIGNMENT_NBYTES = 4096


@dataclass(slots=True)
class _Block:
    """What was written last at one offset: its size, how often it was written, and the digests of the last two times."""

    nbytes: int
    generation: int = 0
    digest: int = 0
    digest_before: int | None = None


class Transfer:
    """Blocks on their way to or from the disk. They must be waited for before their memory is used or given up."""

    __slots__ = ("_blocks", "_carrier", "_extents", "_requests", "_view")

    def __init__(
        self, carrier: Carrier, requests: list[Request], blocks: list[_Block], extents: list[Extent], view: Tensor
    ) -> None:
        self._carrier, self._requests, self._blocks = carrier, requests, blocks
        self._extents, self._view = extents, view

    def wait(self) -> None:
        """Returns when every byte is there, checked if it was read. May be called again.

        Raises:
            StorageError: The disk failed, or gave other bytes than were written. Nothing is under way any more.
        """
        requests, self._requests = self._requests, []
        self._carrier.wait(requests)
        for request in requests:
            if request.failure is not None:
                raise request.failure
        if requests and not requests[0].is_write:
            for request, block, found in zip(requests, self._blocks, _digests(self._extents, self._view), strict=True):
                _require_undamaged(request, block, found)


class Waited(Protocol):
    """One transfer, or several."""

    def wait(self) -> None:
        """See `Transfer.wait`."""


def wait_all(transfers: Iterable[Waited | None]) -> None:
    """Waits for all of them, and raises what went wrong first. None stands for what was there already."""
    failure: StorageError | None = None
    for transfer in transfers:
        try:
            if transfer is not None:
                transfer.wait()
        except StorageError as error:
            failure = failure or error
    if failure is not None:
        raise failure


class Spill(Owned):
    """A file of blocks. Printed, it says where it is and how it is read and written.

    Attributes:
        file: The file, over all paths of the tier.
    """

    def __init__(self, tier: Nvme, what: str, carrier: Carrier) -> None:
        """Makes an empty file.

        Args:
            tier: Where, and how much at most.
            what: What it holds, for errors.
            carrier: What carries its reads and writes.

        Raises:
            StorageError: No file can be made there.
        """
        super().__init__()
        self.file = Stripes(tier, what)
        self._carrier = carrier
        self._blocks: dict[int, _Block] = {}

    def __str__(self) -> str:
        how = "direct" if self.file.is_direct else "through the page cache"
        return f"{self.file.tier}, {how} by {self._carrier}"

    def reserve(self, nbytes: int) -> int:
        """Reserves `nbytes` more, in whole pages, and returns their offset.

        Raises:
            TierError: The disk or the limit of the tier has no room.
        """
        offset = self.file.nbytes
        self.file.reserve(offset + -(-nbytes // _ALIGNMENT_NBYTES) * _ALIGNMENT_NBYTES)
        return offset

    def write(self, offset: int, view: Tensor) -> Transfer:
        """Begins to write a range.

        Args:
            offset: Where in the file, a multiple of the page.
            view: uint8, whole pages of memory; to be left alone until the transfer was waited for.
        """
        self.require_own()
        extents = self._extents(offset, view)
        requests = _requests(extents, view, is_write=True)
        self._carrier.submit(requests)
        for extent, digest in zip(extents, _digests(extents, view), strict=True):
            block = self._blocks.setdefault(offset + extent.start, _Block(extent.nbytes))
            block.nbytes, block.generation = extent.nbytes, block.generation + 1
            block.digest, block.digest_before = digest, block.digest
        return Transfer(self._carrier, requests, [], extents, view)

    def read(self, offset: int, view: Tensor) -> Transfer:
        """Begins to read a range that was written as one.

        Args:
            offset: Where it was written.
            view: uint8, as many bytes as were written there.
        """
        self.require_own()
        extents = self._extents(offset, view)
        blocks = [self._blocks[offset + extent.start] for extent in extents]
        assert all(block.nbytes == extent.nbytes for block, extent in zip(blocks, extents, strict=True))
        requests = _requests(extents, view, is_write=False)
        self._carrier.submit(requests)
        return Transfer(self._carrier, requests, blocks, extents, view)

    def _extents(self, offset: int, view: Tensor) -> list[Extent]:
        return list(self.file.extents(offset, view.numel(), BLOCK_NBYTES))


def _requests(extents: Sequence[Extent], view: Tensor, *, is_write: bool) -> list[Request]:
    return [Request(file, at, view[start : start + nbytes], is_write=is_write) for start, nbytes, file, at in extents]


def _digests(extents: Sequence[Extent], view: Tensor) -> list[int]:
    memory = view.numpy().data
    return [xxhash.xxh3_64_intdigest(memory[start : start + nbytes]) for start, nbytes, _, _ in extents]


def _require_undamaged(request: Request, block: _Block, found: int) -> None:
    if found == block.digest:
        return
    before = block.generation > 1 and found == block.digest_before
    raise StorageError(
        f"A block of {request.file.name} does not hold what was written to it.",
        file=request.file.name,
        block=f"{block.nbytes} B at offset {request.begin}",
        expected=f"checksum {block.digest:016x} of generation {block.generation}",
        found=f"the bytes of generation {block.generation - 1}" if before else f"checksum {found:016x}",
        why="the disk lost a write"
        if before
        else "the disk, its link or memory flipped bits, or the file was written to",
        fix="check the disk (smartctl -a) and memory; start again from the last checkpoint, on another path",
    )
