"""What a step of a chunk reads and writes beside states: parameters,
their compute copies, and gradients.

    in a tier          the parcel of the chunk, read and written back beside its states
    on an accelerator  copies on the host, where the states are: parameters and gradients come,
                       and parameters go back
    in memory          themselves

Parcels of a disk, and copies of what is on an accelerator, lie in one buffer of a ring: while one
chunk is stepped, the next ones come and the last one leaves.

Source: ZeRO-Offload, Ren et al. 2021, 4.1: states on the host, stepped there.
"""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from zero_fn.runtime.slot import slot_of
from zero_fn.storage import NOTHING, InMemory, StagingBuffers
from zero_fn.streamed.pieces import Chunk, ParameterPiece
from zero_fn.tiers.compute_copies import ParameterRecord
from zero_fn.tiers.parcels import padded_nbytes
from zero_fn.tiers.record import Record
from zero_fn.tiers.side_stream import side_stream
from zero_fn.tiers.tier_tensor import TierTensor, same_place
from zero_fn.values.dtensors import local_of
from zero_fn.values.strides import in_strides, is_dense
from zero_fn.values.tiers import is_accelerator

__all__ = ["Window", "Windows"]


class DeviceCopy:
    """A copy between the host and an accelerator, under way beside the computation."""

    __slots__ = ("_end",)

    def __init__(self, to: Tensor, source: Tensor) -> None:
        device = source.device if to.device.type == "cpu" else to.device
        self._end = side_stream(device).copy(to, source)

    def wait(self) -> None:
        """See `Transfer.wait`."""
        self._end.synchronize()


class Window(InMemory):
    """The parameters and gradients of one chunk while it is stepped."""

    def __init__(self, record: ParameterRecord | None, buffer: Tensor, parcels_nbytes: int) -> None:
        super().__init__(buffer)
        # Of each piece that has a gradient: in a parcel, as a copy on the host, or where it rests.
        self.values: dict[ParameterPiece, Tensor] = {}
        self.grads: dict[ParameterPiece, Tensor] = {}
        self.record = record
        # Copies of parameters that go back to an accelerator:
        # each parameter there, and its copy here.
        self.leaving: list[tuple[Tensor, Tensor]] = []
        self._for_parcels = buffer[:parcels_nbytes]
        self._for_copies = buffer[parcels_nbytes:]
        # parcel, copy: memory of their parcel, and of the parcel of their compute copies;
        # empty if there is none.
        self.parcel = self.copy = NOTHING

    def open(self, record: Record | None, index: int, *, is_read: bool = True) -> Tensor:
        """Memory of one parcel: in the tier if that is the host, else in the buffer,
        where it begins to arrive if wanted."""
        if record is None:
            return NOTHING
        parcel = record.parcels[index]
        if record.shelf.is_addressable:
            return record.memory_of(parcel)
        assert parcel.nbytes <= self._for_parcels.numel(), "more than was planned"
        memory = self._for_parcels[: parcel.nbytes]
        self._for_parcels = self._for_parcels[parcel.nbytes :]
        if is_read:
            self.transfers.append(record.read_parcel(parcel, memory))
        return memory

    def bring(self, there: Tensor) -> Tensor | None:
        """Begins to copy a tensor of an accelerator into the buffer;
        None if it is not on one, or has no room there.

        The copy is laid out alike if the tensor is dense. Copies the other way round need memory of
        their own, which is gone before an asynchronous one has ended.
        """
        left = self._for_copies.numel()
        if not left or isinstance(there, TierTensor) or not is_accelerator(there.device.type):
            return None
        nbytes = there.numel() * there.itemsize
        if not 0 < nbytes <= left:
            return None
        flat = self._for_copies[:nbytes].view(there.dtype)
        self._for_copies = self._for_copies[padded_nbytes(there.numel(), there.itemsize) :]
        copy = (
            flat.view(there.shape)
            if not is_dense(there)
            else flat.as_strided(there.shape, there.stride())
        )
        self.transfers.append(DeviceCopy(copy, there))
        return copy


class Windows:
    """Windows as a `ChunkSource`, for one pass."""

    def __init__(self, ring: StagingBuffers, grads: Mapping[int, Tensor]) -> None:
        self._ring = ring
        self._grads = grads
        self._turn = 0
        self._laid: dict[int, Tensor] = {}

    def fetch(self, chunk: Chunk) -> Window:
        buffer, nbytes = NOTHING, chunk.window_nbytes
        if nbytes:  # only these chunks take turns: there are no more buffers than such chunks
            self._turn += 1
            buffer = self._ring.buffer(self._turn, nbytes)
        window = Window(_parameter_record(chunk), buffer, chunk.parcels_nbytes)
        cuts = [cut for cut in chunk.cuts if id(cut.parameter) in self._grads]
        in_parcel: dict[ParameterPiece, Record] = {}
        grads, begins = NOTHING, dict[int, int]()
        if chunk.parcel is not None:
            window.parcel = window.open(window.record, chunk.parcel)
            window.copy = window.open(
                window.record and window.record.copies, chunk.parcel, is_read=False
            )
            in_parcel = {
                cut: record for cut in cuts if (record := self._gradient_record(cut)) is not None
            }
            gradients = next(iter(in_parcel.values()), None)
            grads = window.open(gradients, chunk.parcel)
            if gradients is not None:  # in another dtype than their parameters they begin elsewhere
                own = (window.record or gradients).parcels[chunk.parcel].offsets
                begins = dict(zip(own, gradients.parcels[chunk.parcel].offsets, strict=True))
        for cut in cuts:
            self._show_value(cut, window)
            if cut in in_parcel and cut.in_parcel is not None:
                window.grads[cut] = cut.at(grads, begins[cut.in_parcel], cut.gradient_dtype)
            else:
                self._show_grad(cut, window)
        return window

    def keep(self, chunk: Chunk, window: Window) -> InMemory:
        going = InMemory(window.memory)  # without the gradients, which may be dropped now
        if window.record is not None and chunk.parcel is not None:
            parcel = window.record.parcels[chunk.parcel]
            going.transfers.append(window.record.write_parcel(parcel, window.parcel))
            if window.copy.numel():
                going.transfers.append(window.record.write_copy(chunk.parcel, window.copy))
        going.transfers += (DeviceCopy(there, copy) for there, copy in window.leaving)
        return going

    def forget(self) -> None:
        """Nothing to do: a window is made anew in every pass."""

    def _show_value(self, cut: ParameterPiece, window: Window) -> None:
        if window.record is not None and cut.in_parcel is not None:
            window.values[cut] = cut.at(window.parcel, cut.in_parcel, cut.dtype)
            return
        value = cut.of(local_of(cut.parameter))
        copy = window.bring(value)
        window.values[cut] = value if copy is None else copy
        if copy is not None:
            window.leaving.append((value, copy))

    def _show_grad(self, cut: ParameterPiece, window: Window) -> None:
        grad = cut.of(self._laid_as_parameter(cut, local_of(self._grads[id(cut.parameter)])))
        # One in a larger dtype than its parameter would take the room of others:
        # the step copies it.
        copy = window.bring(grad) if grad.itemsize <= cut.gradient_dtype.itemsize else None
        window.grads[cut] = grad if copy is None else copy

    def _laid_as_parameter(self, cut: ParameterPiece, grad: Tensor) -> Tensor:
        key, local = id(cut.parameter), local_of(cut.parameter)
        if cut.piece.is_whole or grad.stride() == local.stride():
            return grad
        if key not in self._laid:  # the gradient lies in another order: once for all pieces
            self._laid = {key: in_strides(grad, local.stride())}
        return self._laid[key]

    def _gradient_record(self, cut: ParameterPiece) -> Record | None:
        """The record of a gradient that rests where its group rests gradients;
        any other one in a tier is read alone."""
        slot = slot_of(cut.parameter)
        place = slot.gradient_place if slot is not None and cut.in_parcel is not None else None
        is_there = place is not None and same_place(local_of(self._grads[id(cut.parameter)]), place)
        return place.record if place is not None and is_there else None


def _parameter_record(chunk: Chunk) -> ParameterRecord | None:
    """The record in which the parameters of a chunk rest, if that is in another tier."""
    local = local_of(chunk.cuts[0].parameter)
    record = local.record if isinstance(local, TierTensor) else None
    return record if isinstance(record, ParameterRecord) and chunk.parcel is not None else None
