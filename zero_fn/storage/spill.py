"""Blocks in an unnamed file, each with its checksum and its generation.

Both are kept in memory, as the file dies with the process anyway. A read that finds other bytes than the last write
left raises, and says
whether they are those of the write before: a disk that lost a write.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from zero_fn.errors import StorageError
from zero_fn.storage.carrier import Carrier
from zero_fn.storage.checksum import SECTOR_NBYTES, Sums, digest, sector_sums
from zero_fn.storage.file import SpillFile
from zero_fn.storage.request import Request
from zero_fn.tiers import Nvme

__all__ = ["BLOCK_NBYTES", "Spill", "Transfer"]

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

    __slots__ = ("_blocks", "_carrier", "_requests", "_view")

    def __init__(self, carrier: Carrier, requests: list[Request], blocks: list[_Block], view: Tensor) -> None:
        self._carrier, self._requests, self._blocks, self._view = carrier, requests, blocks, view

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
            sums = sector_sums(self._view)
            for number, (request, block) in enumerate(zip(requests, self._blocks, strict=True)):
                _require_undamaged(request, block, _sums_of(sums, number))


class Spill:
    """A file of blocks.

    Attributes:
        file: The file.
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
        self.file = SpillFile(tier, what)
        self._carrier = carrier
        self._blocks: dict[int, _Block] = {}

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
        sums = sector_sums(view)
        requests = []
        for number, (start, piece) in enumerate(_pieces(view)):
            block = self._blocks.setdefault(offset + start, _Block(piece.numel()))
            block.nbytes, block.generation, block.digest_before = piece.numel(), block.generation + 1, block.digest
            block.digest = digest(_sums_of(sums, number), block.generation)
            requests.append(Request(self.file, offset + start, piece.data_ptr(), piece.numel(), is_write=True))
        self._carrier.submit(requests)
        return Transfer(self._carrier, requests, [], view)

    def read(self, offset: int, view: Tensor) -> Transfer:
        """Begins to read a range that was written as one.

        Args:
            offset: Where it was written.
            view: uint8, as many bytes as were written there.
        """
        pieces = _pieces(view)
        blocks = [self._blocks[offset + start] for start, _ in pieces]
        assert all(block.nbytes == piece.numel() for block, (_, piece) in zip(blocks, pieces, strict=True))
        requests = [
            Request(self.file, offset + start, piece.data_ptr(), piece.numel(), is_write=False)
            for start, piece in pieces
        ]
        self._carrier.submit(requests)
        return Transfer(self._carrier, requests, blocks, view)


def _pieces(view: Tensor) -> list[tuple[int, Tensor]]:
    nbytes = view.numel()
    return [(start, view[start : min(start + BLOCK_NBYTES, nbytes)]) for start in range(0, nbytes, BLOCK_NBYTES)]


def _sums_of(sums: Sums, number: int) -> Sums:
    """Those of one block, out of those of a transfer."""
    sectors = BLOCK_NBYTES // SECTOR_NBYTES
    return sums[number * sectors : (number + 1) * sectors]


def _require_undamaged(request: Request, block: _Block, sums: Sums) -> None:
    found = digest(sums, block.generation)
    if found == block.digest:
        return
    before = block.generation > 1 and digest(sums, block.generation - 1) == block.digest_before
    raise StorageError(
        f"A block of {request.file.name} does not hold what was written to it.",
        file=request.file.name,
        block=f"{block.nbytes} B at offset {request.begin}",
        expected=f"checksum {block.digest:08x} of generation {block.generation}",
        found=f"the bytes of generation {block.generation - 1}" if before else f"checksum {found:08x}",
        why="the disk lost a write"
        if before
        else "the disk, its link or memory flipped bits, or the file was written to",
        fix="check the disk (smartctl -a) and memory; start again from the last checkpoint, on another path",
    )
