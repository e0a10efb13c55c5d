"""Where the runtime rests a parameter and its gradient: in memory,
or in parcels of a record in another tier."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from zero_fn.runtime.group import Group
from zero_fn.runtime.slot import slot_of
from zero_fn.runtime.unit import unit_of
from zero_fn.tiers.compute_copies import ParameterRecord
from zero_fn.tiers.parcels import Parcel, planned_parcels
from zero_fn.tiers.record import Record
from zero_fn.tiers.tier_tensor import TierTensor
from zero_fn.values.dtensors import local_of
from zero_fn.values.tiers import Cpu

__all__ = ["RestsAt", "device_of", "follow", "groups_of", "passing_sizes", "place_of", "records_of"]


class RestsAt(NamedTuple):
    """The parcels in which a parameter rests in another tier; or its gradient,
    if the parameter itself is in memory."""

    # The record of the parcels; for a parameter on `meta` a key that stands for its future record.
    record: Hashable
    number: int  # the number of the tensor in the record
    parcels: Sequence[Parcel]


def place_of(parameter: Tensor) -> RestsAt | None:
    """The place of a parameter; None if it and its gradient are in memory.

    On `meta`, the place that it will get.
    """
    local, slot = local_of(parameter), slot_of(parameter)
    away = (
        local
        if isinstance(local, TierTensor)
        else slot.gradient_place
        if slot is not None
        else None
    )
    if away is not None:
        record = away.record
        return RestsAt(record, away.number, record.parcels)
    unit = unit_of(slot)
    what = next(slot.kind.shelved(), None) if slot is not None else None
    if slot is None or unit is None or what is None or not parameter.is_meta:
        return None
    group = unit.memory.group_of(slot)
    forms = dict(group.forms_away())[what]
    return RestsAt((group, what), group.slots.index(slot), planned_parcels(tuple(forms)))


def device_of(parameter: Tensor) -> torch.device:
    """The device that computes with a parameter; on `meta` the one that will,
    if a transform chose it."""
    slot, local = slot_of(parameter), local_of(parameter)
    if local.is_meta and slot is not None:
        return torch.device(slot.kind.device_type)
    return local.device


def follow(parameter: Tensor) -> None:
    """Gives a parameter that was moved or cast a place in its tier again."""
    unit = unit_of(slot_of(parameter))
    if unit is not None and unit.memory.records():
        unit.follow_moved()


def groups_of(parameters: Iterable[Tensor]) -> list[Group]:
    """The groups of the runtime to which any of these parameters belong."""
    pairs = ((slot, unit_of(slot)) for slot in map(slot_of, parameters))
    return list(
        dict.fromkeys(
            unit.memory.group_of(slot)
            for slot, unit in pairs
            if slot is not None and unit is not None
        )
    )


def passing_sizes(parameter: Tensor) -> list[int]:
    """Bytes that pass through a buffer for each parcel of the group of a parameter:
    parameters, their compute copies and gradients, where these are not in memory of the host;
    empty if all are."""
    away = [each for group in groups_of([parameter]) for each in group.forms_away()]
    rows = [planned_parcels(tuple(forms)) for (_, tier), forms in away if not isinstance(tier, Cpu)]
    return [sum(parcel.nbytes for parcel in parcels) for parcels in zip(*rows, strict=True)]


def records_of(tensors: Iterable[Tensor]) -> list[Record]:
    """The records in which parameters and gradients rest, with those of compute copies."""
    found: dict[Record, None] = {}
    for local in map(local_of, tensors):
        if isinstance(local, TierTensor):
            record = local.record
            found[record] = None
            if isinstance(record, ParameterRecord) and record.copies is not None:
                found[record.copies] = None
    return list(found)
