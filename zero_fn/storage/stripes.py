"""One range of bytes over the disks of a tier, which are read and written at once: RAID-0 without RAID.

    bytes       |- stripe 0 -|- stripe 1 -|- stripe 2 -|- stripe 3 -|- 4 -|
    first path  |- stripe 0 -|- stripe 2 -|- 4 -|
    second path |- stripe 1 -|- stripe 3 -|

With one path it is that path's file, and not cut.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from typing import NamedTuple

from zero_fn.storage.file import SpillFile, too_small
from zero_fn.tiers import Nvme

__all__ = ["STRIPE_NBYTES", "Extent", "Stripes"]

STRIPE_NBYTES = 2 << 20


_open: weakref.WeakSet[Stripes] = weakref.WeakSet()  # all of a tier share its limit


class Extent(NamedTuple):
    """Bytes that lie in a row in one file.

    Attributes:
        start, nbytes: Which of the range that was asked for.
        file: Where they are.
        offset: From which byte of it on.
    """

    start: int
    nbytes: int
    file: SpillFile
    offset: int


class Stripes:
    """Files of one tier, one on each of its paths.

    Attributes:
        tier: The tier.
        files: By path.
        nbytes: Bytes reserved, on all paths together.
        is_direct: Whether all reads and writes pass the page cache by.
    """

    def __init__(self, tier: Nvme, what: str) -> None:
        """Makes empty files.

        Raises:
            StorageError: A path is missing, is no folder, or cannot be written.
        """
        self.tier, self._what = tier, what
        self.files = tuple(SpillFile(path, what) for path in tier.paths)
        self.nbytes = 0
        self.is_direct = all(file.is_direct for file in self.files)
        _open.add(self)

    def reserve(self, nbytes: int) -> None:
        """Makes sure that the disks have room for `nbytes` in all, before anything relies on it.

        Raises:
            TierError: One has not, or the limit of the tier is lower. All files are as they were.
            StorageError: A disk failed.
        """
        if nbytes <= self.nbytes:
            return
        if self.tier.limit_nbytes is not None:
            left = self.tier.limit_nbytes - sum(o.nbytes for o in list(_open) if o is not self and o.tier == self.tier)
            if nbytes > left:
                raise too_small(f"{self._what} in {', '.join(self.tier.paths)}", nbytes, left, "the limit of the tier")
        before = [file.nbytes for file in self.files]
        try:
            for number, file in enumerate(self.files):
                file.reserve(self._share(number, nbytes))
        except BaseException:
            for file, reserved in zip(self.files, before, strict=True):
                file.shrink(reserved)
            raise
        self.nbytes = nbytes

    def extents(self, offset: int, nbytes: int, largest_nbytes: int) -> Iterator[Extent]:
        """A range, cut where it goes on in another file or would be longer than `largest_nbytes`."""
        count, start = len(self.files), 0
        while start < nbytes:
            left = min(nbytes - start, largest_nbytes)
            if count == 1:
                yield Extent(start, left, self.files[0], offset + start)
            else:
                stripe, within = divmod(offset + start, STRIPE_NBYTES)
                left = min(left, STRIPE_NBYTES - within)
                yield Extent(start, left, self.files[stripe % count], stripe // count * STRIPE_NBYTES + within)
            start += left

    def close(self) -> None:
        """Gives the room back."""
        _open.discard(self)
        for file in self.files:
            file.close()

    def _share(self, number: int, nbytes: int) -> int:
        """Bytes of the first `nbytes` that are in the file of this number."""
        count = len(self.files)
        if count == 1:
            return nbytes
        stripes, rest = divmod(nbytes, STRIPE_NBYTES)
        whole, more = divmod(stripes, count)
        return (whole + (number < more)) * STRIPE_NBYTES + (rest if number == more else 0)
