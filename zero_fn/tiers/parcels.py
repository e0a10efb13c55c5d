"""How the tensors of a record lie in one range of bytes of a tier. Pure arithmetic.

    parcels   |---- 0 ----|---- 1 ----|---- 2 ----|-- 3 --|   each begins on a page
    tensors   |a|-- b --|c|---------- d ----------|  d |e||   each contiguous, on a boundary of 64
                                                              bytes

A parcel is read and written as one, and has checksums of its own. So a unit is fetched as a whole
for its forward, a tensor alone for whoever asks for it, and a parcel at a time by a streamed
optimizer, whose memory then does not depend on the size of the unit. Large tensors are cut where
vector instructions do not notice (`zero_fn.values.chunks`).

Where states are stepped in memory of the host and nothing is on a disk, parcels are larger:
each is a call of a kernel by all threads, and with parcels of 4 MiB these calls cost as much as
the step itself.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

import torch

from zero_fn.storage import whole_pages
from zero_fn.values.chunks import Piece, chunks_of

__all__ = [
    "PARCEL_NBYTES",
    "STEPPED_IN_PLACE_NBYTES",
    "Form",
    "Parcel",
    "lands",
    "padded_nbytes",
    "parcels_of",
    "planned_parcels",
    "record_nbytes",
    "staged_nbytes",
]

PARCEL_NBYTES = 4 << 20
STEPPED_IN_PLACE_NBYTES = 64 << 20
_ALIGNMENT_NBYTES = 64
_LANDING_NBYTES = 1 << 20


class Form(NamedTuple):
    """The elements and dtype of one tensor of a record."""

    numel: int
    dtype: torch.dtype
    # The dtype whose bytes decide where parcels are cut, so that a record and its compute copies
    # are cut alike; None is `dtype`.
    packed_as: torch.dtype | None = None
    # Most bytes of a parcel, the same for all tensors of a group.
    parcel_nbytes: int = PARCEL_NBYTES
    # Whether modules see the memory that it is read into (kind.py), the same for all of a group.
    lands: bool = False


@dataclass(slots=True)
class Parcel:
    """Pieces of tensors that are read and written as one."""

    pieces: tuple[Piece, ...]  # which elements of which tensors lie in it
    offsets: tuple[int, ...]  # the first byte of each piece in the parcel
    start: int  # its first byte in the record
    nbytes: int
    is_stored: bool = False  # whether it was ever written; before, its elements are zero
    # How often it was written; of a compute copy, the version of the original that it
    # holds (`compute_copies.py`).
    version: int = 0


def padded_nbytes(numel: int, itemsize: int) -> int:
    """Bytes of so many elements up to where the next ones may begin."""
    return -(-numel * itemsize // _ALIGNMENT_NBYTES) * _ALIGNMENT_NBYTES


def parcels_of(forms: Sequence[Form]) -> list[Parcel]:
    """The parcels of a record of such tensors."""
    return list(map(copy.copy, planned_parcels(tuple(forms))))


@lru_cache(maxsize=64)  # blocks of a model are alike
def planned_parcels(forms: tuple[Form, ...]) -> tuple[Parcel, ...]:
    """The parcels of a record that is only planned: the same objects for all that are alike,
    not to be written to."""
    packed = chunks_of(
        [form.numel for form in forms],
        [None] * len(forms),
        lambda number, numel: padded_nbytes(
            numel, (forms[number].packed_as or forms[number].dtype).itemsize
        ),
        forms[0].parcel_nbytes if forms else PARCEL_NBYTES,
    )
    parcels, start = [], 0
    for pieces in packed:
        offsets, end = [], 0
        for piece in pieces:
            offsets.append(end)
            end += padded_nbytes(piece.numel, forms[piece.parameter].dtype.itemsize)
        parcels.append(Parcel(pieces, tuple(offsets), start, whole_pages(end)))
        start += parcels[-1].nbytes
    return tuple(parcels)


def lands(forms: Sequence[Form]) -> bool:
    """Whether modules see the memory that a record is read into.

    Small ones are copied: views need not be cut anew.
    """
    return bool(forms) and forms[0].lands and record_nbytes(forms) >= _LANDING_NBYTES


def staged_nbytes(forms: Sequence[Form]) -> int:
    """Bytes of the staging buffer that a record passes through on its way from and to a disk."""
    return 0 if lands(forms) else record_nbytes(forms)


def record_nbytes(forms: Sequence[Form]) -> int:
    """Bytes of a record of such tensors, in whole pages."""
    parcels = planned_parcels(tuple(forms))
    return parcels[-1].start + parcels[-1].nbytes if parcels else 0
