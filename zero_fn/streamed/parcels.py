"""The way of parameters that rest in another tier through a step: parcel by parcel, beside their states."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from zero_fn.resting import local_of
from zero_fn.runtime.record import Record
from zero_fn.runtime.registry import slot_of
from zero_fn.runtime.tier_tensor import TierTensor
from zero_fn.storage import Transfer
from zero_fn.streamed.chunk import Chunk
from zero_fn.streamed.store import Ring

__all__ = ["Parcels", "follow", "record_of", "ring_for"]

_NOTHING = torch.empty(0, dtype=torch.uint8)


def record_of(parameter: Tensor) -> Record | None:
    """Where a parameter rests, if that is in another tier."""
    local = local_of(parameter)
    return local.record if isinstance(local, TierTensor) else None


def follow(parameter: Tensor) -> None:
    """Lets the unit of a parameter that was moved or cast since give it a place in its tier again."""
    slot = slot_of(parameter)
    unit = slot.unit() if slot is not None and slot.unit is not None else None
    if unit is not None and unit.is_away:
        unit.readopt()


def ring_for(chunks: Iterable[Chunk], known: Sequence[Tensor]) -> Ring:
    """Buffers for the parcels of these chunks.

    Raises:
        TierError: There is not so much memory.
    """
    sizes = []
    for chunk in chunks:
        record = record_of(known[chunk.cuts[0].piece.parameter]) if chunk.parcel is not None else None
        if record is not None and chunk.parcel is not None and not record.is_addressable:
            sizes.append(record.parcels[chunk.parcel].nbytes)
    return Ring(len(sizes), max(sizes, default=0), "parameters")


class Parcels:
    """The lane of parcels. Chunks of parameters in memory have none."""

    def __init__(self, ring: Ring, known: Sequence[Tensor]) -> None:
        self._ring, self._known = ring, known
        self._turn = 0

    def fetch(self, chunk: Chunk) -> tuple[Tensor, Transfer | None]:
        if chunk.parcel is None:
            return _NOTHING, None
        record = self._record(chunk)
        parcel = record.parcels[chunk.parcel]
        if record.is_addressable:
            return record.memory_of(parcel), None
        memory = self._ring.buffer(self._turn, parcel.nbytes)
        self._turn += 1
        return memory, record.read_parcel(parcel, memory)

    def keep(self, chunk: Chunk, memory: Tensor) -> Transfer | None:
        if chunk.parcel is None:
            return None
        record = self._record(chunk)
        return record.write_parcel(record.parcels[chunk.parcel], memory)

    def _record(self, chunk: Chunk) -> Record:
        record = record_of(self._known[chunk.cuts[0].piece.parameter])
        assert record is not None, "a parameter came back from its tier"
        return record
