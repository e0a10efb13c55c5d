"""The tensors of one group that rest in another tier, in parcels (`parcels.py`). The way to their bytes:

    TierTensor       what modules hold: a tensor without memory; each operation on it opens the record
    Record           what of a group is in memory, on its way, or waits for a step; versions of parcels
    TierStorage      ranges of the tier, and the staging buffers through which they pass
    Transfer         requests under way, with the digests of their blocks
    IoBackend        io_uring or threads, which hand requests to the kernel

[Note: a step that waits] A streamed optimizer may leave parcels to be stepped later (`streamed/pipeline.py`). Everything else
that reads or writes the tier calls `settle` first, which takes that step.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress

import torch
from torch import Tensor

from zero_fn.errors import StorageError
from zero_fn.storage import TierStorage, Transfer, wait_all
from zero_fn.storage.pool import Landing
from zero_fn.tiers.parcels import Form, Parcel, parcels_of
from zero_fn.tiers.side_stream import side_stream
from zero_fn.values.tiers import Cpu

__all__ = ["Record", "Stretch"]

_NOTHING = torch.empty(0, dtype=torch.uint8)


class Record:
    """The tensors of a group in a tier.

    What reads, writes or waits raises `StorageError` if a disk fails, or does not hold what was written to it.
    """

    # A step that has to be taken before anything else reads or writes the record: a function, and its argument. [Note:
    # a step that waits]
    waited_for: tuple[Callable[[int], None], int] | None = None

    def __init__(self, shelf: TierStorage, forms: Sequence[Form], device: torch.device, place: int) -> None:
        """Lays tensors out in a range of a shelf that was reserved for them: `record_nbytes(forms)` bytes from `place` on."""
        # shelf, place: where they rest: the shelf, and their first byte on it.
        self.shelf, self.forms, self.device, self.place = shelf, list(forms), device, place
        # Whether the tier is memory of the host, which is used where it lies, without transfers.
        self.is_addressable = isinstance(shelf.tier, Cpu)
        self.owner: Callable[[], object] = lambda: None  # the unit of the tensors, weakly
        self.parcels = parcels_of(forms)
        self.nbytes = sum(parcel.nbytes for parcel in self.parcels)
        self.starts = [0] * len(forms)  # the first byte of each tensor
        self._parcels_of: list[list[Parcel]] = [[] for _ in forms]
        for parcel in self.parcels:
            for piece, offset in zip(parcel.pieces, parcel.offsets, strict=True):
                if not piece.start:
                    self.starts[piece.parameter] = parcel.start + offset
                self._parcels_of[piece.parameter].append(parcel)
        # Whence memory comes for all of it; None: that of the shelf. What modules see is then this memory itself.
        self.landing: Landing | None = None
        self.fetched: Stretch | None = None  # host memory with all tensors, or with all of them on their way there
        self.writing: Stretch | None = None  # host memory that is being written to the tier in the background
        # The end of the last copy from host memory of the record to the device; that memory must not change before.
        self.leaving: torch.Event | None = None

    def __del__(self) -> None:
        if self.leaving is not None:
            self.leaving.synchronize()
        for stretch in (self.fetched, self.writing):
            if stretch is not None:
                stretch.abandon(self)

    def settle(self) -> None:
        """Takes the step that waits for these tensors, if one does. [Note: a step that waits]"""
        if self.waited_for is not None:
            reach, index = self.waited_for
            reach(index)

    def rest_in(self, shelf: TierStorage, place: int, parcels: Sequence[Parcel]) -> None:
        """Takes note that the tensors rest elsewhere, one to a parcel, where nothing of what is in memory now counts."""
        self.drop()
        self.shelf, self.place, self.parcels, self.is_addressable = shelf, place, list(parcels), False
        self.nbytes = sum(parcel.nbytes for parcel in parcels)
        self._parcels_of = [[] for _ in self.forms]
        for parcel in parcels:
            (piece,), (offset,) = parcel.pieces, parcel.offsets
            self.starts[piece.parameter] = parcel.start + offset
            self._parcels_of[piece.parameter].append(parcel)

    # -- all of it ------------------------------------------------------------------------------------------------

    def fetch(self) -> None:
        """Begins to bring all tensors into host memory, unless they are there or on their way."""
        self.settle()
        if self.fetched is None:
            self.finish_writing()
            memory = self.landing.take(self.nbytes) if self.landing is not None else None
            stretch = Stretch(self, self.parcels, memory)
            try:
                stretch.read(self, self.parcels)
            except BaseException:  # of what is fetched every parcel is there, or is on its way
                stretch.close(self)
                raise
            self.fetched = stretch

    def arrive(self) -> Stretch:
        """Waits until all tensors are in host memory; fetches them if nobody has."""
        self.fetch()
        assert self.fetched is not None
        try:
            self.fetched.wait()
        except BaseException:  # after an interrupt, too: a transfer says once that it has failed
            self.drop()
            raise
        return self.fetched

    def values(self, number: int, last: int | None = None) -> Tensor:
        """A tensor that has arrived, flat, in host memory; or all from this one to `last`, with what lies between them."""
        assert self.fetched is not None, "not fetched"
        return self.fetched.tensor(self, number, last)

    def drop(self) -> None:
        """Gives up the fetched tensors."""
        fetched, self.fetched = self.fetched, None
        if fetched is not None:
            left = None
            if not self.is_addressable:  # the staging may be used again once the copy has ended
                left, self.leaving = self.leaving, None
            fetched.close(self, left)

    def write(self, values: Mapping[int, Tensor]) -> None:
        """Writes tensors, as `begin_writing` does, and waits."""
        self.begin_writing(values)
        self.finish_writing()

    def begin_writing(self, values: Mapping[int, Tensor]) -> None:
        """Begins to write some tensors from a copy of their values; the others stay as they are."""
        self.settle()
        self.finish_writing()
        self.drop()
        _stay(self)
        parcels = [p for p in self.parcels if any(piece.parameter in values for piece in p.pieces)]
        if not parcels:
            return
        stretch = Stretch(self, self.parcels)
        try:
            stretch.read(self, [p for p in parcels if any(piece.parameter not in values for piece in p.pieces)])
            stretch.wait()
        except BaseException:
            stretch.close(self)
            raise
        there = {number: value for number, value in values.items() if value.device.type != "cpu"}
        if there:
            rooms = [stretch.tensor(self, number) for number in there]
            sources = list(there.values())
            stretch.arriving = side_stream(sources[0].device).copy_all(rooms, sources)
        for number in values.keys() - there.keys():
            stretch.tensor(self, number).copy_(values[number])
        stretch.unwritten, self.writing = parcels, stretch
        if stretch.arriving is None:
            stretch.go_on(self)

    def finish_writing(self) -> None:
        """Waits for the writes of `begin_writing`."""
        writing, self.writing = self.writing, None
        if writing is not None:
            try:
                writing.go_on(self)
                writing.wait()
            finally:
                writing.close(self)

    # -- one tensor -----------------------------------------------------------------------------------------------

    @contextmanager
    def opened(self, number: int, *, is_written: bool, on_host: bool = False) -> Iterator[Tensor]:
        """Inside, one tensor is in memory, flat."""
        self.settle()
        self.finish_writing()
        _stay(self)
        stretch = Stretch(self, self._parcels_of[number])
        try:
            stretch.read(self, self._parcels_of[number])
            stretch.wait()
            room = stretch.tensor(self, number)
            flat = room if on_host else room.to(self.device)
            yield flat
            if is_written:
                if flat is not room:
                    room.copy_(flat)
                stretch.write(self, self._parcels_of[number])
                stretch.wait()
        finally:
            stretch.close(self)

    # -- one parcel -----------------------------------------------------------------------------------------------

    def memory_of(self, parcel: Parcel) -> Tensor:
        """The memory of a parcel of an addressable record, to be read and written in place."""
        self.finish_writing()
        _stay(self)
        return self.shelf.borrow(self.place + parcel.start, parcel.nbytes)

    def read_parcel(self, parcel: Parcel, memory: Tensor) -> Transfer | None:
        """Begins to read a parcel into memory of whole pages."""
        self.finish_writing()
        if not parcel.is_stored:
            memory.zero_()
            return None
        return self.shelf.read(self.place + parcel.start, memory)

    def write_parcel(self, parcel: Parcel, memory: Tensor, version: int | None = None) -> Transfer | None:
        """Begins to write a parcel. It has the given version from now on, or the next one."""
        self.drop()  # what was fetched ahead is out of date
        parcel.version = parcel.version + 1 if version is None else version
        writing = self.shelf.write(self.place + parcel.start, memory)
        parcel.is_stored = True
        return writing


class Stretch:
    """Consecutive parcels of a record in host memory: memory of the tier itself, or a staging buffer on the way to a disk.

    Its methods are given the record, which holds it: a reference back would be a cycle.
    """

    __slots__ = ("_start", "_transfers", "arriving", "memory", "unwritten")

    def __init__(self, record: Record, parcels: Sequence[Parcel], memory: Tensor | None = None) -> None:
        """Takes memory of the shelf, or `memory`."""
        self._start = parcels[0].start if parcels else 0
        nbytes = sum(parcel.nbytes for parcel in parcels)
        if memory is None:
            memory = record.shelf.borrow(record.place + self._start, nbytes) if nbytes else _NOTHING
        self.memory = memory
        self._transfers: list[Transfer] = []
        # The end of copies of gradients from the device into this memory; None if there are none.
        self.arriving: torch.Event | None = None
        self.unwritten: list[Parcel] = []  # the parcels to write once these have arrived

    def read(self, record: Record, parcels: Sequence[Parcel]) -> None:
        """Begins to read parcels."""
        self._begin(record.read_parcel, parcels)

    def write(self, record: Record, parcels: Sequence[Parcel]) -> None:
        """Begins to write parcels."""
        self._begin(record.write_parcel, parcels)

    def go_on(self, record: Record) -> None:
        """Waits for gradients on their way from the device, and begins to write them to the tier."""
        arriving, self.arriving = self.arriving, None
        if arriving is not None:
            arriving.synchronize()
        unwritten, self.unwritten = self.unwritten, []
        self.write(record, unwritten)

    def wait(self) -> None:
        """Waits for all transfers between this memory and the tier."""
        wait_all(self._transfers)
        self._transfers = []

    def tensor(self, record: Record, number: int, last: int | None = None) -> Tensor:
        """The memory of a tensor of the record, flat. See `Record.values`."""
        start, end = record.starts[number], number if last is None else last
        numel, dtype, *_ = record.forms[end]
        return self._part(start, record.starts[end] - start + numel * dtype.itemsize).view(dtype)

    def close(self, record: Record, left: torch.Event | None = None) -> None:
        """Waits for transfers, and gives the memory back. `left`: the end of a copy from it to the device."""
        with suppress(StorageError):
            self.wait()
        self.abandon(record, left)

    def abandon(self, record: Record, left: torch.Event | None = None) -> None:
        """Gives the memory back without waiting for transfers, as a finalizer must: whoever borrows it next waits."""
        if self.arriving is not None:
            self.arriving.synchronize()
        memory, self.memory = self.memory, _NOTHING
        record.shelf.give_back(memory, left)

    def _begin(self, move: Callable[[Parcel, Tensor], Transfer | None], parcels: Sequence[Parcel]) -> None:
        for parcel in parcels:
            transfer = move(parcel, self._part(parcel.start, parcel.nbytes))
            if transfer is not None:
                self._transfers.append(transfer)

    def _part(self, start: int, nbytes: int) -> Tensor:
        return self.memory[start - self._start : start - self._start + nbytes]


def _stay(record: Record) -> None:
    """Waits until no copy from the memory of a record to the device is under way: the memory is about to change."""
    leaving, record.leaving = record.leaving, None
    if leaving is not None:
        leaving.synchronize()
