"""The way of parameters and gradients that rest in another tier through a step: parcel by parcel, beside their states."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from zero_fn.resting import local_of
from zero_fn.runtime.compute_copies import ParameterRecord
from zero_fn.runtime.record import Parcel, Record, parcels_of, record_of
from zero_fn.runtime.registry import slot_of
from zero_fn.runtime.tier_tensor import TierTensor
from zero_fn.runtime.unit import unit_of
from zero_fn.storage import Transfer, Waited
from zero_fn.streamed.chunk import Chunk
from zero_fn.streamed.store import Ring
from zero_fn.tiers import Cpu, Tier

__all__ = [
    "KINDS",
    "Copies",
    "Gradients",
    "Place",
    "Values",
    "device_of",
    "follow",
    "is_in_tiers",
    "parcels_away",
    "place_of",
    "records_of",
    "rings_for",
]

KINDS = ("parameters", "compute copies", "gradients")
"""What of a unit may rest in another tier, beside the states of optimizers."""

_NOTHING = torch.empty(0, dtype=torch.uint8)


class Place(NamedTuple):
    """Where a parameter rests, or, if that is in memory, its gradient: the parcels in which it is stepped.

    Attributes:
        record: What the parcels belong to: a record, or on `meta` what stands for it.
        number: Of the tensor in the record.
        parcels: Those of the record.
        device: Where it is computed with.
    """

    record: Hashable
    number: int
    parcels: Sequence[Parcel]
    device: torch.device


def place_of(parameter: Tensor) -> Place | None:
    """The place of a parameter; None if it and its gradient are in memory. One on `meta` has the place that it will get."""
    away = _away(parameter)
    if away is not None:
        record = record_of(away)
        return Place(record, away.number, record.parcels, record.device)
    slot = slot_of(parameter)
    unit = unit_of(slot)
    what = next(slot.kind.shelved(), None) if slot is not None else None
    if slot is None or unit is None or what is None or not parameter.is_meta:
        return None
    group = unit.group_of(slot)
    forms = dict(group.forms_away())[what]
    return Place((group, what), group.slots.index(slot), parcels_of(forms), device_of(parameter))


def device_of(parameter: Tensor) -> torch.device:
    """The device that computes with a parameter; of one on `meta`, if that is known, the one that will."""
    slot, local = slot_of(parameter), local_of(parameter)
    return torch.device(slot.kind.device_type) if local.is_meta and slot is not None else local.device


def _away(parameter: Tensor) -> TierTensor | None:
    local = local_of(parameter)
    if isinstance(local, TierTensor):
        return local
    slot = slot_of(parameter)
    return slot.gradient_place if slot is not None else None


def follow(parameter: Tensor) -> None:
    """Lets the unit of a parameter that was moved or cast since give it a place in its tier again."""
    slot = slot_of(parameter)
    unit = unit_of(slot)
    if unit is not None and any(group.records() for group in unit.groups):
        unit.readopt()


def parcels_away(parameters: Iterable[Tensor]) -> dict[str, dict[Hashable, tuple[Tier, Sequence[Parcel]]]]:
    """The parcels of units that have any of these parameters, or their gradients, in another tier: by kind and unit."""
    found: dict[str, dict[Hashable, tuple[Tier, Sequence[Parcel]]]] = {kind: {} for kind in KINDS}
    for parameter in parameters:
        slot = slot_of(parameter)
        unit = unit_of(slot)
        if slot is None or unit is None:
            continue
        for what in slot.kind.shelved():
            kind, tier = what
            group = unit.group_of(slot)
            if group not in found[kind]:
                forms = dict(group.forms_away())
                found[kind][group] = tier, parcels_of(forms[what])
                copies = forms.get(("compute copies", tier))
                if kind == "parameters" and copies:
                    found["compute copies"][group] = tier, parcels_of(copies)
    return found


def rings_for(parameters: Iterable[Tensor]) -> list[Ring]:
    """Buffers for the parcels of each kind.

    Raises:
        TierError: There is not so much memory.
    """
    return [_ring(away.values(), kind) for kind, away in parcels_away(parameters).items()]


def _ring(records: Iterable[tuple[Tier, Sequence[Parcel]]], what: str) -> Ring:
    sizes = [parcel.nbytes for tier, parcels in records for parcel in parcels if not isinstance(tier, Cpu)]
    return Ring(len(sizes), max(sizes, default=0), what)


class _Parcels:
    """A lane of parcels. Chunks that have none come with nothing."""

    def __init__(self, ring: Ring, known: Sequence[Tensor]) -> None:
        self._ring, self._known = ring, known
        self._turn = 0

    def _fetched(self, record: Record, index: int) -> tuple[Tensor, Transfer | None]:
        parcel = record.parcels[index]
        if record.is_addressable:
            return record.memory_of(parcel), None
        memory = self._buffer(parcel)
        return memory, record.read_parcel(parcel, memory)

    def _buffer(self, parcel: Parcel) -> Tensor:
        self._turn += 1
        return self._ring.buffer(self._turn, parcel.nbytes)

    def _stepped(self, chunk: Chunk) -> tuple[ParameterRecord, int] | None:
        """The record of the parameters of a chunk, if they rest in another tier, and the number of their parcel in it."""
        local = local_of(self._known[chunk.cuts[0].piece.parameter])
        record = local.record if isinstance(local, TierTensor) else None
        return (record, chunk.parcel) if isinstance(record, ParameterRecord) and chunk.parcel is not None else None

    def forget(self) -> None:
        """Nothing to do: parcels are read anew in every pass."""


def records_of(chunk: Chunk, known: Sequence[Tensor], grads: Mapping[int, Tensor]) -> list[Record]:
    """The records that a step of a chunk reads and writes: of parameters, compute copies and gradients."""
    found: dict[Record, None] = {}
    for number in {cut.piece.parameter for cut in chunk.cuts}:
        for local in [local_of(known[number]), *([local_of(grads[number])] if number in grads else [])]:
            if isinstance(local, TierTensor):
                record = record_of(local)
                found[record] = None
                copies = record.copies if isinstance(record, ParameterRecord) else None
                found.update({copies: None} if copies is not None else {})
    return list(found)


def is_in_tiers(chunk: Chunk, known: Sequence[Tensor], grads: Mapping[int, Tensor]) -> bool:
    """Whether all that a step of a chunk reads and writes rests in tiers."""
    numbers = {cut.piece.parameter for cut in chunk.cuts} & grads.keys()
    locals_ = [local for number in numbers for local in (local_of(known[number]), local_of(grads[number]))]
    return all(isinstance(local, TierTensor) and local.moved is None for local in locals_)


class Values(_Parcels):
    """The lane of parameters that rest in another tier."""

    def fetch(self, chunk: Chunk) -> tuple[Tensor, Transfer | None]:
        stepped = self._stepped(chunk)
        return self._fetched(*stepped) if stepped is not None else (_NOTHING, None)

    def keep(self, chunk: Chunk, memory: Tensor) -> Waited | None:
        stepped = self._stepped(chunk)
        if stepped is None:
            return None
        record, index = stepped
        return record.write_parcel(record.parcels[index], memory)


class Copies(_Parcels):
    """The lane of compute copies of these parameters, which a step makes anew."""

    def fetch(self, chunk: Chunk) -> tuple[Tensor, Transfer | None]:
        stepped = self._stepped(chunk)
        copies = stepped[0].copies if stepped is not None else None
        if stepped is None or copies is None:
            return _NOTHING, None
        copy = copies.parcels[stepped[1]]
        return (copies.memory_of(copy) if copies.is_addressable else self._buffer(copy)), None

    def keep(self, chunk: Chunk, memory: Tensor) -> Waited | None:
        stepped = self._stepped(chunk)
        return stepped[0].write_copy(stepped[1], memory) if stepped is not None and memory.numel() else None

    def begin(self, chunk: Chunk, memory: Tensor) -> dict[int, Tensor]:
        """The room of each piece, flat, by the first byte of the piece in its parcel; none if there are no copies."""
        stepped = self._stepped(chunk)
        return stepped[0].begin_copy(stepped[1], memory) if stepped is not None and memory.numel() else {}

    def fill(self, chunk: Chunk, parcel: Tensor, rooms: Mapping[int, Tensor]) -> None:
        """Casts pieces of the parcel into their rooms."""
        stepped = self._stepped(chunk)
        if stepped is not None and rooms:
            stepped[0].fill_copy(stepped[1], parcel, rooms)


class Gradients(_Parcels):
    """The lane of gradients that rest in another tier, where they lie as their parameters do; others are read one by one."""

    def __init__(self, ring: Ring, known: Sequence[Tensor], grads: Mapping[int, Tensor]) -> None:
        """A lane for gradients, by the number of their parameter."""
        super().__init__(ring, known)
        self._grads = grads

    def fetch(self, chunk: Chunk) -> tuple[Tensor, Transfer | None]:
        if chunk.parcel is None:
            return _NOTHING, None
        found: set[Record] = set()
        for cut in chunk.cuts:
            number = cut.piece.parameter
            grad = local_of(self._grads[number]) if number in self._grads else None
            place = _away(self._known[number])
            if not isinstance(grad, TierTensor):
                continue
            if place is None or grad.number != place.number or not record_of(grad).is_like(record_of(place)):
                return _NOTHING, None
            found.add(record_of(grad))
        return self._fetched(found.pop(), chunk.parcel) if len(found) == 1 else (_NOTHING, None)

    def keep(self, chunk: Chunk, memory: Tensor) -> Transfer | None:
        return None
