"""Values that a forward changes in its parameters: an embedding with `max_norm`, a clamp, a codebook with running means.

A plain module keeps what its forward changes in place. Gathered parameters are copies, which are freed, so this rank's part
of what was changed is written back to rest before. Nothing is communicated: ranks that change the same part alike have
changed the whole.

A change through `.data` leaves no trace in the tensor. It is looked for in the first forward of a unit, the second, the
fourth, the eighth and so on, and refused.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

import torch
from torch import Tensor

from zero_fn.errors import PlacementError
from zero_fn.resting import local_of
from zero_fn.runtime.gathered import Gathered
from zero_fn.runtime.kind import Lifetime
from zero_fn.runtime.saved import Changes
from zero_fn.runtime.slot import Slot
from zero_fn.runtime.uncompiled import uncompiled

__all__ = ["Probe", "changed_in", "require_untouched_casts"]


def changed_in(
    gathered: Gathered | None, slots: Sequence[Slot], times: Sequence[int], changes: Changes
) -> dict[Slot, Tensor]:
    """What was changed in gathered parameters, and has to be written back to rest before they are freed.

    Args:
        gathered: The parameters of a unit, still gathered.
        slots: Its parameters.
        times: How often each was changed.
        changes: Takes note of them.

    Raises:
        PlacementError: What was changed is a copy in another dtype.
    """
    changed: dict[Slot, Tensor] = {}
    for number, slot in enumerate(slots):
        if not times[number]:
            continue
        _require_same_dtype(slot)
        if not _is_copy(slot):
            continue
        assert gathered is not None, "the unit is at rest"
        changes.note(gathered.place(slot), slot.path.numel, times[number])
        slot.initial = None
        changed[slot] = gathered.whole(number)
        gathered.write_back_inner(slot)
    return changed


@uncompiled
def require_untouched_casts(slots: Sequence[Slot], tensors: Sequence[Tensor]) -> None:
    """Refuses changes of copies in another dtype, which would be lost.

    Raises:
        PlacementError: A forward changed one.
    """
    for slot, tensor in zip(slots, tensors, strict=True):
        if tensor._version:
            _require_same_dtype(slot)


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

    __slots__ = ("_before", "_gathered", "_slots", "_unit")

    def __init__(self, unit: str, slots: Sequence[Slot], gathered: Gathered) -> None:
        self._unit, self._slots, self._gathered = unit, slots, gathered
        self._before = [
            (_sum_of_bits(whole) if _is_copy(slot) else 0, whole.data_ptr())
            for slot, whole in zip(slots, self._wholes(), strict=True)
        ]

    @uncompiled
    def check(self, gathered: Gathered | None, tensors: Sequence[Tensor], swapped: Collection[int]) -> None:
        """Looks at them again when it ends.

        Args:
            gathered: The memory of the unit now.
            tensors: Under the names of the parameters.
            swapped: Numbers of those that tensors of the user stand in for.

        Raises:
            PlacementError: A parameter was changed through `.data`.
        """
        if gathered is not self._gathered:
            return
        for number, (slot, whole) in enumerate(zip(self._slots, self._wholes(), strict=True)):
            if number in swapped:
                continue
            digest, address = self._before[number]
            shown = tensors[number]
            is_changed = shown._version == 0 and _is_copy(slot) and _sum_of_bits(whole) != digest
            if is_changed or local_of(shown).data_ptr() != address:
                raise PlacementError(
                    f"The forward changed {slot.fqn!r} through `.data`.",
                    parameter=slot,
                    unit=self._unit or "root",
                    why="the values are a copy, and a change through `.data` leaves no trace in it: it would be lost",
                    fix="in the forward: with torch.no_grad(): parameter.copy_(values), or clamp_(), mul_(), ...",
                )

    def _wholes(self) -> list[Tensor]:
        return [self._gathered.whole(number) for number in range(len(self._slots))]


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
