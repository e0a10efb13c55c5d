"""The parameters and gradients that a step of a chunk computes with, and memory for their compute copies.

    in a tier          the parcel of the chunk, read and written back beside its states
    on an accelerator  copies on the host, where the states are: parameters and gradients come, and parameters go back
    in memory          themselves

Parcels of a disk and what comes from an accelerator lie in a buffer of a ring: while one chunk is stepped, the next ones come
and the last one leaves.

Source: ZeRO-Offload, Ren et al. 2021, 4.1: states on the host, stepped there.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from zero_fn.resting import is_dense, local_of
from zero_fn.runtime.compute_copies import ParameterRecord
from zero_fn.runtime.record import Record, record_of
from zero_fn.runtime.side_stream import side_stream
from zero_fn.runtime.tier_tensor import TierTensor
from zero_fn.storage import NOTHING, Ring, Waited
from zero_fn.streamed.pieces import Chunk, SteppedPiece
from zero_fn.streamed.pipeline import Transfers
from zero_fn.streamed.places import away_of
from zero_fn.values.tiers import is_accelerator

__all__ = ["Window", "Windows"]


class Visit:
    """One way of a visit: a copy between the host and an accelerator, under way beside the computation."""

    __slots__ = ("_end",)

    def __init__(self, to: Tensor, source: Tensor) -> None:
        device = source.device if to.device.type == "cpu" else to.device
        self._end = side_stream(device).copy(to, source)

    def wait(self) -> None:
        """See `Transfer.wait`."""
        self._end.synchronize()


@dataclass(slots=True)
class Window:
    """What a step of one chunk reads and writes beside states.

    Attributes:
        values, grads: Of the pieces that have a gradient: in a parcel, in a buffer on the host, or where they rest.
        record: The record of the parameters, if they rest in a tier.
        parcel, copy, of_grads: Memory of their parcel, for the parcel of their compute copies, and of that of gradients.
        visits: Memory for what comes from an accelerator.
        arriving: What is on its way into all this.
        leaving: What goes back to an accelerator: where it goes, and from where.
    """

    values: dict[SteppedPiece, Tensor] = field(default_factory=dict)
    grads: dict[SteppedPiece, Tensor] = field(default_factory=dict)
    record: ParameterRecord | None = None
    parcel: Tensor = NOTHING
    copy: Tensor = NOTHING
    of_grads: Tensor = NOTHING
    visits: Tensor = NOTHING
    arriving: list[Waited | None] = field(default_factory=list)
    leaving: list[tuple[Tensor, Tensor]] = field(default_factory=list)

    def bring(self, there: Tensor, begin: int | None) -> Tensor | None:
        """Begins to copy a tensor of an accelerator into the room for its visit; None if it is to stay where it is.

        The room is laid out alike if the tensor is dense. Copies the other way round need memory of their own, which is gone
        before an asynchronous one has ended.
        """
        is_on_device = not isinstance(there, TierTensor) and is_accelerator(there.device.type)
        if begin is None or not is_on_device or not self.visits.numel() or not there.numel():
            return None
        flat = self.visits[begin : begin + there.numel() * there.itemsize].view(there.dtype)
        room = flat.view(there.shape) if not is_dense(there) else flat.as_strided(there.shape, there.stride())
        self.arriving.append(Visit(room, there))
        return room


class Windows:
    """The lane of windows."""

    def __init__(self, ring: Ring, grads: Mapping[int, Tensor]) -> None:
        """A lane for one pass, with buffers of `Chunk.window_nbytes`, and gradients by the identity of their parameter."""
        self._ring, self._grads = ring, grads
        self._turn = 0
        self._laid: dict[int, Tensor] = {}

    def fetch(self, chunk: Chunk) -> tuple[Window, Transfers]:
        window, of_gradients = Window(record=self._record(chunk)), self._record_of_gradients(chunk)
        records = [window.record, window.record.copies if window.record is not None else None, of_gradients]
        sizes = [_passing_nbytes(record, chunk) for record in records]
        *parts, window.visits = torch.split(
            self._buffer(sum(sizes) + chunk.visits_nbytes), [*sizes, chunk.visits_nbytes]
        )
        for at, record in enumerate(records):
            if record is not None and chunk.parcel is not None:
                parcel = record.parcels[chunk.parcel]
                if record.is_addressable:
                    parts[at] = record.memory_of(parcel)
                elif record is not records[1]:  # a copy is written only
                    window.arriving.append(record.read_parcel(parcel, parts[at]))
        window.parcel, window.copy, window.of_grads = parts
        for cut in chunk.cuts:
            if id(cut.parameter) in self._grads:
                self._show_value(cut, window)
                self._show_grad(cut, window, is_in_parcel=of_gradients is not None)
        return window, window.arriving

    def keep(self, chunk: Chunk, window: Window) -> Transfers:
        transfers: list[Waited | None] = []
        if window.record is not None and chunk.parcel is not None:
            transfers.append(window.record.write_parcel(window.record.parcels[chunk.parcel], window.parcel))
            if window.copy.numel():
                transfers.append(window.record.write_copy(chunk.parcel, window.copy))
        return [*transfers, *(Visit(there, room) for there, room in window.leaving)]

    def forget(self) -> None:
        """Nothing to do: what a window shows comes anew in every pass."""

    def _show_value(self, cut: SteppedPiece, window: Window) -> None:
        if window.record is not None and cut.in_parcel is not None:
            window.values[cut] = cut.at(window.parcel, cut.in_parcel, cut.dtype)
            return
        value = cut.of(local_of(cut.parameter))
        room = window.bring(value, cut.visits[0])
        window.values[cut] = value if room is None else room
        if room is not None:
            window.leaving.append((value, room))

    def _show_grad(self, cut: SteppedPiece, window: Window, *, is_in_parcel: bool) -> None:
        grad = local_of(self._grads[id(cut.parameter)])
        if is_in_parcel and cut.in_parcel is not None and isinstance(grad, TierTensor):
            window.grads[cut] = cut.at(window.of_grads, cut.in_parcel, cut.dtype)
            return
        grad = cut.of(self._laid_as_parameter(cut, grad))
        # One of a larger dtype than its parameter's has no room, nor one that was to be in a tier: the step copies it.
        room = window.bring(grad, cut.visits[1]) if grad.itemsize <= cut.dtype.itemsize else None
        window.grads[cut] = grad if room is None else room

    def _laid_as_parameter(self, cut: SteppedPiece, grad: Tensor) -> Tensor:
        key, local = id(cut.parameter), local_of(cut.parameter)
        if cut.piece.is_whole or grad.stride() == local.stride():
            return grad
        if key not in self._laid:  # the gradient lies in another order: once for all pieces
            laid = torch.empty_strided(local.shape, local.stride(), dtype=grad.dtype, device=grad.device)
            self._laid = {key: laid.copy_(grad)}
        return self._laid[key]

    def _record(self, chunk: Chunk) -> ParameterRecord | None:
        """The record of the parameters of a chunk, if they rest in another tier."""
        local = local_of(chunk.cuts[0].parameter)
        record = local.record if isinstance(local, TierTensor) else None
        return record if isinstance(record, ParameterRecord) and chunk.parcel is not None else None

    def _record_of_gradients(self, chunk: Chunk) -> Record | None:
        """Of the gradients of a chunk, if they rest in one tier, and there as their parameters do; others are read singly."""
        found: set[Record] = set()
        for cut in chunk.cuts if chunk.parcel is not None else ():
            grad = self._grads.get(id(cut.parameter))
            grad = local_of(grad) if grad is not None else None
            place = away_of(cut.parameter)
            if isinstance(grad, TierTensor):
                if place is None or grad.number != place.number or record_of(grad).forms != record_of(place).forms:
                    return None
                found.add(record_of(grad))
        return found.pop() if len(found) == 1 else None

    def _buffer(self, nbytes: int) -> Tensor:
        if not nbytes:
            return NOTHING  # it takes no turn: a ring has no more buffers than there are chunks that pass through it
        assert nbytes <= self._ring.size, "more than was planned"
        self._turn += 1
        return self._ring.buffer(self._turn, nbytes)


def _passing_nbytes(record: Record | None, chunk: Chunk) -> int:
    """Bytes of a buffer that the parcel of a chunk takes."""
    if record is None or record.is_addressable or chunk.parcel is None:
        return 0
    return record.parcels[chunk.parcel].nbytes
