"""One range of bytes over several disks that are read and written at once, as RAID-0 does. Pure arithmetic.

    bytes       |- stripe 0 -|- stripe 1 -|- stripe 2 -|- stripe 3 -|- 4 -|
    disk 0      |- stripe 0 -|- stripe 2 -|- 4 -|
    disk 1      |- stripe 1 -|- stripe 3 -|

On one disk the range is not cut.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

__all__ = ["STRIPE_NBYTES", "Extent", "extents_of", "share_of"]

STRIPE_NBYTES = 2 << 20


class Extent(NamedTuple):
    """Bytes that lie in a row on one disk.

    Attributes:
        start, nbytes: The first of them in the range that was asked for, and their number.
        disk: The number of the disk.
        offset: The first byte in the file of the disk.
    """

    start: int
    nbytes: int
    disk: int
    offset: int


def extents_of(begin: int, nbytes: int, disks: int, largest_nbytes: int) -> Iterator[Extent]:
    """A range of bytes, cut where it continues on another disk or would be longer than `largest_nbytes`."""
    start = 0
    while start < nbytes:
        left = min(nbytes - start, largest_nbytes)
        if disks == 1:
            yield Extent(start, left, 0, begin + start)
        else:
            stripe, within = divmod(begin + start, STRIPE_NBYTES)
            left = min(left, STRIPE_NBYTES - within)
            yield Extent(start, left, stripe % disks, stripe // disks * STRIPE_NBYTES + within)
        start += left


def share_of(disk: int, nbytes: int, disks: int) -> int:
    """How many of the first `nbytes` bytes lie on the disk of this number."""
    stripes, rest = divmod(nbytes, STRIPE_NBYTES)
    whole, more = divmod(stripes, disks)
    return (whole + (disk < more)) * STRIPE_NBYTES + (rest if disk == more else 0)
