"""Tensors of one unit that rest in another tier as one range of bytes.

    parcels     |---- 0 ----|---- 1 ----|---- 2 ----|-- 3 --|        each begins on a page and is at most 4 MiB
    tensors     |a|-- b --|c|---------- d ----------|  d |e||        each contiguous, on a boundary of 64 bytes

[Note: a step that waits] An optimizer may leave parcels to be stepped later (`streamed/waiting.py`). Everything that brings
values from the tier or puts them there, but for the step itself, calls `settle` first.

A parcel is what is read and written as one, and has checksums of its own. So a unit is fetched as a whole for its forward,
a tensor alone for whoever asks for it, and a parcel at a time by a streamed optimizer, whose memory then does not depend on
the size of the unit. Large tensors are cut where vector instructions do not notice (`zero_fn.chunks`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from zero_fn.chunks import Piece, chunks_of
from zero_fn.errors import StorageError
from zero_fn.runtime.arriving import Arriving
from zero_fn.runtime.tier_tensor import TierTensor
from zero_fn.storage import Shelf, Transfer, wait_all, whole_pages
from zero_fn.tiers import Cpu, Tier

__all__ = ["PARCEL_NBYTES", "Form", "Parcel", "Record", "parcels_of", "record_nbytes", "record_of"]

PARCEL_NBYTES = 4 << 20
_ALIGNMENT_NBYTES = 64


class Form(NamedTuple):
    """A tensor of a record.

    Attributes:
        numel: Its elements.
        dtype: Their dtype.
        packed_as: The dtype by which parcels are cut; None is its own.
    """

    numel: int
    dtype: torch.dtype
    packed_as: torch.dtype | None = None


@dataclass(slots=True)
class Parcel:
    """Pieces of tensors that are read and written as one.

    Attributes:
        pieces: Which elements of which tensors.
        offsets: The first byte of each piece in the parcel.
        start: Its first byte in the record.
        nbytes: Its size, whole pages.
        is_stored: Whether the tier holds it: what was never written is taken to be zero.
        version: How often it was written; of a copy, the version of the original that it holds (`compute_copies.py`).
    """

    pieces: tuple[Piece, ...]
    offsets: tuple[int, ...]
    start: int
    nbytes: int
    is_stored: bool = False
    version: int = 0


def _padded(nbytes: int) -> int:
    return -(-nbytes // _ALIGNMENT_NBYTES) * _ALIGNMENT_NBYTES


def parcels_of(forms: Sequence[Form]) -> list[Parcel]:
    """The parcels that a record of such tensors is cut into."""
    packed = chunks_of(
        [form.numel for form in forms],
        [None] * len(forms),
        lambda number, numel: _padded(numel * (forms[number].packed_as or forms[number].dtype).itemsize),
        PARCEL_NBYTES,
    )
    parcels, start = [], 0
    for pieces in packed:
        offsets, end = [], 0
        for piece in pieces:
            offsets.append(end)
            end += _padded(piece.numel * forms[piece.parameter].dtype.itemsize)
        parcels.append(Parcel(pieces, tuple(offsets), start, whole_pages(end)))
        start += parcels[-1].nbytes
    return parcels


def record_nbytes(forms: Sequence[Form]) -> int:
    """Bytes that a record of such tensors takes, in whole pages."""
    return sum(parcel.nbytes for parcel in parcels_of(forms))


@dataclass(slots=True)
class _Behind:
    """What is being written behind whoever gave it.

    Attributes:
        memory: Of the whole record.
        parcels: Those that are still to be written.
        transfers: Of the others.
    """

    memory: Tensor
    parcels: list[Parcel] = field(default_factory=list)
    transfers: list[Transfer | None] = field(default_factory=list)


class Record:
    """The tensors of a unit in a tier.

    Attributes:
        device: Where they are computed with.
        parcels: Their parcels, in order.
        nbytes: Bytes of all parcels.
        owner: Whose tensors they are, weakly.
        waited_for: A step that has to be taken before anything else reads or writes it, as a function and what to call it
            with. [Note: a step that waits]
    """

    waited_for: tuple[Callable[[int], None], int] | None = None

    def __init__(self, shelf: Shelf, forms: Sequence[Form], device: torch.device, place: int) -> None:
        """Lays tensors out in a range that was reserved for them.

        Args:
            shelf: Where they rest.
            forms: Elements and dtype of each.
            device: Where they are computed with.
            place: Of the range, `record_nbytes(forms)` long.
        """
        self.shelf, self.device, self._place = shelf, device, place
        self.owner: Callable[[], object] = lambda: None
        self._forms = list(forms)
        self.parcels = parcels_of(forms)
        self.nbytes = sum(parcel.nbytes for parcel in self.parcels)
        self._offsets = [0] * len(self._forms)
        self._of: list[list[Parcel]] = [[] for _ in self._forms]
        for parcel in self.parcels:
            for piece, offset in zip(parcel.pieces, parcel.offsets, strict=True):
                if not piece.start:
                    self._offsets[piece.parameter] = parcel.start + offset
                self._of[piece.parameter].append(parcel)
        self._memory: Tensor | None = None  # of all of it, while it is fetched
        self._transfers: list[Transfer] = []
        self._behind: _Behind | None = None
        self._arriving: list[Arriving] = []  # in that memory
        self._leaving: torch.Event | None = None  # the last copy of its memory to the device
        self._is_held = False
        self._dirty: set[int] = set()  # parcels, by their start, that were changed in held memory

    def __del__(self) -> None:
        self._await_leaving()
        with suppress(StorageError):
            self.finish_writing()
        self.drop()

    @property
    def tier(self) -> Tier:
        """Where it rests."""
        return self.shelf.tier

    def is_for(self, tier: Tier, forms: Sequence[Form], device: torch.device) -> bool:
        """Whether it holds tensors of these forms in this tier."""
        return (self.tier, self._forms, self.device) == (tier, list(forms), device)

    def is_like(self, other: Record) -> bool:
        """Whether tensors of the same forms lie at the same places in both."""
        return self._forms == other._forms

    @property
    def count(self) -> int:
        """How many tensors it has."""
        return len(self._forms)

    def numel(self, number: int) -> int:
        """Elements of a tensor."""
        return self._forms[number].numel

    def dtype(self, number: int) -> torch.dtype:
        """Dtype of a tensor."""
        return self._forms[number].dtype

    def tensor(self, number: int) -> TierTensor:
        """A tensor, flat."""
        return TierTensor(self, number, (self.numel(number),), (1,))

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
        if self._memory is not None or not self.nbytes:
            return
        self.finish_writing()
        self._memory = memory = self.shelf.borrow(self._place, self.nbytes)
        self._transfers = list(self._reads(self.parcels, memory, 0))

    def arrive(self) -> None:
        """Waits until everything is in memory; fetches it if nobody has.

        Raises:
            StorageError: The disk failed, or does not hold what was written to it. Nothing is in memory.
        """
        self.fetch()
        try:
            while self._transfers:
                self._transfers[0].wait()
                self._transfers.pop(0)
        except StorageError:
            self.drop()
            raise

    def begin_writing(self, values: Mapping[int, Tensor], computed: Mapping[int, torch.dtype] | None = None) -> None:
        """Begins to write tensors, given as they lie here, from memory of its own; the others stay as they are.

        Args:
            values: By number, on the host or the device. Those on the device may change once they are finished.
            computed: The dtypes they were computed in, where that is known.

        Raises:
            StorageError: What was written before failed, or what is beside these tensors cannot be read.
        """
        self.settle()
        self.finish_writing()
        self.drop()
        self._await_leaving()
        parcels = [p for p in self.parcels if any(piece.parameter in values for piece in p.pieces)]
        if not parcels:
            return
        memory = self.shelf.borrow(self._place, self.nbytes)
        self._behind = behind = _Behind(memory)
        partly = [p for p in parcels if any(piece.parameter not in values for piece in p.pieces)]
        wait_all(list(self._reads(partly, memory, 0)))
        for number, value in values.items():
            place, dtype = self._view(memory, 0, number), (computed or {}).get(number, value.dtype)
            if value.device.type != "cpu":
                self._arriving.append(Arriving(place, value, dtype))
            else:
                place.copy_(value)
        behind.parcels = parcels
        if not self._arriving:
            self.continue_writing()

    def continue_writing(self) -> None:
        """Waits until what `begin_writing` was given on the device is on the host, and begins to write it.

        Raises:
            StorageError: The tier takes nothing.
        """
        arriving, self._arriving = self._arriving, []
        for each in arriving:
            each.finish()
        behind = self._behind
        while behind is not None and behind.parcels:
            parcel = behind.parcels.pop(0)
            part = behind.memory[parcel.start : parcel.start + parcel.nbytes]
            behind.transfers.append(self._written(parcel, part))

    def finish_writing(self) -> None:
        """Waits for what `begin_writing` began.

        Raises:
            StorageError: It failed.
        """
        if self._behind is None:
            return
        try:
            self.continue_writing()
        finally:
            behind, self._behind = self._behind, None
            try:
                wait_all(behind.transfers)
            finally:
                self.shelf.give_back(behind.memory)

    def values(self, number: int) -> Tensor:
        """A tensor that has arrived, flat, in memory of the host."""
        assert self._memory is not None or not self.nbytes, "not fetched"
        if self._memory is None:
            return torch.empty(0, dtype=self.dtype(number))
        return self._view(self._memory, 0, number)

    def drop(self) -> None:
        """Lets go of fetched memory."""
        for transfer in self._transfers:
            with suppress(StorageError):
                transfer.wait()
        self._transfers = []
        if self._memory is not None and self.is_addressable:
            self.shelf.give_back(self._memory)
        elif self._memory is not None:  # memory for others
            leaving, self._leaving = self._leaving, None
            self.shelf.give_back(self._memory, leaving)
        self._memory = None

    @contextmanager
    def held(self) -> Iterator[None]:
        """Inside, everything is in memory; what operations on its tensors change is written back at the end.

        Raises:
            StorageError: The disk failed.
        """
        self._await_leaving()
        self.arrive()
        self._is_held = True
        try:
            yield
            memory, transfers = self._memory, []
            for parcel in self.parcels:
                if parcel.start in self._dirty and memory is not None:
                    transfers.append(self._written(parcel, memory[parcel.start : parcel.start + parcel.nbytes]))
            wait_all(transfers)
        finally:
            self._is_held = False
            self._dirty.clear()
            self.drop()

    # -- one tensor -----------------------------------------------------------------------------------------------

    def open(self, number: int, *, on_host: bool = False) -> _Opened:
        """Brings one tensor into memory, for an operation.

        Args:
            number: Which.
            on_host: Of the host, and not of the device.

        Raises:
            StorageError: The disk failed, or does not hold what was written to it.
        """
        parcels = self._of[number]
        self.settle()
        self.finish_writing()
        self._await_leaving()
        if not self.numel(number):
            device = torch.device("cpu") if on_host else self.device
            return _Opened(self, number, None, 0, torch.empty(0, dtype=self.dtype(number), device=device))
        if self._is_held:
            assert self._memory is not None
            values = self._view(self._memory, 0, number)
            return _Opened(self, number, None, 0, values if on_host else values.to(self.device))
        start = parcels[0].start
        memory = self.shelf.borrow(self._place + start, sum(parcel.nbytes for parcel in parcels))
        try:
            wait_all(list(self._reads(parcels, memory, start)))
        except StorageError:
            self.shelf.give_back(memory)
            raise
        values = self._view(memory, start, number)
        return _Opened(self, number, memory, start, values if on_host else values.to(self.device))

    def put(self, number: int, memory: Tensor | None, start: int, flat: Tensor) -> None:
        """Writes a tensor back that `open` has brought."""
        parcels = self._of[number]
        if not self.numel(number):
            return
        if self._is_held:
            assert self._memory is not None
            memory, start = self._memory, 0
            self._dirty.update(parcel.start for parcel in parcels)
        assert memory is not None
        room = self._view(memory, start, number)
        if room.data_ptr() != flat.data_ptr():
            room.copy_(flat)
        if self._is_held:
            return
        self.drop()  # what was fetched ahead is out of date
        transfers = []
        for parcel in parcels:
            begin = parcel.start - start
            transfers.append(self._written(parcel, memory[begin : begin + parcel.nbytes]))
        wait_all(transfers)

    @property
    def is_addressable(self) -> bool:
        """Whether the tier is memory of the host, which needs no transfers."""
        return isinstance(self.tier, Cpu)

    def memory_of(self, parcel: Parcel) -> Tensor:
        """The memory of a parcel, if that is addressable, to be read and written."""
        self.finish_writing()
        self._await_leaving()
        return self.shelf.borrow(self._place + parcel.start, parcel.nbytes)

    # -- one parcel -----------------------------------------------------------------------------------------------

    def read_parcel(self, parcel: Parcel, memory: Tensor) -> Transfer | None:
        """Begins to fill memory, whole pages, with a parcel.

        Raises:
            StorageError: What was written before failed.
        """
        self.finish_writing()
        return self._read(parcel, memory)

    def write_parcel(self, parcel: Parcel, memory: Tensor) -> Transfer | None:
        """Begins to write a parcel."""
        self.drop()
        return self._written(parcel, memory)

    def put_parcel(self, parcel: Parcel, memory: Tensor) -> Transfer | None:
        """The same, of a parcel whose version the caller keeps and that is not fetched."""
        parcel.is_stored = True
        return self.shelf.write(self._place + parcel.start, memory)

    # -- bytes ----------------------------------------------------------------------------------------------------

    def note_leaving(self, copied: torch.Event) -> None:
        """What was fetched is on its way to the device: memory stays as it is until this copy has ended."""
        self._leaving = copied

    def _await_leaving(self) -> None:
        leaving, self._leaving = self._leaving, None
        if leaving is not None:
            leaving.synchronize()

    def _written(self, parcel: Parcel, memory: Tensor) -> Transfer | None:
        parcel.version += 1
        return self.put_parcel(parcel, memory)

    def _read(self, parcel: Parcel, memory: Tensor) -> Transfer | None:
        if not parcel.is_stored:
            memory.zero_()
            return None
        return self.shelf.read(self._place + parcel.start, memory)

    def _reads(self, parcels: Sequence[Parcel], memory: Tensor, start: int) -> Iterator[Transfer]:
        for parcel in parcels:
            begin = parcel.start - start
            transfer = self._read(parcel, memory[begin : begin + parcel.nbytes])
            if transfer is not None:
                yield transfer

    def _view(self, memory: Tensor, start: int, number: int) -> Tensor:
        numel, dtype, _ = self._forms[number]
        begin = self._offsets[number] - start
        return memory[begin : begin + numel * dtype.itemsize].view(dtype)


def record_of(tensor: TierTensor) -> Record:
    """Where a tensor in a tier rests."""
    assert isinstance(tensor.record, Record)
    return tensor.record


class _Opened:
    """One tensor in memory for an operation.

    Attributes:
        flat: Its elements.
    """

    __slots__ = ("_memory", "_number", "_record", "_start", "flat")

    def __init__(self, record: Record, number: int, memory: Tensor | None, start: int, flat: Tensor) -> None:
        self._record, self._number, self._memory, self._start, self.flat = record, number, memory, start, flat

    def put(self) -> None:
        """Writes it back."""
        self._record.put(self._number, self._memory, self._start, self.flat)

    def close(self) -> None:
        """Lets go of it."""
        if self._memory is not None:
            self._record.shelf.give_back(self._memory)
            self._memory = None
