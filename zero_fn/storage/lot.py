"""A file in which byte strings of any size are put for a while and taken back, mostly the last one first.

They pass through three stagings of a disk: one is being filled or emptied while the others are written or read ahead.
"""

from __future__ import annotations

from torch import Tensor

from zero_fn.storage.shelf import Disk
from zero_fn.storage.slab import whole_pages
from zero_fn.storage.transfer import Transfer
from zero_fn.tiers import Nvme

__all__ = ["Lot"]

_STAGINGS = 3


class Lot:
    """Places on a disk. Freed ones are used again for the same size."""

    def __init__(self, tier: Nvme, what: str) -> None:
        """Makes an empty file.

        Raises:
            StorageError: The path takes no files.
        """
        self._disk = Disk(tier, what)
        self._free: dict[int, list[int]] = {}  # places, by their bytes
        self._staged: dict[int, tuple[Tensor, Transfer]] = {}  # by place, those staged first at the beginning

    @property
    def nbytes(self) -> int:
        """Bytes of the file."""
        return self._disk.nbytes

    def put(self, content: Tensor) -> int:
        """Begins to write some bytes and returns their place. `content` (uint8) is copied and may change at once.

        Raises:
            TierError: The disk, the limit of the tier, or memory for the stagings has no room.
            StorageError: An earlier write failed.
        """
        pages = whole_pages(content.numel())
        free = self._free.get(pages)
        place = free.pop() if free else self._disk.reserve([pages])[0]
        self._let_go(place)  # of what was there before
        memory = self._staging(pages)
        memory[: content.numel()].copy_(content)
        self._staged[place] = memory, self._disk.write(place, memory)
        return place

    def fetch(self, place: int, nbytes: int) -> None:
        """Begins to read what is at a place, unless a staging has it."""
        if place not in self._staged:
            memory = self._staging(whole_pages(nbytes))
            self._staged[place] = memory, self._disk.read(place, memory)

    def get(self, place: int, out: Tensor) -> None:
        """Copies what is at a place to `out`, uint8. It stays there.

        Raises:
            StorageError: The disk failed, or gave other bytes than were written.
        """
        self.fetch(place, out.numel())
        memory, transfer = self._staged[place]
        try:
            transfer.wait()
        except BaseException:
            self._let_go(place)
            raise
        out.copy_(memory[: out.numel()])

    def free(self, place: int, nbytes: int) -> None:
        """Gives up a place."""
        self._free.setdefault(whole_pages(nbytes), []).append(place)

    def _staging(self, nbytes: int) -> Tensor:
        """Memory in which nothing is under way: of a new staging, or of the one that was taken first."""
        is_larger = _STAGINGS * nbytes > self._disk.buffers_nbytes
        while self._staged and (is_larger or len(self._staged) == _STAGINGS):
            self._let_go(next(iter(self._staged)))
        self._disk.stage(nbytes, _STAGINGS)
        return self._disk.borrow(0, nbytes)

    def _let_go(self, place: int) -> None:
        """Waits for what is under way between a place and its staging, which others may take then."""
        if place in self._staged:
            memory, transfer = self._staged.pop(place)
            try:
                transfer.wait()
            finally:
                self._disk.give_back(memory)
