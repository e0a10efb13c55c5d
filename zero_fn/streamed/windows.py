"""What a step of a chunk sees beside states: its parameters and gradients, and memory for their compute copies.

    in a tier          the parcel of the chunk, read and written back beside its states
    on an accelerator  copies on the host, where the states are: parameters and gradients come, and parameters go back
    in memory          themselves

Parcels of a disk and what comes from an accelerator pass through rings of buffers: while one chunk is stepped, the next ones
come and the last one leaves.

Source: ZeRO-Offload, Ren et al. 2021, 4.1: states on the host, stepped there.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from zero_fn.resting import is_dense, local_of
from zero_fn.runtime.compute_copies import ParameterRecord
from zero_fn.runtime.record import Record, record_of
from zero_fn.runtime.registry import slot_of
from zero_fn.runtime.side_stream import side_stream
from zero_fn.runtime.tier_tensor import TierTensor
from zero_fn.storage import Ring, Transfer, Waited
from zero_fn.streamed.pieces import Chunk, SteppedPiece, contiguous_stride, padded_nbytes
from zero_fn.streamed.pipeline import Transfers
from zero_fn.streamed.places import KINDS, away_of, parcels_away
from zero_fn.streamed.store import NOTHING, ring_of
from zero_fn.tiers import Cpu, is_accelerator

__all__ = ["PASSING", "Window", "Windows", "rings_for", "sizes_passing"]

PASSING = (*(f"{kind} from their tier" for kind in KINDS), "what is on the device")
"""What passes through buffers."""


def sizes_passing(chunks: Sequence[Chunk], parameters: Sequence[Tensor]) -> list[list[int]]:
    """Bytes that pass through buffers of each kind, by parcel or chunk."""
    away = parcels_away(parameters)
    found = [
        [parcel.nbytes for tier, parcels in away[kind] if not isinstance(tier, Cpu) for parcel in parcels]
        for kind in KINDS
    ]
    return [*found, [nbytes for chunk in chunks if (nbytes := _visit_nbytes(chunk, parameters))]]


def rings_for(chunks: Sequence[Chunk], parameters: Sequence[Tensor]) -> list[Ring]:
    """Buffers for each kind.

    Raises:
        TierError: There is not so much memory.
    """
    names = (*KINDS, "visits of parameters and gradients")
    return [ring_of(sizes, name) for sizes, name in zip(sizes_passing(chunks, parameters), names, strict=True)]


def _visit_nbytes(chunk: Chunk, parameters: Sequence[Tensor]) -> int:
    """Bytes of a buffer through which what a chunk has on its device passes, if its states are on the host."""
    if chunk.tier is None or not is_accelerator(chunk.device.type):
        return 0
    each = ((cut, parameters[cut.piece.parameter]) for cut in chunk.cuts)
    return sum(sum(_visiting(parameter)) * padded_nbytes(cut.piece.numel, parameter.dtype) for cut, parameter in each)


def _visiting(parameter: Tensor) -> tuple[bool, bool]:
    """Whether there is room for visits of a parameter, and of its gradient: if they do not rest in a tier."""
    slot = slot_of(parameter)
    return slot is None or not slot.kind.is_away, slot is None or not slot.kind.is_gradient_away


@dataclass(slots=True)
class Window:
    """What a step of one chunk reads and writes beside states.

    Attributes:
        values, grads: Of the pieces that have a gradient: in a parcel, in a buffer on the host, or where they rest.
        record: Of the parameters, if they rest in a tier.
        parcel, copy: Memory of their parcel, and for the parcel of their compute copies.
        leaving: What goes back to an accelerator: where it goes, and from where.
    """

    values: dict[SteppedPiece, Tensor] = field(default_factory=dict)
    grads: dict[SteppedPiece, Tensor] = field(default_factory=dict)
    record: ParameterRecord | None = None
    parcel: Tensor = NOTHING
    copy: Tensor = NOTHING
    leaving: list[tuple[Tensor, Tensor]] = field(default_factory=list)


class Windows:
    """The lane of windows."""

    def __init__(self, rings: Sequence[Ring], known: Sequence[Tensor], grads: Mapping[int, Tensor]) -> None:
        """A lane for one pass.

        Args:
            rings: Of `rings_for`.
            known: Parameters, by number.
            grads: Gradients, by the number of their parameter.
        """
        self._rings, self._known, self._grads = rings, known, grads
        self._turns: Counter[int] = Counter()
        self._laid: dict[int, Tensor] = {}

    def fetch(self, chunk: Chunk) -> tuple[Window, Transfers]:
        window, transfers, grads = Window(), list[Waited | None](), None
        window.record, of_gradients = self._record(chunk), self._record_of_gradients(chunk)
        if window.record is not None:
            window.parcel = self._parcel(0, window.record, chunk)
            transfers.append(_read(window.record, chunk, window.parcel))
            if window.record.copies is not None:
                window.copy = self._parcel(1, window.record.copies, chunk)
        if of_gradients is not None:
            grads = self._parcel(2, of_gradients, chunk)
            transfers.append(_read(of_gradients, chunk, grads))
        visits = _Visits(self._buffer(3, _visit_nbytes(chunk, self._known)))
        for cut in chunk.cuts:
            if cut.piece.parameter in self._grads:
                self._show_value(cut, window, visits)
                self._show_grad(cut, window, visits, grads)
        return window, [*transfers, visits.begun]

    def keep(self, chunk: Chunk, window: Window) -> Transfers:
        transfers: list[Waited | None] = []
        if window.record is not None and chunk.parcel is not None:
            transfers.append(window.record.write_parcel(window.record.parcels[chunk.parcel], window.parcel))
            if window.copy.numel():
                transfers.append(window.record.write_copy(chunk.parcel, window.copy))
        ends = [side_stream(there.device).copy(there, room) for there, room in window.leaving]
        return [*transfers, *map(_CopiedOut, ends[-1:])]  # they leave one after the other

    def forget(self) -> None:
        """Nothing to do: what a window shows comes anew in every pass."""

    def _show_value(self, cut: SteppedPiece, window: Window, visits: _Visits) -> None:
        parameter = self._known[cut.piece.parameter]
        if window.record is not None and cut.in_parcel is not None:
            window.values[cut] = cut.at(window.parcel, cut.in_parcel, parameter.dtype)
            return
        value = window.values[cut] = cut.of(local_of(parameter))
        if visits.takes(value) and _visiting(parameter)[0]:
            window.values[cut] = visits.bring(value, parameter.dtype)
            window.leaving.append((value, window.values[cut]))

    def _show_grad(self, cut: SteppedPiece, window: Window, visits: _Visits, grads: Tensor | None) -> None:
        parameter, grad = self._known[cut.piece.parameter], local_of(self._grads[cut.piece.parameter])
        if grads is not None and cut.in_parcel is not None and isinstance(grad, TierTensor):
            window.grads[cut] = cut.at(grads, cut.in_parcel, parameter.dtype)
            return
        grad = window.grads[cut] = cut.of(self._laid_as_parameter(cut, grad))
        # One of a larger dtype than its parameter's has no room, nor one that was to be in a tier: the step copies it.
        if visits.takes(grad) and _visiting(parameter)[1] and grad.itemsize <= parameter.itemsize:
            window.grads[cut] = visits.bring(grad, parameter.dtype)

    def _laid_as_parameter(self, cut: SteppedPiece, grad: Tensor) -> Tensor:
        number, local = cut.piece.parameter, local_of(self._known[cut.piece.parameter])
        if cut.piece.is_whole or grad.stride() == local.stride():
            return grad
        if number not in self._laid:  # the gradient lies in another order: once for all pieces
            laid = torch.empty_strided(local.shape, local.stride(), dtype=grad.dtype, device=grad.device)
            self._laid = {number: laid.copy_(grad)}
        return self._laid[number]

    def _record(self, chunk: Chunk) -> ParameterRecord | None:
        """Of the parameters of a chunk, if they rest in another tier."""
        local = local_of(self._known[chunk.cuts[0].piece.parameter])
        record = local.record if isinstance(local, TierTensor) else None
        return record if isinstance(record, ParameterRecord) and chunk.parcel is not None else None

    def _record_of_gradients(self, chunk: Chunk) -> Record | None:
        """Of the gradients of a chunk, if they rest in one tier, and there as their parameters do; others are read singly."""
        found: set[Record] = set()
        for cut in chunk.cuts if chunk.parcel is not None else ():
            number = cut.piece.parameter
            grad, place = local_of(self._grads[number]) if number in self._grads else None, away_of(self._known[number])
            if isinstance(grad, TierTensor):
                if place is None or grad.number != place.number or record_of(grad).forms != record_of(place).forms:
                    return None
                found.add(record_of(grad))
        return found.pop() if len(found) == 1 else None

    def _parcel(self, kind: int, record: Record, chunk: Chunk) -> Tensor:
        """Memory for the parcel of a chunk."""
        assert chunk.parcel is not None
        parcel = record.parcels[chunk.parcel]
        return record.memory_of(parcel) if record.is_addressable else self._buffer(kind, parcel.nbytes)

    def _buffer(self, kind: int, nbytes: int) -> Tensor:
        if not nbytes:
            return NOTHING  # it takes no turn: a ring has no more buffers than there are chunks that pass through it
        self._turns[kind] += 1
        return self._rings[kind].buffer(self._turns[kind], nbytes)


def _read(record: Record, chunk: Chunk, memory: Tensor) -> Transfer | None:
    assert chunk.parcel is not None
    return None if record.is_addressable else record.read_parcel(record.parcels[chunk.parcel], memory)


class _CopiedOut:
    """A copy between the host and an accelerator, under way."""

    __slots__ = ("_end",)

    def __init__(self, end: torch.Event) -> None:
        self._end = end

    def wait(self) -> None:
        """See `Transfer.wait`."""
        self._end.synchronize()


class _Visits:
    """What comes from an accelerator, in one buffer.

    Attributes:
        begun: The last copy; they come one after the other.
    """

    def __init__(self, memory: Tensor) -> None:
        self.begun: _CopiedOut | None = None
        self._memory, self._begin = memory, 0

    def takes(self, there: Tensor) -> bool:
        """Whether a tensor is to come."""
        is_on_device = not isinstance(there, TierTensor) and is_accelerator(there.device.type)
        return is_on_device and self._memory.numel() > 0 and there.numel() > 0

    def bring(self, there: Tensor, dtype: torch.dtype) -> Tensor:
        """Begins to copy a tensor into room for as many elements of a dtype.

        Returns:
            Where it will be: laid out alike if that is dense. Copies the other way round need memory of their own, which is
            gone before an asynchronous one has ended.
        """
        flat = self._memory[self._begin : self._begin + there.numel() * there.itemsize].view(there.dtype)
        self._begin += padded_nbytes(there.numel(), dtype)
        room = flat.as_strided(there.shape, there.stride() if is_dense(there) else contiguous_stride(there.shape))
        self.begun = _CopiedOut(side_stream(there.device).copy(room, there))
        return room
