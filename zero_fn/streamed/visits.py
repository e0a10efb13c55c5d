"""The way of an accelerator's parameters and gradients to their states on the host, and of parameters back.

    device    parameters, gradients  ---.                 .--->  parameters
    host                                 pinned, stepped -'      states

Chunk by chunk, through a ring of buffers and on streams of their own: while one chunk is stepped, the next ones come and the
last one leaves. What rests in a tier is on the host already, and does not visit.

Source: ZeRO-Offload, Ren et al. 2021, 4.1: states on the host, stepped there.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from zero_fn.resting import is_dense, local_of
from zero_fn.runtime.registry import slot_of
from zero_fn.runtime.side_stream import side_stream
from zero_fn.runtime.tier_tensor import TierTensor
from zero_fn.streamed.chunk import Chunk, Cut, contiguous_stride, padded_nbytes
from zero_fn.streamed.store import Ring
from zero_fn.tiers import is_accelerator

__all__ = ["Visits", "ring_of_visits", "sizes_of_visits"]

_NOTHING = torch.empty(0, dtype=torch.uint8)


def _visit_nbytes(chunk: Chunk, parameters: Sequence[Tensor]) -> int:
    """Bytes of a buffer through which what a chunk has on its device passes, if its states are on the host."""
    if not is_accelerator(chunk.device.type):
        return 0
    total = 0
    for cut in chunk.cuts:
        parameter = parameters[cut.piece.parameter]
        total += sum(_visiting(parameter)) * padded_nbytes(cut.piece.numel, parameter.dtype)
    return total


def _visiting(parameter: Tensor) -> tuple[bool, bool]:
    """Whether there is room for visits of a parameter, and of its gradient: if they do not rest in a tier."""
    slot = slot_of(parameter)
    return slot is None or not slot.kind.is_away, slot is None or not slot.kind.is_gradient_away


def sizes_of_visits(chunks: Iterable[Chunk], parameters: Sequence[Tensor]) -> list[int]:
    """Bytes of the buffers that chunks with states on the host need, of those that need any."""
    return [nbytes for nbytes in (_visit_nbytes(chunk, parameters) for chunk in chunks) if nbytes]


def ring_of_visits(chunks: Iterable[Chunk], parameters: Sequence[Tensor]) -> Ring:
    """Buffers for what visits.

    Raises:
        TierError: There is not so much memory.
    """
    sizes = sizes_of_visits((chunk for chunk in chunks if chunk.store.is_on_host), parameters)
    return Ring(len(sizes), max(sizes, default=0), "visits of parameters and gradients")


def _is_on_device(local: Tensor) -> bool:
    return not isinstance(local, TierTensor) and is_accelerator(local.device.type)


class Copied:
    """Copies that have ended once the last one has."""

    __slots__ = ("_end",)

    def __init__(self, end: torch.Event) -> None:
        self._end = end

    def wait(self) -> None:
        """Waits for them."""
        self._end.synchronize()


class Visit(NamedTuple):
    """One piece on the device, and its room on the host.

    Attributes:
        room: On the host, laid out alike if that is dense: copies the other way round need memory of their own, which is gone
            before an asynchronous one has ended.
        there: On the device.
    """

    room: Tensor
    there: Tensor


class Visits:
    """The lane of what visits."""

    def __init__(self, ring: Ring, known: Sequence[Tensor], grads: Mapping[int, Tensor]) -> None:
        """A lane for parameters, by their number, and the gradients of some."""
        self._ring, self._known, self._grads = ring, known, grads
        self._turn = 0
        self._laid: dict[int, Tensor] = {}

    def fetch(self, chunk: Chunk) -> tuple[Tensor, Copied | None]:
        nbytes = _visit_nbytes(chunk, self._known) if chunk.store.is_on_host else 0
        if not nbytes:
            return _NOTHING, None
        self._turn += 1
        memory, end = self._ring.buffer(self._turn, nbytes), None
        for visits in self.of(chunk, memory).values():
            for visit in visits:
                if visit is not None:
                    end = side_stream(visit.there.device).copy(visit.room, visit.there)
        return memory, Copied(end) if end is not None else None

    def keep(self, chunk: Chunk, memory: Tensor) -> Copied | None:
        end = None
        for value, _ in self.of(chunk, memory).values():
            if value is not None:
                end = side_stream(value.there.device).copy(value.there, value.room)
        return Copied(end) if end is not None else None

    def forget(self) -> None:
        """Nothing to do: what visits comes anew in every pass."""

    def of(self, chunk: Chunk, memory: Tensor) -> dict[Cut, tuple[Visit | None, Visit | None]]:
        """The parameter and the gradient of each piece that has one; None for those that do not visit."""
        found: dict[Cut, tuple[Visit | None, Visit | None]] = {}
        begin = 0
        for cut in chunk.cuts if memory.numel() else ():
            if cut.piece.parameter not in self._grads or not cut.piece.numel:
                continue
            parameter, grad = self._known[cut.piece.parameter], local_of(self._grads[cut.piece.parameter])
            comes, grad_comes = _visiting(parameter)
            comes = comes and _is_on_device(local_of(parameter))
            # One of a larger dtype than its parameter's has no room, nor one that was to be in a tier: the step copies it.
            grad_comes = grad_comes and _is_on_device(grad) and grad.itemsize <= parameter.itemsize
            visits: list[Visit | None] = []
            for there in (
                cut.of(local_of(parameter)) if comes else None,
                cut.of(self.gradient(cut)) if grad_comes else None,
            ):
                if there is None:
                    visits.append(None)
                    continue
                flat = memory[begin : begin + cut.piece.numel * there.itemsize].view(there.dtype)
                stride = there.stride() if is_dense(there) else contiguous_stride(there.shape)
                visits.append(Visit(flat.as_strided(there.shape, stride), there))
                begin += padded_nbytes(cut.piece.numel, parameter.dtype)
            found[cut] = visits[0], visits[1]
        return found

    def gradient(self, cut: Cut) -> Tensor:
        """The gradient of which a piece is cut, laid out as its parameter is."""
        number = cut.piece.parameter
        grad, local = local_of(self._grads[number]), local_of(self._known[number])
        if cut.piece.is_whole or grad.stride() == local.stride():
            return grad
        if number not in self._laid:  # the gradient lies in another order: once for all pieces
            laid = torch.empty_strided(local.shape, local.stride(), dtype=grad.dtype, device=grad.device)
            self._laid = {number: laid.copy_(grad)}
        return self._laid[number]
