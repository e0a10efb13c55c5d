"""Parameters in another tier, and copies of them in the dtype in which they are computed with.

[Note: compute copies] Parameters may be computed with in a smaller dtype than they rest in,
bfloat16 for float32. A second record then holds copies in that dtype, and a gather reads the
copies: half the bytes in each forward and backward. The parcels of the copies hold the same pieces
as those of the originals, and the version of the original that they were made of. A streamed step
writes both (the kernel of Adam in one pass). Any other write to an original outdates its copy; the
next gather then reads the originals and makes the copies anew.

[Note: codes at rest] Where parameters that are not trained travel in a format
(`precision(gather=)`), a third record holds them as they travel, and a gather reads that: of int4 a
quarter of the bytes of bfloat16. It is written by the first gather, which has coded them anyway,
and again after the originals were written.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress

from torch import Tensor

from zero_fn.errors import StorageError
from zero_fn.storage import Transfer, wait_all
from zero_fn.tiers.parcels import Parcel
from zero_fn.tiers.record import Record

__all__ = ["Copying", "ParameterRecord"]

_NO_VERSION = -1


class ParameterRecord(Record):
    """The parameters of a group in a tier."""

    # The same tensors in the compute dtype, or None. [Note: compute copies]
    copies: Record | None = None
    # The same in the format in which they travel, or None. [Note: codes at rest]
    codes: Record | None = None
    _coded: Sequence[int] | None = None  # the versions of the parcels that were coded
    _failure: StorageError | None = None  # of the last fetch ahead; `arrived` returns it

    @property
    def source(self) -> Record:
        """The record that a gather would read: codes or copies,
        if all of them are up to date; else the originals."""
        self.settle()
        if self.codes is not None and self._coded == self.versions():
            return self.codes
        copies = self.copies
        return self if copies is None or copies.versions() != self.versions() else copies

    @property
    def read(self) -> Record:
        """The record that was fetched for the gather under way."""
        for each in (self.codes, self.copies):
            if each is not None and each.fetched is not None:
                return each
        return self

    def write_codes(self, codes: Mapping[int, Tensor]) -> None:
        """Writes all parameters as they travel, by number, flat.

        If the disk fails the codes count as out of date: the gather that
        made them needs them no more.
        """
        assert self.codes is not None
        self._coded = None
        with suppress(StorageError):
            self.codes.write(codes)
            self._coded = self.versions()

    def fetch_ahead(self) -> None:
        """Begins to read what the next gather reads. `arrived` returns what failed."""
        try:
            self.source.fetch()
        except StorageError as error:
            self._failure = error

    def arrived(self, *, exact: bool) -> StorageError | None:
        """Waits until the parameters can be read, and returns the failure, if any. `exact`: in the
        dtype at rest; else copies and codes serve as well."""
        failure, self._failure = self._failure, None
        try:
            if exact:
                self.arrive()
            else:
                self._arrive_for_gather()
        except StorageError as error:
            failure = failure or error
        return failure

    def _arrive_for_gather(self) -> None:
        """Waits until the record that a gather reads is in memory,
        and renews copies that are out of date."""
        source, copies = self.source, self.copies
        for record in (self.codes, copies):
            if record is not None and record is not source:
                record.drop()  # it was fetched before the originals were written
        source.arrive()
        if copies is None or source is not self:
            return
        versions = [_NO_VERSION] * len(self.parcels)
        try:
            copies.write({number: self.values(number) for number in range(len(self.forms))})
            versions = self.versions()
        finally:
            for copy, version in zip(copies.parcels, versions, strict=True):
                copy.version = version

    def let_go(self) -> None:
        """Gives up fetched originals, copies and codes."""
        self._failure = None
        for record in (self, self.copies, self.codes):
            if record is not None:
                record.drop()

    def begin_copy(self, index: int, room: Tensor) -> dict[int, Tensor]:
        """Begins to make the copy of a parcel anew.

        Until `write_copy` is done the copy counts as out of date.
        """
        assert self.copies is not None
        copy = self.copies.parcels[index]
        copy.version = _NO_VERSION
        rooms = _pieces(self.copies, copy, room)
        places = zip(self.parcels[index].offsets, copy.offsets, strict=True)
        return {begin: rooms[in_copy] for begin, in_copy in places if in_copy in rooms}

    def fill_copy(self, index: int, memory: Tensor, rooms: Mapping[int, Tensor]) -> None:
        """Casts pieces of a parcel into their copies."""
        for begin, piece in _pieces(self, self.parcels[index], memory).items():
            if begin in rooms:
                rooms[begin].copy_(piece)

    def write_copy(self, index: int, room: Tensor) -> Copying:
        """Begins to write the copy of a parcel. It counts as up to date once it was waited for."""
        assert self.copies is not None
        copy = self.copies.parcels[index]
        return Copying(self.copies.write_parcel(copy, room, _NO_VERSION), self.parcels[index], copy)


class Copying:
    """The copy of a parcel on its way to the tier.

    It is a copy of the version that the parcel has now,
    even if the parcel is written again before `wait`.
    """

    __slots__ = ("_copy", "_transfer", "_version")

    def __init__(self, transfer: Transfer | None, parcel: Parcel, copy: Parcel) -> None:
        self._transfer = transfer
        self._version = parcel.version
        self._copy = copy

    def wait(self) -> None:
        """See `Transfer.wait`."""
        version, self._version = self._version, _NO_VERSION  # a transfer fails once only
        wait_all([self._transfer])
        self._copy.version = version


def _pieces(record: Record, parcel: Parcel, memory: Tensor) -> dict[int, Tensor]:
    """The pieces of a parcel in memory that have elements, flat, by their first byte."""
    found = {}
    for piece, begin in zip(parcel.pieces, parcel.offsets, strict=True):
        if piece.numel:
            dtype = record.forms[piece.parameter].dtype
            found[begin] = memory[begin : begin + piece.numel * dtype.itemsize].view(dtype)
    return found
