"""Where the runtime rests a parameter and its gradient: in memory, or in parcels of a record in another tier."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from zero_fn.resting import local_of
from zero_fn.runtime.compute_copies import ParameterRecord
from zero_fn.runtime.record import Parcel, Record, parcels_of, record_of
from zero_fn.runtime.registry import slot_of
from zero_fn.runtime.tier_tensor import TierTensor
from zero_fn.runtime.unit import unit_of
from zero_fn.values.tiers import Tier

__all__ = ["KINDS", "RestsAt", "away_of", "device_of", "follow", "parcels_away", "place_of", "records_of"]

KINDS = ("parameters", "compute copies", "gradients")
"""What of a unit may rest in another tier, beside the states of optimizers."""


class RestsAt(NamedTuple):
    """Where a parameter rests, or, if that is in memory, its gradient: the parcels in which it is stepped.

    Attributes:
        record: What the parcels belong to: a record, or on `meta` what stands for it.
        number: Of the tensor in the record.
        parcels: Those of the record.
    """

    record: Hashable
    number: int
    parcels: Sequence[Parcel]


def place_of(parameter: Tensor) -> RestsAt | None:
    """The place of a parameter; None if it and its gradient are in memory. One on `meta` has the place that it will get."""
    away = away_of(parameter)
    if away is not None:
        record = record_of(away)
        return RestsAt(record, away.number, record.parcels)
    slot = slot_of(parameter)
    unit = unit_of(slot)
    what = next(slot.kind.shelved(), None) if slot is not None else None
    if slot is None or unit is None or what is None or not parameter.is_meta:
        return None
    group = unit.groups.of(slot)
    forms = dict(group.forms_away())[what]
    return RestsAt((group, what), group.slots.index(slot), parcels_of(forms))


def away_of(parameter: Tensor) -> TierTensor | None:
    """A parameter that rests in another tier, or the place of its gradient if only that does; None if neither does."""
    local, slot = local_of(parameter), slot_of(parameter)
    if isinstance(local, TierTensor):
        return local
    return slot.gradient_place if slot is not None else None


def device_of(parameter: Tensor) -> torch.device:
    """The device that computes with a parameter; of one on `meta`, if that is known, the one that will."""
    slot, local = slot_of(parameter), local_of(parameter)
    return torch.device(slot.kind.device_type) if local.is_meta and slot is not None else local.device


def follow(parameter: Tensor) -> None:
    """Lets the unit of a parameter that was moved or cast since give it a place in its tier again."""
    unit = unit_of(slot_of(parameter))
    if unit is not None and unit.groups.records():
        unit.follow_moved()


def parcels_away(parameters: Iterable[Tensor]) -> dict[str, list[tuple[Tier, Sequence[Parcel]]]]:
    """The parcels of groups that have any of these parameters, or their gradients, in another tier, by kind and group."""
    found: dict[str, list[tuple[Tier, Sequence[Parcel]]]] = {kind: [] for kind in KINDS}
    seen = set()
    for parameter in parameters:
        slot = slot_of(parameter)
        unit = unit_of(slot)
        if slot is None or unit is None:
            continue
        group = unit.groups.of(slot)
        for what in slot.kind.shelved():
            if (group, what) in seen:
                continue
            seen.add((group, what))
            (kind, tier), forms = what, dict(group.forms_away())
            found[kind].append((tier, parcels_of(forms[what])))
            copies = forms.get(("compute copies", tier))
            if kind == "parameters" and copies:
                found["compute copies"].append((tier, parcels_of(copies)))
    return found


def records_of(tensors: Iterable[Tensor]) -> list[Record]:
    """The records in which parameters and gradients rest, with those of compute copies."""
    found: dict[Record, None] = {}
    for local in map(local_of, tensors):
        if isinstance(local, TierTensor):
            record = record_of(local)
            found[record] = None
            if isinstance(record, ParameterRecord) and record.copies is not None:
                found[record.copies] = None
    return list(found)
