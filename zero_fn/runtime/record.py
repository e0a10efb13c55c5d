"""Tensors of one unit that rest in another tier, in parcels (`parcels.py`).

[Note: a step that waits] An optimizer may leave parcels to be stepped later (`streamed/pipeline.py`). Everything that brings
values from the tier or puts them there, but for the step itself, calls `settle` first.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress

import torch
from torch import Tensor

from zero_fn.errors import StorageError
from zero_fn.runtime.parcels import Form, Parcel, parcels_of, record_nbytes
from zero_fn.runtime.side_stream import Arriving
from zero_fn.runtime.tier_tensor import TierTensor
from zero_fn.storage import Shelf, Transfer, wait_all
from zero_fn.values.tiers import Cpu

__all__ = ["Form", "Parcel", "Record", "Stretch", "parcels_of", "record_nbytes", "record_of"]

_NOTHING = torch.empty(0, dtype=torch.uint8)


class Record:
    """The tensors of a unit in a tier.

    Attributes:
        shelf, place: Where they rest: on which shelf, and from which byte of it on.
        is_addressable: Whether that is memory of the host, which needs no transfers.
        forms: Elements and dtype of each.
        device: Where they are computed with.
        parcels, nbytes: Their parcels, in order, and the bytes of all.
        owner: Whose tensors they are, weakly.
        waited_for: A step that has to be taken before anything else reads or writes it, as a function and what to call it
            with. [Note: a step that waits]
        fetched: All of it in memory of the host, or on its way there.
        leaving: The last copy of its memory to the device: until it has ended, that memory stays as it is.
        writing: What is being written behind whoever gave it.
    """

    waited_for: tuple[Callable[[int], None], int] | None = None

    def __init__(self, shelf: Shelf, forms: Sequence[Form], device: torch.device, place: int) -> None:
        """Lays tensors out in a range that was reserved for them.

        Args:
            shelf: Where they rest.
            forms: Elements and dtype of each.
            device: Where they are computed with.
            place: The first byte of the range, `record_nbytes(forms)` long.
        """
        self.shelf, self.forms, self.device, self.place = shelf, list(forms), device, place
        self.is_addressable = isinstance(shelf.tier, Cpu)
        self.owner: Callable[[], object] = lambda: None
        self.parcels = parcels_of(forms)
        self.nbytes = sum(parcel.nbytes for parcel in self.parcels)
        self.starts = [0] * len(forms)  # the first byte of each tensor
        self._parcels_of: list[list[Parcel]] = [[] for _ in forms]
        for parcel in self.parcels:
            for piece, offset in zip(parcel.pieces, parcel.offsets, strict=True):
                if not piece.start:
                    self.starts[piece.parameter] = parcel.start + offset
                self._parcels_of[piece.parameter].append(parcel)
        self.fetched: Stretch | None = None
        self.writing: Stretch | None = None
        self.leaving: torch.Event | None = None

    def __del__(self) -> None:
        if self.leaving is not None:
            self.leaving.synchronize()
        for stretch in (self.fetched, self.writing):
            if stretch is not None:
                stretch.abandon(self)

    def tensor(self, number: int) -> TierTensor:
        """A tensor, flat."""
        return TierTensor(self, number, (self.forms[number].numel,), (1,))

    def settle(self) -> None:
        """Takes a step that waits for these tensors. [Note: a step that waits]

        Raises:
            StorageError: The disk failed.
        """
        if self.waited_for is not None:
            reach, index = self.waited_for
            reach(index)

    # -- all of it ------------------------------------------------------------------------------------------------

    def fetch(self) -> None:
        """Begins to bring everything into memory; nothing if it is there or on its way.

        Raises:
            StorageError: A step that waited for it failed.
        """
        self.settle()
        if self.fetched is None:
            self.finish_writing()
            self.fetched = Stretch(self, self.parcels)
            self.fetched.read(self, self.parcels)

    def arrive(self) -> Stretch:
        """Waits until everything is in memory; fetches it if nobody has.

        Raises:
            StorageError: The disk failed, or does not hold what was written to it. Nothing is in memory.
        """
        self.fetch()
        assert self.fetched is not None
        try:
            self.fetched.wait()
        except StorageError:
            self.drop()
            raise
        return self.fetched

    def values(self, number: int) -> Tensor:
        """A tensor that has arrived, flat, in memory of the host."""
        assert self.fetched is not None, "not fetched"
        return self.fetched.tensor(self, number)

    def drop(self) -> None:
        """Lets go of fetched memory."""
        fetched, self.fetched = self.fetched, None
        if fetched is not None:
            left = None
            if not self.is_addressable:  # memory for others, once it has left
                left, self.leaving = self.leaving, None
            fetched.close(self, left)

    def write(self, values: Mapping[int, Tensor]) -> None:
        """Writes tensors, as `begin_writing` and `finish_writing` do."""
        self.begin_writing(values)
        self.finish_writing()

    def begin_writing(self, values: Mapping[int, Tensor], computed: torch.dtype | None = None) -> None:
        """Begins to write tensors, given as they lie here, from memory of its own; the others stay as they are.

        Args:
            values: By number, on the host or the device. Those on the device may change once they are finished.
            computed: The dtype they were computed in, if that is known.

        Raises:
            StorageError: What was written before failed, or what is beside these tensors cannot be read.
        """
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
        for number, value in values.items():
            room = stretch.tensor(self, number)
            if value.device.type != "cpu":
                stretch.arriving.append(Arriving(room, value, computed or value.dtype))
            else:
                room.copy_(value)
        stretch.unwritten, self.writing = parcels, stretch
        if not stretch.arriving:
            stretch.go_on(self)

    def finish_writing(self) -> None:
        """Waits for what `begin_writing` began.

        Raises:
            StorageError: It failed.
        """
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
        """Inside, one tensor is in memory, flat.

        Args:
            number: The number of the tensor.
            is_written: Whether it is to be written back at the end.
            on_host: Whether it is to be in memory of the host, and not of the device.

        Raises:
            StorageError: The disk failed, or does not hold what was written to it.
        """
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
        """The memory of a parcel, if that is addressable, to be read and written."""
        self.finish_writing()
        _stay(self)
        return self.shelf.borrow(self.place + parcel.start, parcel.nbytes)

    def read_parcel(self, parcel: Parcel, memory: Tensor) -> Transfer | None:
        """Begins to fill memory, whole pages, with a parcel.

        Raises:
            StorageError: What was written before failed.
        """
        self.finish_writing()
        if not parcel.is_stored:
            memory.zero_()
            return None
        return self.shelf.read(self.place + parcel.start, memory)

    def write_parcel(self, parcel: Parcel, memory: Tensor, version: int | None = None) -> Transfer | None:
        """Begins to write a parcel, which counts as that version from now on, or as the next one."""
        self.drop()  # what was fetched ahead is out of date
        parcel.is_stored = True
        parcel.version = parcel.version + 1 if version is None else version
        return self.shelf.write(self.place + parcel.start, memory)


class Stretch:
    """Parcels of a record that follow one another, in memory of the host: that of the tier, or a staging on the way there.

    Attributes:
        arriving: What is on its way into this memory from the device.
        unwritten: The parcels that are to be written once it has arrived.
    """

    __slots__ = ("_memory", "_start", "_transfers", "arriving", "unwritten")

    def __init__(self, record: Record, parcels: Sequence[Parcel]) -> None:
        self._start = parcels[0].start if parcels else 0
        nbytes = sum(parcel.nbytes for parcel in parcels)
        self._memory = record.shelf.borrow(record.place + self._start, nbytes) if nbytes else _NOTHING
        self._transfers: list[Transfer] = []
        self.arriving: list[Arriving] = []
        self.unwritten: list[Parcel] = []

    def read(self, record: Record, parcels: Sequence[Parcel]) -> None:
        """Begins to read parcels."""
        self._begin(record.read_parcel, parcels)

    def write(self, record: Record, parcels: Sequence[Parcel]) -> None:
        """Begins to write parcels."""
        self._begin(record.write_parcel, parcels)

    def go_on(self, record: Record) -> None:
        """Waits for what is on its way from the device, and begins to write it.

        Raises:
            StorageError: The tier takes nothing.
        """
        arriving, self.arriving = self.arriving, []
        for each in arriving:
            each.finish()
        unwritten, self.unwritten = self.unwritten, []
        self.write(record, unwritten)

    def wait(self) -> None:
        """Waits for what is under way between this memory and the tier.

        Raises:
            StorageError: The disk failed.
        """
        wait_all(self._transfers)
        self._transfers = []

    def tensor(self, record: Record, number: int) -> Tensor:
        """A tensor of the record, flat."""
        numel, dtype, _ = record.forms[number]
        return self._part(record.starts[number], numel * dtype.itemsize).view(dtype)

    def close(self, record: Record, left: torch.Event | None = None) -> None:
        """Gives the memory back: to others, once a copy from it has left for the device."""
        with suppress(StorageError):
            self.wait()
        self.abandon(record, left)

    def abandon(self, record: Record, left: torch.Event | None = None) -> None:
        """Does the same in a finalizer, which cannot wait for a disk: whoever uses the memory next waits."""
        for each in self.arriving:
            each.finish()
        memory, self._memory = self._memory, _NOTHING
        record.shelf.give_back(memory, left, self._transfers)

    def _begin(self, move: Callable[[Parcel, Tensor], Transfer | None], parcels: Sequence[Parcel]) -> None:
        for parcel in parcels:
            transfer = move(parcel, self._part(parcel.start, parcel.nbytes))
            if transfer is not None:
                self._transfers.append(transfer)

    def _part(self, start: int, nbytes: int) -> Tensor:
        return self._memory[start - self._start : start - self._start + nbytes]


def _stay(record: Record) -> None:
    """Waits until nothing of the memory of a record is on its way to the device: it is about to change."""
    leaving, record.leaving = record.leaving, None
    if leaving is not None:
        leaving.synchronize()


def record_of(tensor: TierTensor) -> Record:
    """Where a tensor in a tier rests."""
    assert isinstance(tensor.record, Record)
    return tensor.record
