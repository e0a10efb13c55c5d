"""A file in which byte strings of any size are put for a while and taken back, mostly the last one first.

They pass through three buffers of one slab: one is being filled or emptied while the others are written or read ahead.
"""

from __future__ import annotations

from torch import Tensor

from zero_fn.storage.buffers import Buffers
from zero_fn.storage.carrier import chosen_carrier
from zero_fn.storage.slab import whole_pages
from zero_fn.storage.spill import Spill, Transfer
from zero_fn.tiers import Nvme

__all__ = ["Lot"]

_BUFFERS = 3


class Lot:
    """Places in a file. A place is the offset of whole pages; freed ones are used again for the same size."""

    def __init__(self, tier: Nvme, what: str) -> None:
        """Makes an empty file.

        Raises:
            StorageError: The path takes no files.
        """
        self._what = what
        self._free: dict[int, list[int]] = {}
        self._buffers = Buffers()
        self._held: list[int | None] = []  # the place whose bytes each buffer has
        self._transfers: list[Transfer | None] = []
        self._turn = 0
        self._spill = Spill(tier, what, chosen_carrier())

    @property
    def nbytes(self) -> int:
        """Bytes of host memory that the buffers take."""
        return self._buffers.nbytes

    @property
    def file_nbytes(self) -> int:
        """Bytes of the file."""
        return self._spill.file.nbytes

    def put(self, content: Tensor) -> int:
        """Begins to write some bytes and returns their place. `content` (uint8) is copied and may change at once.

        Raises:
            TierError: The disk, the limit of the tier, or memory for the buffers has no room.
            StorageError: An earlier write failed.
        """
        pages = whole_pages(content.numel())
        self._make_room(pages)
        free = self._free.get(pages)
        place = free.pop() if free else self._spill.reserve(pages)
        self._forget(place)
        turn = self._next()
        self._buffers.views[turn][: content.numel()].copy_(content)
        self._held[turn], self._transfers[turn] = place, self._spill.write(place, self._buffers.views[turn][:pages])
        return place

    def fetch(self, place: int, nbytes: int) -> None:
        """Begins to read what is at a place, unless a buffer has it."""
        if place not in self._held:
            turn = self._next()
            view = self._buffers.views[turn][: whole_pages(nbytes)]
            self._held[turn], self._transfers[turn] = place, self._spill.read(place, view)

    def get(self, place: int, out: Tensor) -> None:
        """Copies what is at a place to `out`, uint8. It stays there.

        Raises:
            StorageError: The disk failed, or gave other bytes than were written.
        """
        self.fetch(place, out.numel())
        turn = self._held.index(place)
        self._settle(turn)
        out.copy_(self._buffers.views[turn][: out.numel()])

    def free(self, place: int, nbytes: int) -> None:
        """Gives up a place."""
        self._free.setdefault(whole_pages(nbytes), []).append(place)

    def __del__(self) -> None:
        spill = getattr(self, "_spill", None)
        if spill is not None and not spill.is_inherited:
            self._release()

    def _next(self) -> int:
        """The buffer whose turn it is, with nothing under way."""
        turn, self._turn = self._turn, (self._turn + 1) % _BUFFERS
        self._settle(turn)
        self._held[turn] = None
        return turn

    def _settle(self, turn: int) -> None:
        transfer, self._transfers[turn] = self._transfers[turn], None
        if transfer is not None:
            try:
                transfer.wait()
            except BaseException:
                self._held[turn] = None
                raise

    def _forget(self, place: int) -> None:
        """Other bytes will be written to a place: what is under way there ends first."""
        if place in self._held:
            turn = self._held.index(place)
            self._settle(turn)
            self._held[turn] = None

    def _make_room(self, nbytes: int) -> None:
        if nbytes <= self._buffers.size:
            return
        self._release()
        self._buffers = Buffers(_BUFFERS, nbytes, f"buffers of {self._what}")
        self._held, self._transfers = [None] * _BUFFERS, [None] * _BUFFERS

    def _release(self) -> None:
        """Gives up the buffers. What is under way ends first; a failure was, or will be, told where it matters."""
        failure = None
        for turn in range(len(self._transfers)):
            try:
                self._settle(turn)
            except Exception as error:  # the others must end too
                failure = error
        self._buffers, self._held, self._transfers = Buffers(), [], []
        if failure is not None:
            raise failure
