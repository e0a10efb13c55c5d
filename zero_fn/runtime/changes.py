"""Values that a forward changes in its parameters: an embedding with `max_norm`, a clamp, a codebook with running means.

A plain module keeps what its forward changes in place. Gathered parameters are copies, which are freed, so this rank's part
of what was changed is written back to rest before. Nothing is communicated: ranks that change the same part alike have
changed the whole.

A change through `.data` leaves no trace in the tensor. It is looked for in the first forward of a unit, the second, the
fourth, the eighth and so on, and refused.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from zero_fn.errors import PlacementError
from zero_fn.resting import local_of
from zero_fn.runtime.kind import Lifetime
from zero_fn.runtime.uncompiled import uncompiled

if TYPE_CHECKING:
    from zero_fn.runtime.gathered import Gathered
    from zero_fn.runtime.slot import Slot
    from zero_fn.runtime.unit import Unit

__all__ = ["Changes", "Probe", "keep_whole", "require_untouched_casts"]


class Changes:
    """How often forwards and backwards have changed the gathered parameters of a unit in place.

    Attributes:
        are_none: Whether none ever did.
    """

    __slots__ = ("_by_place", "_forwards", "are_none")

    def __init__(self) -> None:
        self.are_none = True
        self._by_place: dict[tuple[int, int], tuple[int, int]] = {}  # by group and first element: end, times
        self._forwards = 0

    def before(self, group: int, element: int) -> int:
        """How often the parameter with this element of a group was changed so far, what runs now not counted."""
        places = self._by_place.items()
        return sum(times for (number, start), (end, times) in places if number == group and start <= element < end)

    @uncompiled
    def probe(self, unit: Unit) -> Probe | None:
        """What finds changes through `.data` in the forward that begins, if it is one of those that are looked at."""
        self._forwards += 1
        if self._forwards & (self._forwards - 1) or unit.gathered is None:
            return None
        return Probe(unit, unit.gathered) if unit.gathered.is_readable else None

    def keep(self, unit: Unit, tensors: Sequence[Tensor]) -> None:
        """Writes what was changed in gathered parameters back to rest. They are still gathered.

        Args:
            unit: Whose changes these are.
            tensors: Under the names of its parameters, as they were made when it was gathered.

        Raises:
            PlacementError: What was changed is a copy in another dtype.
        """
        if unit.swapped:  # by tensors of the user, which may count no changes
            times = [0 if number in unit.swapped else tensor._version for number, tensor in enumerate(tensors)]
        else:
            times = [tensor._version for tensor in tensors]
        if any(times):
            self._keep(unit, times)

    def _keep(self, unit: Unit, times: Sequence[int]) -> None:
        gathered = unit.gathered
        changed: dict[Slot, Tensor] = {}
        for number, slot in enumerate(unit.slots):
            if not times[number]:
                continue
            _require_same_dtype(slot)
            if not _is_copy(slot):
                continue
            assert gathered is not None, f"{unit} is at rest"
            key = gathered.place(slot)
            end = key[1] + slot.path.numel
            self._by_place[key] = (end, self._by_place.get(key, (end, 0))[1] + times[number])
            self.are_none = False
            slot.initial = None
            changed[slot] = gathered.whole(number)
            gathered.write_back_inner(slot)
        _write_back(unit, changed)


@uncompiled
def require_untouched_casts(unit: Unit, tensors: Sequence[Tensor]) -> None:
    """Refuses changes of copies in another dtype, which would be lost.

    Raises:
        PlacementError: A forward changed one.
    """
    for slot, tensor in zip(unit.slots, tensors, strict=True):
        if tensor._version:
            _require_same_dtype(slot)


def keep_whole(unit: Unit, wholes: Sequence[Tensor]) -> None:
    """Writes this rank's part of what was changed in whole parameters back to rest.

    Args:
        unit: Whose parameters stood whole under their names for a while.
        wholes: Those, which had version 0 when they began to.
    """
    _write_back(unit, {slot: whole for slot, whole in zip(unit.slots, wholes, strict=True) if whole._version})


def _write_back(unit: Unit, wholes: dict[Slot, Tensor]) -> None:
    if wholes:
        with torch.no_grad():
            unit.scatter_whole(wholes)


def _require_same_dtype(slot: Slot) -> None:
    if slot.kind.compute_dtype != slot.dtype:
        raise PlacementError(
            f"The forward changed {slot.fqn!r} in place, in its copy in {slot.kind.compute_dtype}.",
            parameter=slot,
            why="the copy is dropped, and the parameter would stay as it was",
            fix="change it between steps: with torch.no_grad(): parameter.clamp_(...); or leave this module out of "
            "zf.precision (where=)",
        )


class Probe:
    """What gathered parameters were when a forward began."""

    __slots__ = ("_before", "_gathered", "_unit")

    def __init__(self, unit: Unit, gathered: Gathered) -> None:
        self._unit, self._gathered = unit, gathered
        self._before = [
            (_sum_of_bits(whole) if _is_copy(slot) else 0, whole.data_ptr())
            for slot, whole in zip(unit.slots, self._wholes(), strict=True)
        ]

    @uncompiled
    def check(self, tensors: Sequence[Tensor]) -> None:
        """Looks at them again when it ends.

        Args:
            tensors: Under the names of the parameters.

        Raises:
            PlacementError: A parameter was changed through `.data`.
        """
        unit = self._unit
        if unit.gathered is not self._gathered:
            return
        for number, (slot, whole) in enumerate(zip(unit.slots, self._wholes(), strict=True)):
            if number in unit.swapped:
                continue
            digest, address = self._before[number]
            shown = tensors[number]
            is_changed = shown._version == 0 and _is_copy(slot) and _sum_of_bits(whole) != digest
            if is_changed or local_of(shown).data_ptr() != address:
                raise PlacementError(
                    f"The forward changed {slot.fqn!r} through `.data`.",
                    parameter=slot,
                    unit=unit.name or "root",
                    why="the values are a copy, and a change through `.data` leaves no trace in it: it would be lost",
                    fix="in the forward: with torch.no_grad(): parameter.copy_(values), or clamp_(), mul_(), ...",
                )

    def _wholes(self) -> list[Tensor]:
        return [self._gathered.whole(number) for number in range(len(self._unit.slots))]


def _sum_of_bits(whole: Tensor) -> int:
    """Of eight bytes at a time: sums of smaller integers would take memory for the larger ones they are added up in."""
    flat = whole.as_strided((whole.numel(),), (1,)).view(torch.uint8)  # parameters are dense
    start = -flat.storage_offset() % 8
    end = start + (flat.numel() - start) // 8 * 8
    if end <= start:
        return int(flat.sum(dtype=torch.int64).item())
    sums = (
        flat[start:end].view(torch.int64).sum(),
        flat[:start].sum(dtype=torch.int64),
        flat[end:].sum(dtype=torch.int64),
    )
    return int(torch.stack(sums).sum().item())


def _is_copy(slot: Slot) -> bool:
    """Whether the gathered parameter has other memory than the resting one, and is dropped after use."""
    return slot.kind.compute_dtype != slot.dtype or slot.kind.whole is Lifetime.USE
