"""Where the parameters of a unit rest, and the groups in which they are gathered."""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, TypeVar

import torch
from torch import Tensor

from zero_fn.errors import StorageError
from zero_fn.runtime.compute_copies import ParameterRecord, forms_of_copies
from zero_fn.runtime.dense import dense_offsets
from zero_fn.runtime.gathered import Group
from zero_fn.runtime.hosts import Hosts
from zero_fn.runtime.record import Form, Record
from zero_fn.runtime.slot import Slot

if TYPE_CHECKING:
    from zero_fn.runtime.away import Shelved
    from zero_fn.runtime.unit import Unit

__all__ = ["Rest", "forms_away"]

_R = TypeVar("_R", bound=Record)


def forms_away(slots: Sequence[Slot]) -> dict[Shelved, list[Form]]:
    """What a unit puts into other tiers: elements and dtypes, by kind and tier."""
    found: dict[Shelved, list[Form]] = {}
    for slot in slots:
        for what in slot.shelved():
            found.setdefault(what, []).append(Form(slot.local_numel, slot.dtype))
    for kind, tier in list(found):
        members = [slot for slot in slots if (kind, tier) in slot.shelved()]
        copies = forms_of_copies(members) if kind == "parameters" else []
        if copies:
            found["compute copies", tier] = copies
    return found


class Rest:
    """The memory of one unit at rest.

    Attributes:
        groups: Parameters that are gathered into one buffer.
        hosts: Parts of parameters that stay in memory between two axes.
        records: What of its parameters rests in other tiers, one for each. [Note: away]
        gradient_records: The same of its gradients.
        is_transient: Whether any gathered parameter is freed between uses.
    """

    def __init__(self) -> None:
        """Of parameters without memory."""
        self.groups: list[Group] = []
        self.hosts = Hosts()
        self.records: list[ParameterRecord] = []
        self.gradient_records: list[Record] = []
        self.is_transient = False
        self._failure: StorageError | None = None  # of a fetch

    def lay_out(self, unit: Unit, devices: Sequence[torch.device]) -> None:
        """Chooses the gather groups and points the `flat` of each slot of the unit at fresh memory on these devices."""
        members: dict[tuple[bool, torch.dtype, torch.device], list[Slot]] = {}
        own: dict[tuple[torch.dtype, torch.device, bool], list[Slot]] = {}
        away: dict[tuple[Shelved, torch.device], list[Slot]] = {}
        for slot, device in zip(unit.slots, devices, strict=True):
            if not slot.along and device.type != "meta":
                slot.set_device_type(device.type)
            slot.group = None
            is_cast = slot.compute_dtype != slot.dtype
            if slot.layout is not None or is_cast or slot.is_away:
                members.setdefault((slot.is_kept, slot.compute_dtype, device), []).append(slot)
            for what in slot.shelved() if device.type != "meta" else ():
                away.setdefault((what, device), []).append(slot)
            if slot.is_away and device.type != "meta":
                continue
            if slot.layout is None or is_cast or not (slot.is_kept or slot.is_hosted):
                own.setdefault((slot.dtype, device, slot.is_away), []).append(slot)
        self.groups = []
        for (is_kept, dtype, device), slots in members.items():
            group = Group(slots, dtype, device, is_kept=is_kept)
            for slot in slots:
                slot.group = len(self.groups)
                if group.kept is not None and slot.compute_dtype == slot.dtype:
                    slot.flat = group.own_range(group.kept, slot)
            self.groups.append(group)
        self.is_transient = any(group.kept is None for group in self.groups)
        self.hosts = Hosts(unit.slots, devices)
        self._lay_out_records(unit, away)
        for (dtype, device, _), slots in own.items():
            starts, numel = dense_offsets(slots, [slot.local_numel for slot in slots], dtype.itemsize)
            buffer = torch.empty(numel, dtype=dtype, device=device)
            for slot in slots:
                slot.flat = buffer.narrow(0, starts[slot], slot.local_numel)

    def _lay_out_records(self, unit: Unit, away: dict[tuple[Shelved, torch.device], list[Slot]]) -> None:
        """Room in other tiers; that of before, where nothing has changed. [Note: away]"""
        records, gradient_records = self.records, self.gradient_records
        self.records, self.gradient_records = [], []
        for (what, device), slots in away.items():
            kind, tier = what
            forms = [Form(slot.local_numel, slot.dtype) for slot in slots]
            if kind == "gradients":
                self.gradient_records.append(_record_for(Record, unit, what, forms, device, gradient_records))
                for number, slot in enumerate(slots):
                    slot.gradient_away = self.gradient_records[-1].tensor(number)
                continue
            record = _record_for(ParameterRecord, unit, what, forms, device, records)
            copies, known = forms_of_copies(slots), [record.copies] if record.copies is not None else []
            what = "compute copies", tier
            record.copies = _record_for(Record, unit, what, copies, device, known) if copies else None
            self.records.append(record)
            for number, slot in enumerate(slots):
                slot.flat = record.tensor(number)

    def vacate(self) -> None:
        """Drops what is in the memory of the device. What is in other tiers stays there."""
        self.groups, self.hosts, self.is_transient = [], Hosts(), False

    # -- other tiers ------------------------------------------------------------------------------------------------

    @contextmanager
    def in_memory(self) -> Iterator[None]:
        """Inside, resting parameters in another tier are in memory; what is written into them arrives there at the end."""
        with ExitStack() as stack:
            for record in self.records:
                stack.enter_context(record.held())
            yield

    def fetch(self) -> None:
        """Begins to bring resting parameters from their tier, for the next gather. `arrive` says what failed."""
        self._failure = None
        for record in self.records:
            try:
                record.source.fetch()
            except StorageError as error:
                self._failure = self._failure or error

    def arrive(self, *, exact: bool = False) -> StorageError | None:
        """Waits for resting parameters that are in another tier, and returns what failed.

        Args:
            exact: As they rest, and not as they are computed with.
        """
        failure, self._failure = self._failure, None
        for record in self.records:
            try:
                if exact:
                    record.arrive()
                else:
                    record.arrive_for_gather()
            except StorageError as error:
                failure = failure or error
        return failure

    def let_go(self) -> None:
        """Drops what was fetched."""
        self._failure = None
        for record in self.records:
            record.let_go()

    # -- sizes ------------------------------------------------------------------------------------------------------

    def kept(self) -> list[Tensor]:
        """The buffers beside resting parameters that stay in memory."""
        return [*(group.kept for group in self.groups if group.kept is not None), *self.hosts.buffers]

    @property
    def gathered_nbytes(self) -> int:
        """Bytes of gathered parameters that are freed between uses."""
        return sum(group.numel * group.dtype.itemsize for group in self.groups if group.kept is None)

    def padding_nbytes(self, slots: Sequence[Slot]) -> int:
        """Bytes of padding in the memory of these parameters. What will be away, on `meta` still, is not there."""
        own = (slot.flat for slot in slots if not slot.is_away)
        memory = (tensor.untyped_storage() for tensor in (*own, *self.kept()))
        resting = sum({storage._cdata: storage.nbytes() for storage in memory}.values())
        return resting - sum(slot.resting_nbytes for slot in slots)


def _record_for(
    record_type: type[_R],
    unit: Unit,
    what: Shelved,
    forms: list[Form],
    device: torch.device,
    known: Sequence[_R],
) -> _R:
    record = next((each for each in known if each.is_for(what[1], forms, device)), None)
    if record is None:
        away = unit.step.away
        record = record_type(away.shelf(what), forms, device, away.place_for(what, forms, device))
        record.owner = weakref.ref(unit)
    return record
