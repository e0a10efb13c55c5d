"""The offloaded state of a module: shelves for parameters and gradients, and gradients on their way there."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from zero_fn.errors import StorageError
from zero_fn.resting import local_of, on_spec
from zero_fn.runtime.gradients import add_gradients
from zero_fn.runtime.group import Group
from zero_fn.runtime.kind import Shelved
from zero_fn.runtime.parcels import Form, record_nbytes, staged_nbytes
from zero_fn.runtime.pending_gradient import PendingGradient
from zero_fn.runtime.record import Record
from zero_fn.runtime.slot import Slot
from zero_fn.runtime.tier_tensor import TierTensor
from zero_fn.storage import TierStorage, stagings_for, storage_on
from zero_fn.storage.pool import Landing
from zero_fn.storage.stored_files import StoredFiles
from zero_fn.transport.agree import Outcome
from zero_fn.transport.line import Line

__all__ = ["Away"]


class Away:
    """The shelves of one transformed module, and its gradients that are being written to them.

    If a disk fails during a backward, the error is kept until the end of the backward, when all ranks are told.
    """

    def __init__(self, transport: Line) -> None:
        self._transport = transport
        self._shelves: dict[Shelved, TierStorage] = {}
        self._reserved: dict[Shelved, list[int]] = {}
        self.landing = Landing()
        self.files: StoredFiles | None = None  # files of others in which parameters rest, read in place
        self._writing: deque[Record] = deque()
        self._failure: StorageError | None = None

    def shelf(self, what: Shelved) -> TierStorage:
        """The shelf for parameters, or for gradients, of the module in a tier."""
        if what not in self._shelves:
            kind, tier = what
            self._shelves[what] = storage_on(tier, kind)
        return self._shelves[what]

    def shelves(self) -> list[tuple[str, TierStorage]]:
        """All shelves, each with the name of what it holds."""
        known: list[tuple[str, TierStorage]] = [(kind, shelf) for (kind, _), shelf in self._shelves.items()]
        return known if self.files is None else [*known, ("parameters", self.files)]

    def reserve(self, records: dict[Shelved, list[list[Form]]], device: torch.device) -> None:
        """Makes room for all records of the module, which will be laid out in this order."""
        for what, forms in records.items():
            sizes = [record_nbytes(each) for each in forms]
            self._reserved[what] = self.shelf(what).reserve(sizes)
            self._stage(what, max(map(staged_nbytes, forms)), device)

    def place_for(self, what: Shelved, forms: list[Form], device: torch.device) -> int:
        """The place of the next record: the next one that was reserved, or a new one; none if it will be in files."""
        if self.files is not None and what[0] == "parameters":
            return 0
        reserved = self._reserved.get(what)
        self._stage(what, staged_nbytes(forms), device)
        return reserved.pop(0) if reserved else self.shelf(what).reserve([record_nbytes(forms)])[0]

    def _stage(self, what: Shelved, nbytes: int, device: torch.device) -> None:
        if nbytes:
            self.shelf(what).stage(nbytes, stagings_for(device.type))

    def take_gradients(self, slots: Sequence[Slot], groups: Iterable[Group], grads: Sequence[Tensor | None]) -> None:
        """Makes `grads` the gradients of parameters, or adds them to those there are, which may be in their tier. Begins to
        write those that rest in another tier, one group for each staging buffer. On an accelerator the gradients of one group
        come to the host while those of the group before are written."""
        failure = add_gradients(slots, grads)
        self._failure = self._failure or failure
        for group in groups:
            record = group.gradient_record
            values = _take_gradients(group) if record is not None else {}
            if record is None or not values:
                continue
            with self._failing_at_the_end():
                for other in self._writing:
                    if other.writing is not None:
                        other.writing.go_on(other)
                self._finish_writing(down_to=stagings_for(record.device.type) - 1)
                self._writing.append(record)
                record.begin_writing(values)

    def finish_gradients(self, units: Iterable[Iterable[Group]]) -> None:
        """Waits until all gradients are in their tier."""
        if all(group.gradient_record is None for groups in units for group in groups):
            return
        with self._failing_at_the_end():
            self._finish_writing()
        self._writing.clear()
        failure, self._failure = self._failure, None
        found = Outcome(self._transport, failure, "Writing gradients").failed_on_any_rank()
        if found is not None:
            raise found

    def _finish_writing(self, *, down_to: int = 0) -> None:
        while len(self._writing) > down_to:
            self._writing.popleft().finish_writing()

    @contextmanager
    def _failing_at_the_end(self) -> Iterator[None]:
        """Keeps the error of a disk until all ranks are told."""
        try:
            yield
        except StorageError as error:
            self._failure = self._failure or error


def _take_gradients(group: Group) -> dict[int, Tensor]:
    """The gradients of a group that are in memory and belong into another tier, flat, by number. Tensors in that tier replace
    them as `.grad` of the parameters."""
    found: dict[int, Tensor] = {}
    for slot in group.slots:
        grad, place = slot.parameter.grad, slot.gradient_place
        if grad is None or place is None or isinstance(grad, PendingGradient):
            continue
        local, path = local_of(grad), slot.path
        if isinstance(local, TierTensor) or local.dtype != slot.kind.gradient_dtype:
            continue
        found[place.number] = path.flat_of(local)
        away = path.local_view(place)
        slot.parameter.grad = away if slot.gradient_spec is None else on_spec(away, slot.gradient_spec)
    return found
