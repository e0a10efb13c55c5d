"""What of a module rests in other tiers: shelves for parameters and gradients, and gradients on their way there."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from zero_fn.assignment import Assignment
from zero_fn.errors import StorageError
from zero_fn.resting import local_of, on_spec
from zero_fn.runtime.everywhere import tell
from zero_fn.runtime.gradients import settle
from zero_fn.runtime.pending_gradient import PendingGradient
from zero_fn.runtime.record import Form, Record, record_nbytes, record_of
from zero_fn.runtime.tier_tensor import TierTensor
from zero_fn.storage import Shelf, shelf_of, stagings_for
from zero_fn.tiers import Tier
from zero_fn.transport.links import Links

if TYPE_CHECKING:
    from zero_fn.runtime.slot import Slot
    from zero_fn.runtime.unit import Unit

__all__ = ["Away", "Shelved"]

Shelved = tuple[str, Tier]
"""What rests in a tier: "parameters", their "compute copies", or "gradients"."""


class Away:
    """The shelves of one transformed module, and its gradients that are being written.

    A disk that fails during a backward is remembered until all ranks are told, at its end.
    """

    def __init__(self, transport: Links, assignment: Assignment) -> None:
        self._transport, self._assignment = transport, assignment
        self._shelves: dict[Shelved, Shelf] = {}
        self._reserved: dict[Shelved, list[int]] = {}
        self._writing: deque[Record] = deque()
        self._failure: StorageError | None = None

    def shelf(self, what: Shelved) -> Shelf:
        """Where parameters or gradients of the module rest in a tier.

        Raises:
            StorageError: The path takes no files.
        """
        if what not in self._shelves:
            kind, tier = what
            self._shelves[what] = shelf_of(tier, kind)
        return self._shelves[what]

    def shelves(self) -> list[tuple[str, Shelf]]:
        """All of them, with what they hold."""
        return [(kind, shelf) for (kind, _), shelf in self._shelves.items()]

    def reserve(self, records: dict[Shelved, list[list[Form]]], device: torch.device) -> None:
        """Makes room for records that will be laid out, in this order, for a device.

        Raises:
            TierError: A tier, or the memory for stagings, is too small.
            StorageError: The path takes no files.
        """
        for what, forms in records.items():
            sizes = [record_nbytes(each) for each in forms]
            self._reserved[what] = self.shelf(what).reserve(sizes)
            self.shelf(what).stage(max(sizes), device)

    def place_for(self, what: Shelved, forms: list[Form], device: torch.device) -> int:
        """The place of the next record: one that was reserved, or another."""
        nbytes, reserved = record_nbytes(forms), self._reserved.get(what)
        self.shelf(what).stage(nbytes, device)
        return reserved.pop(0) if reserved else self.shelf(what).reserve([nbytes])[0]

    def settle(self, slot: Slot, grad: Tensor) -> None:
        """Makes `grad` the gradient of a parameter, or adds it to the one there is, which may be in its tier."""
        try:
            settle(slot, grad)
        except StorageError as error:
            self._failure = self._failure or error

    def put_gradients(self, unit: Unit) -> None:
        """Begins to write gradients that rest in another tier, a unit for each staging: on an accelerator those of one unit
        come to the host while those of the one before are written."""
        if all(group.gradient_record is None for group in unit.groups):
            return
        for record, (values, computed) in _take_gradients(unit).items():
            with self._failing_at_the_end():
                for other in self._writing:
                    other.continue_writing()
                self._finish_writing(down_to=stagings_for(record.device.type) - 1)
                self._writing.append(record)
                record.begin_writing(values, computed)

    def finish_gradients(self, units: list[Unit]) -> None:
        """Waits until gradients are in their tier.

        Raises:
            StorageError: On every rank, if that failed on any.
        """
        if all(group.gradient_record is None for unit in units for group in unit.groups):
            return
        with self._failing_at_the_end():
            self._finish_writing()
        self._writing.clear()
        failure, self._failure = self._failure, None
        found = tell(self._transport, failure, "Writing gradients").failure(failure)
        if found is not None:
            raise found

    def _finish_writing(self, *, down_to: int = 0) -> None:
        while len(self._writing) > down_to:
            self._writing.popleft().finish_writing()

    @contextmanager
    def _failing_at_the_end(self) -> Iterator[None]:
        """Keeps a failure until all ranks are told."""
        try:
            yield
        except StorageError as error:
            self._failure = self._failure or error


def _take_gradients(unit: Unit) -> dict[Record, tuple[dict[int, Tensor], dict[int, torch.dtype]]]:
    """Gradients in memory whose place is in another tier, flat as they lie there, with the dtypes they were computed in;
    their tensors take their place."""
    found: dict[Record, tuple[dict[int, Tensor], dict[int, torch.dtype]]] = {}
    for slot in unit.slots:
        grad, place = slot.parameter.grad, slot.gradient_place
        if grad is None or place is None or isinstance(grad, PendingGradient):
            continue
        local = local_of(grad)
        if isinstance(local, TierTensor) or local.dtype != slot.dtype:
            continue
        if local.stride() != slot.path.local_stride:
            local = torch.empty_strided(
                slot.path.local_shape, slot.path.local_stride, dtype=local.dtype, device=local.device
            ).copy_(local)
        values, computed = found.setdefault(record_of(place), ({}, {}))
        values[place.number] = local.as_strided((local.numel(),), (1,))
        computed[place.number] = slot.kind.compute_dtype
        away = slot.path.local_view(place)
        slot.parameter.grad = away if slot.spec is None else on_spec(away, slot.spec)
    return found
