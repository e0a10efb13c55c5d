"""Bytes that a step moves from and to other tiers, and between host and accelerator, from schedules and what units hold."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

from zero_fn.runtime.group import Group
from zero_fn.runtime.record import Parcel, parcels_of
from zero_fn.runtime.unit import Unit
from zero_fn.streamed import Link
from zero_fn.tiers import Tier, is_accelerator

__all__ = ["Moved", "add_units", "link_of_units"]


class Moved(NamedTuple):
    """Bytes per step, in whole pages.

    Attributes:
        read: From the tier.
        written: To it.
    """

    read: int
    written: int


def add_units(
    units: list[Unit], times_gathered: Mapping[int, int], read: Counter[Tier], written: Counter[Tier]
) -> None:
    """Adds what forward and backward move: parameters, or their compute copies, are read for each gather, gradients written
    once.

    Args:
        units: Of one step.
        times_gathered: How often each is gathered, by number.
        read, written: By tier.
    """
    for index, group in _groups(units):
        away = dict(group.forms_away())
        for (kind, tier), forms in away.items():
            parcels = parcels_of(forms)
            if kind != "gradients":
                if kind == "compute copies" or ("compute copies", tier) not in away:
                    read[tier] += times_gathered[index] * sum(parcel.nbytes for parcel in parcels)
                continue
            trained = [slot.parameter.requires_grad for slot in group.slots]
            for parcel in parcels:
                some = _trained_pieces(parcel, trained)
                written[tier] += parcel.nbytes if any(some) else 0
                read[tier] += parcel.nbytes if any(some) and not all(some) else 0  # what is beside them stays


def link_of_units(units: Sequence[Unit], times_gathered: Mapping[int, int]) -> Link:
    """What forward and backward move between the host and an accelerator: what comes from a tier passes the host, and so does
    what goes there. Gradients are counted as they rest, though those that a smaller dtype holds travel in it.

    Args:
        units: Of one step.
        times_gathered: How often each is gathered, by number.
    """
    there = back = 0
    for index, group in _groups(units):
        kind = group.kind
        if not is_accelerator(kind.device_type):
            continue
        has_copies = any(what == "compute copies" for (what, _), _ in group.forms_away())
        dtype = kind.compute_dtype if has_copies else kind.dtype
        for slot in group.slots:
            if kind.is_away:
                there += times_gathered[index] * slot.path.local_numel * dtype.itemsize
            if kind.is_gradient_away and slot.parameter.requires_grad:
                back += slot.path.local_numel * kind.dtype.itemsize
    return Link(there, back)


def _groups(units: Iterable[Unit]) -> Iterator[tuple[int, Group]]:
    """The groups of units, each with the number of its unit."""
    return ((unit.index, group) for unit in units for group in unit.groups)


def _trained_pieces(parcel: Parcel, trained: list[bool]) -> list[bool]:
    return [trained[piece.parameter] for piece in parcel.pieces]
