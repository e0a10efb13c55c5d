"""The tensors of one group that rest in another tier, in parcels (`parcels.py`).

The way to their bytes:

    TierTensor       what modules hold: a tensor without memory; each operation on
                     it opens the record
    Record           what of a group is in memory, on its way, or waits for a step;
                     versions of parcels
    Stretch          some of its parcels in memory, and the transfers under way there
    TierStorage      ranges of the tier, and the staging buffers through which they pass
    Transfer         requests under way, with the digests of their blocks
    IoBackend        io_uring or threads, which hand requests to the kernel

[Note: a step that waits] A streamed optimizer may leave parcels to be stepped later
(`streamed/pipeline.py`). Everything else that reads or writes the tier calls `settle` first, which
takes that step.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from zero_fn.storage import Stretch, TierStorage, Transfer
from zero_fn.storage.pool import Landing
from zero_fn.tiers.parcels import Form, Parcel, parcels_of
from zero_fn.tiers.side_stream import side_stream

__all__ = ["Record"]


class Record:
    """The tensors of a group in a tier.

    What reads, writes or waits raises `StorageError` if a disk fails,
    or does not hold what was written to it.
    """

    # A step that has to be taken before anything else reads or writes the record: a function, and
    # its argument. [Note: a step that waits]
    waited_for: tuple[Callable[[int], None], int] | None = None
    # Whence memory comes for all of it; None: that of the shelf. What modules see is then this
    # memory itself.
    landing: Landing | None = None
    fetched: Stretch | None = None  # all tensors, or all of them on their way
    writing: Stretch | None = None  # what is being written to the tier in the background
    # The end of the last copy from host memory of the record to the device; that memory must not
    # change before.
    leaving: torch.Event | None = None
    # The end of copies of gradients from the device into `writing`; None if there are none.
    _arriving: torch.Event | None = None

    def __init__(
        self, shelf: TierStorage, forms: Sequence[Form], device: torch.device, place: int
    ) -> None:
        """Lays tensors out in a range of a shelf that was reserved for them:
        `record_nbytes(forms)` bytes from `place` on."""
        self.forms = list(forms)
        self.device = device
        self.owner: Callable[[], object] = lambda: None  # the unit of the tensors, weakly
        self.starts = [0] * len(forms)  # the first byte of each tensor
        self._unwritten: list[Parcel] = []  # parcels of `writing` whose write has not begun
        self.rest_in(shelf, place, parcels_of(forms))

    def rest_in(self, shelf: TierStorage, place: int, parcels: Sequence[Parcel]) -> None:
        """Takes note where the tensors rest now: a shelf, their first byte on it, and parcels.

        Nothing of what is in memory counts any more.
        """
        self.drop()
        self.shelf = shelf
        self.place = place
        self.parcels = list(parcels)
        self.nbytes = sum(parcel.nbytes for parcel in parcels)
        self._parcels_of: list[list[Parcel]] = [[] for _ in self.forms]
        for parcel in parcels:
            for piece, offset in zip(parcel.pieces, parcel.offsets, strict=True):
                if not piece.start:
                    self.starts[piece.parameter] = parcel.start + offset
                self._parcels_of[piece.parameter].append(parcel)

    def __del__(self) -> None:
        for event in (self.leaving, self._arriving):
            if event is not None:
                event.synchronize()
        for stretch in (self.fetched, self.writing):
            if stretch is not None:
                stretch.abandon()

    def settle(self) -> None:
        """Takes the step that waits for these tensors, if one does. [Note: a step that waits]"""
        if self.waited_for is not None:
            reach, index = self.waited_for
            reach(index)

    def versions(self) -> list[int]:
        """The version of each parcel."""
        return [parcel.version for parcel in self.parcels]

    # -- all of it ---------------------------------------------------------------------------------

    def fetch(self) -> None:
        """Begins to bring all tensors into host memory, unless they are there or on their way."""
        self.settle()
        if self.fetched is None:
            self.finish_writing()
            memory = self.landing.take(self.nbytes) if self.landing is not None else None
            stretch = self._stretch(self.parcels, memory)
            try:
                self._begin(self.read_parcel, stretch, self.parcels)
            except BaseException:  # of what is fetched every parcel is there, or is on its way
                stretch.close()
                raise
            self.fetched = stretch

    def arrive(self) -> None:
        """Waits until all tensors are in host memory; fetches them if nobody has."""
        self.fetch()
        assert self.fetched is not None
        try:
            self.fetched.wait()
        except BaseException:  # after an interrupt, too: a transfer says once that it has failed
            self.drop()
            raise

    def values(self, number: int, last: int | None = None) -> Tensor:
        """A tensor that has arrived, flat, in host memory; or all from this one to `last`,
        with what lies between them."""
        assert self.fetched is not None, "not fetched"
        return self._tensor(self.fetched, number, last)

    def drop(self) -> None:
        """Gives up the fetched tensors."""
        fetched, self.fetched = self.fetched, None
        if fetched is not None:
            left = None
            # The staging may be used again once the copy has ended.
            if not self.shelf.is_addressable:
                left, self.leaving = self.leaving, None
            fetched.close(left)

    def write(self, values: Mapping[int, Tensor]) -> None:
        """Writes tensors, as `begin_writing` does, and waits."""
        self.begin_writing(values)
        self.finish_writing()

    def begin_writing(self, values: Mapping[int, Tensor]) -> None:
        """Begins to write some tensors from a copy of their values; the others stay as they are.

        A value that lies where the tensor rests is there already.
        """
        self.settle()
        self.finish_writing()
        self.drop()
        self._stay()
        parcels = [p for p in self.parcels if any(piece.parameter in values for piece in p.pieces)]
        if not parcels:
            return
        mixed = [p for p in parcels if any(piece.parameter not in values for piece in p.pieces)]
        there = {number: value for number, value in values.items() if value.device.type != "cpu"}
        stretch = self._stretch(self.parcels)
        try:
            self._begin(self.read_parcel, stretch, mixed)
            stretch.wait()
            for number in values.keys() - there.keys():
                room = self._tensor(stretch, number)
                if room.data_ptr() != values[number].data_ptr():  # else it was written in place
                    room.copy_(values[number])
            if there:
                rooms = [self._tensor(stretch, number) for number in there]
                sources = list(there.values())
                self._arriving = side_stream(sources[0].device).copy_all(rooms, sources)
        except BaseException:
            stretch.close()
            raise
        self._unwritten = parcels
        self.writing = stretch
        if not there:
            self.go_on()

    def go_on(self) -> None:
        """Waits for gradients on their way from the device, and begins to write them to the tier.

        What an interrupt leaves unwritten is written the next time.
        """
        if self._arriving is not None:
            self._arriving.synchronize()
            self._arriving = None
        try:
            while self.writing is not None and self._unwritten:
                self._begin(self.write_parcel, self.writing, self._unwritten[:1])
                del self._unwritten[0]
        except Exception:  # whoever wrote is told, and nobody tries again
            self._unwritten = []
            raise

    def finish_writing(self) -> None:
        """Waits for the writes of `begin_writing`."""
        if self.writing is not None:
            try:
                self.go_on()
                self.writing.wait()
            finally:
                if not self._unwritten:
                    writing, self.writing = self.writing, None
                    writing.close()

    # -- one tensor --------------------------------------------------------------------------------

    @contextmanager
    def opened(self, number: int, *, is_written: bool, on_host: bool = False) -> Iterator[Tensor]:
        """Inside, one tensor is in memory, flat."""
        self.settle()
        self.finish_writing()
        self._stay()
        parcels = self._parcels_of[number]
        stretch = self._stretch(parcels)
        try:
            self._begin(self.read_parcel, stretch, parcels)
            stretch.wait()
            room = self._tensor(stretch, number)
            flat = room if on_host else room.to(self.device)
            yield flat
            if is_written:
                if flat is not room:
                    room.copy_(flat)
                self._begin(self.write_parcel, stretch, parcels)
                stretch.wait()
        finally:
            stretch.close()

    # -- one parcel --------------------------------------------------------------------------------

    def memory_of(self, parcel: Parcel) -> Tensor:
        """The memory of a parcel of an addressable record, to be read and written in place."""
        self.finish_writing()
        self._stay()
        return self.shelf.borrow(self.place + parcel.start, parcel.nbytes)

    def read_parcel(self, parcel: Parcel, memory: Tensor) -> Transfer | None:
        """Begins to read a parcel into memory of whole pages."""
        self.finish_writing()
        if not parcel.is_stored:
            memory.zero_()
            return None
        return self.shelf.read(self.place + parcel.start, memory)

    def write_parcel(
        self, parcel: Parcel, memory: Tensor, version: int | None = None
    ) -> Transfer | None:
        """Begins to write a parcel. It has the given version from now on, or the next one."""
        self.drop()  # what was fetched ahead is out of date
        parcel.version = parcel.version + 1 if version is None else version
        writing = self.shelf.write(self.place + parcel.start, memory)
        parcel.is_stored = True
        return writing

    # -- some parcels in memory -------------------------------------------------------------------

    def _stretch(self, parcels: Sequence[Parcel], memory: Tensor | None = None) -> Stretch:
        """Memory for consecutive parcels: of the shelf, or `memory`."""
        start = parcels[0].start if parcels else 0
        return Stretch(self.shelf, self.place + start, sum(p.nbytes for p in parcels), memory)

    def _begin(
        self,
        move: Callable[[Parcel, Tensor], Transfer | None],
        stretch: Stretch,
        parcels: Sequence[Parcel],
    ) -> None:
        """Begins to read or write parcels."""
        for parcel in parcels:
            memory = stretch.part(self.place + parcel.start, parcel.nbytes)
            stretch.transfers.append(move(parcel, memory))

    def _tensor(self, stretch: Stretch, number: int, last: int | None = None) -> Tensor:
        """The memory of a tensor, flat. See `values`."""
        start, end = self.starts[number], number if last is None else last
        numel, dtype, *_ = self.forms[end]
        nbytes = self.starts[end] - start + numel * dtype.itemsize
        return stretch.part(self.place + start, nbytes).view(dtype)

    def _stay(self) -> None:
        """Waits until no copy from the memory to the device is under way: it is about to change."""
        leaving, self.leaving = self.leaving, None
        if leaving is not None:
            leaving.synchronize()
