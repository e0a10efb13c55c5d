"""Files that somebody else has written, as a tier that is only read:
parameters are read where a folder of weights has them.

The disk is read in whole sectors, so a range of a file comes with up to a sector before and after
it. A digest is taken of what was read first; if later reads find other bytes, the file was written
to, or the disk is failing.
"""

from __future__ import annotations

import os
import weakref
from collections.abc import Iterator
from typing import NamedTuple

from torch import Tensor

from zero_fn.errors import StateError, StorageError
from zero_fn.storage.files import error_text, opened
from zero_fn.storage.host_memory import PAGE_NBYTES, whole_pages
from zero_fn.storage.io import Block, Request, Transfer
from zero_fn.storage.tier_storage import BLOCK_NBYTES, DiskStorage
from zero_fn.values.tiers import Nvme, Tier

__all__ = ["FileRange", "StoredFile", "StoredFiles"]


class FileRange(NamedTuple):
    """Bytes of a file."""

    path: str
    first: int
    nbytes: int

    @property
    def before(self) -> int:
        """Bytes before it that are read with it."""
        return self.first % PAGE_NBYTES

    @property
    def room_nbytes(self) -> int:
        """Bytes of memory that it is read into."""
        return whole_pages(self.before + self.nbytes)


class StoredFile:
    """A file that is open to be read, past the page cache where the file system allows it."""

    def __init__(self, path: str) -> None:
        self.name = path
        try:
            self.fd, _ = opened(lambda flags: os.open(path, os.O_RDONLY | os.O_CLOEXEC | flags))
        except OSError as error:
            raise StorageError(
                f"{path} cannot be read.",
                why=error_text(error),
                fix="give a folder that every rank sees and may read",
            ) from error
        self.close = weakref.finalize(self, os.close, self.fd)


class StoredBlock(Block):
    """A block that others have written: what is read first is what is to be read later."""

    __slots__ = ("_is_known",)

    def __init__(self, nbytes: int) -> None:
        super().__init__(nbytes)
        self._is_known = False

    def require_undamaged(self, request: Request) -> None:
        if not self._is_known:
            self.note(request)
            self._is_known = True
            return
        super().require_undamaged(request)


class StoredFiles(DiskStorage):
    """Ranges of files.

    The place of a range is the first byte of its memory, counted over all ranges; `nbytes` are
    those that are read of all, in whole pages.
    """

    _block_type = StoredBlock

    def __init__(self, tier: Tier) -> None:
        """`tier` is where the parameters would rest otherwise."""
        super().__init__(Nvme((), None), "parameters in files")
        self.tier = tier
        self._ranges: dict[int, FileRange] = {}
        self._opened: dict[str, StoredFile] = {}

    def __str__(self) -> str:
        return f"files in {', '.join(sorted({os.path.dirname(path) for path in self._opened}))}"

    def place(self, ranges: list[FileRange]) -> int:
        """Opens the files of ranges that are read as one; they lie one after the
        other from the returned place on."""
        begin = self.nbytes
        for each in ranges:
            if each.path not in self._opened:
                self._opened[each.path] = StoredFile(each.path)
            self._ranges[self.nbytes] = each
            self.nbytes += each.room_nbytes
        return begin

    def write(self, place: int, memory: Tensor) -> Transfer:
        """Refuses."""
        raise self.unchanged(self._ranges[place].path if place in self._ranges else self)

    def unchanged(self, where: object) -> StateError:
        """The error of whoever wants to change what is read in place."""
        return StateError(
            "A parameter was to be changed that is read in place from a file.",
            file=where,
            why="it was loaded with copy=False; the file belongs to others, and stays as it is",
            fix="zf.load_pretrained(model, folder) without copy=False: parameters then rest in "
            "their tier; or an optimizer of the others alone: [p for p in model.parameters() if "
            "p.requires_grad]",
        )

    def _requests(
        self, place: int, memory: Tensor, *, is_write: bool
    ) -> Iterator[tuple[int, Request]]:
        part = self._ranges[place]
        file = self._opened[part.path]
        begin = part.first - part.before
        end = part.before + part.nbytes
        for start in range(0, end, BLOCK_NBYTES):
            most = min(BLOCK_NBYTES, whole_pages(end - start))
            request = Request(file, begin + start, memory[start : start + most], is_write=is_write)
            request.wanted = min(end - start, most)  # the file may end before the sector does
            yield start, request
