"""Blocks in an unnamed file, each with its checksum and its generation.

Both are kept in memory, as the file dies with the process anyway. A read that finds other bytes than the last write
left raises, and says whether they are those of the write before: a disk that lost a write.

The digests of a write are taken while the disk reads the same memory.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from torch import Tensor

from zero_fn.errors import StorageError
from zero_fn.kernels.checksum import digests
from zero_fn.storage.carrier import Carrier
from zero_fn.storage.file import SpillFile
from zero_fn.storage.request import Request
from zero_fn.tiers import Nvme

__all__ = ["BLOCK_NBYTES", "Spill", "Transfer", "wait_all"]

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
            for request, block, found in zip(requests, self._blocks, digests(self._view, BLOCK_NBYTES), strict=True):
                _require_undamaged(request, block, found)


def wait_all(transfers: Iterable[Transfer | None]) -> None:
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
        pieces = _pieces(view)
        requests = [
            Request(self.file, offset + start, piece.data_ptr(), piece.numel(), is_write=True)
            for start, piece in pieces
        ]
        self._carrier.submit(requests)
        for (start, piece), digest in zip(pieces, digests(view, BLOCK_NBYTES), strict=True):
            block = self._blocks.setdefault(offset + start, _Block(piece.numel()))
            block.nbytes, block.generation = piece.numel(), block.generation + 1
            block.digest, block.digest_before = digest, block.digest
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
