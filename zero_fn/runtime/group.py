"""A group: the parameters of a unit that are of one kind,
and the buffers in which they rest and are gathered."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import accumulate

import torch
from torch import Tensor

from zero_fn.runtime.fsdp_extensions import gathers_by_extension
from zero_fn.runtime.leg import Spot
from zero_fn.runtime.parameter_kind import ParameterKind
from zero_fn.runtime.slot import Slot
from zero_fn.storage.pool import BufferPool
from zero_fn.tiers.compute_copies import ParameterRecord
from zero_fn.tiers.parcels import PARCEL_NBYTES, STEPPED_IN_PLACE_NBYTES, Form
from zero_fn.tiers.record import Record
from zero_fn.tiers.tier_tensor import TierTensor, in_memory
from zero_fn.transport.segment import PACKED_NBYTES
from zero_fn.values.layout import aligned_offsets
from zero_fn.values.tiers import Shelved
from zero_fn.values.wire import Wire

__all__ = ["Buffer", "Group", "MakeRecord", "dense_offsets", "groups_of"]

MakeRecord = Callable[[Shelved, list[Form], torch.device, type[Record]], Record]
"""Makes room for tensors in the storage of a tier (its shelf)."""


class Buffer:
    """One placement of a group in memory of the device."""

    __slots__ = ("_pool", "device", "dtype", "memory", "numel", "starts")

    def __init__(
        self,
        starts: Mapping[Slot, int],  # the first element of each parameter
        numel: int,
        dtype: torch.dtype,
        device: torch.device,
        *,
        is_transient: bool = False,  # whether it has memory during a use only
    ) -> None:
        self.starts = starts
        self.numel = numel
        self.dtype = dtype
        self.device = device
        self._pool = BufferPool(numel, dtype, device) if is_transient else None
        self.memory: Tensor | None = None if is_transient else self.allocate()

    @property
    def nbytes(self) -> int:
        """Bytes of its memory, padding included."""
        return self.numel * self.dtype.itemsize

    def allocate(self) -> Tensor:
        """Fresh memory for the whole buffer."""
        if self._pool is not None:
            return self._pool.take()
        return torch.empty(self.numel, dtype=self.dtype, device=self.device)

    def range(self, slot: Slot, start: int, numel: int) -> Tensor:
        """Some elements of a parameter, as a flat view of `memory`."""
        assert self.memory is not None, "the buffer has memory during a use only"
        return self.memory.narrow(0, self.starts[slot] + start, numel)


class Group:
    """The parameters of a unit that are of one kind."""

    def __init__(self, kind: ParameterKind, slots: list[Slot]) -> None:
        self.kind = kind
        self.slots = slots
        # The whole buffer of the group; None if its kind has none (parameter_kind.py).
        self.whole: Buffer | None = None
        self.inner: Buffer | None = None
        self._rest: Buffer | None = None
        # Where parameters and gradients rest in other tiers, if they do.
        self.record: ParameterRecord | None = None
        self.gradient_record: Record | None = None
        for slot in slots:
            slot.join(kind)

    # -- memory ------------------------------------------------------------------------------------

    def lay_out(self, make_record: MakeRecord) -> None:
        """Allocates the buffers, and points the `flat` of each slot at its resting elements."""
        kind, slots = self.kind, self.slots
        if kind.has_whole:
            numels = [slot.path.padded_numel for slot in slots]
            starts, numel = _aligned(slots, numels, kind.compute_dtype)
            self.whole = Buffer(
                starts, numel, kind.compute_dtype, kind.device, is_transient=not kind.is_kept
            )
        if kind.inner is not None:
            dtype = torch.uint8 if isinstance(kind.inner, Wire) else kind.compute_dtype
            numels = [
                slot.path.sublayout.padded_numel
                for slot in slots
                if slot.path.sublayout is not None
            ]
            if isinstance(kind.inner, Wire):
                numels = [
                    kind.records_of(slot.path).nbytes_of(n)
                    for slot, n in zip(slots, numels, strict=True)
                ]
            starts, numel = _aligned(slots, numels, dtype)
            self.inner = Buffer(starts, numel, dtype, kind.device)
        if kind.rests is Spot.REST:
            numels = [slot.path.local_numel for slot in slots]
            starts, numel = dense_offsets(slots, numels, kind.dtype.itemsize)
            self._rest = Buffer(starts, numel, kind.dtype, kind.device)
        if kind.device.type != "meta":
            self._lay_out_records(make_record)
        for number, slot in enumerate(slots):
            path = slot.path
            if kind.rests is Spot.TIER:
                assert self.record is not None
                slot.flat = TierTensor.of(self.record, number)
            elif kind.rests is Spot.WHOLE:
                assert self.whole is not None
                slot.flat = self.whole.range(slot, path.start, path.local_numel)
            elif kind.rests is Spot.INNER:
                assert self.inner is not None
                slot.flat = self.inner.range(slot, path.inner_start, path.local_numel)
            else:
                assert self._rest is not None
                slot.flat = self._rest.range(slot, 0, path.local_numel)
            slot.gradient_place = (
                TierTensor.of(self.gradient_record, number)
                if self.gradient_record is not None
                else None
            )

    def _lay_out_records(self, make_record: MakeRecord) -> None:
        kind = self.kind
        for what, forms in (*self.forms_away(), *self.codes_away()):
            record_type = ParameterRecord if what[0] == "parameters" else Record
            record = make_record(what, forms, kind.device, record_type)
            if isinstance(record, ParameterRecord):
                self.record = record
            elif what[0] == "gradients":
                self.gradient_record = record
            elif what[0] == "codes":
                assert self.record is not None, "codes come after what they code"
                self.record.codes = record
            else:
                assert self.record is not None, "copies come after their originals"
                self.record.copies = record

    def forms_away(self) -> list[tuple[Shelved, list[Form]]]:
        """The tensors that rest in other tiers, as elements and dtypes,
        by kind of state and tier."""
        found: list[tuple[Shelved, list[Form]]] = []
        most = (
            STEPPED_IN_PLACE_NBYTES if self.kind.home.tiers.are_stepped_in_place else PARCEL_NBYTES
        )
        for what, tier in self.kind.shelved():
            own = self.kind.dtype if what == "parameters" else self.kind.gradient_dtype
            # Gradients in another dtype are cut where their parameters are.
            packed_as = self.kind.dtype if own != self.kind.dtype else None
            lands = self.kind.lands and what == "parameters"
            forms = [
                Form(slot.path.local_numel, own, packed_as, most, lands) for slot in self.slots
            ]
            found.append(((what, tier), forms))
            copies = _forms_of_copies(self.slots, most) if what == "parameters" else []
            if copies:
                found.append((("compute copies", tier), copies))
        return found

    def codes_away(self) -> list[tuple[Shelved, list[Form]]]:
        """The codes that rest beside parameters in another tier,
        if they are not trained. [Note: codes at rest]"""
        kind, tier = self.kind, self.kind.home.tiers.params
        if (
            not kind.is_away
            or tier is None
            or kind.gather is None
            or not all(slot.is_frozen for slot in self.slots)
        ):
            return []
        numels = [
            kind.records_of(slot.path).nbytes_of(slot.path.local_numel) for slot in self.slots
        ]
        return [(("codes", tier), [Form(numel, torch.uint8, lands=kind.lands) for numel in numels])]

    def vacate(self) -> None:
        """Drops the buffers in memory of the device. Records in other tiers stay."""
        self.whole = self.inner = self._rest = None
        if self.kind.rests is Spot.TIER:
            return
        for slot in self.slots:
            slot.flat = torch.empty(0, dtype=self.kind.dtype, device=slot.flat.device)
            slot.local = slot.flat  # belongs to no parameter, so `Slot.is_current` is False

    def kept(self) -> list[Tensor]:
        """The buffers beside resting parameters that stay in memory."""
        return [
            buffer.memory
            for buffer in (self.whole, self.inner)
            if buffer is not None and buffer.memory is not None
        ]

    def records(self) -> list[Record]:
        """The records of parameters, their compute copies and codes,
        and gradients in other tiers."""
        own = self.record
        beside = [own.copies, own.codes] if own is not None else []
        records = (own, *beside, self.gradient_record)
        return [record for record in records if record is not None]

    @property
    def padding_nbytes(self) -> int:
        """Bytes of padding in memory of the device at rest; 0 for parameters that are in
        another tier, or will go there."""
        if self.kind.is_away:
            return 0
        buffers = [buffer for buffer in (self.whole, self.inner, self._rest) if buffer is not None]
        kept = sum(buffer.nbytes for buffer in buffers if buffer.memory is not None)
        return kept - sum(self.kind.resting_nbytes(slot.path) for slot in self.slots)

    # -- other tiers -------------------------------------------------------------------------------

    def write(self, values: Mapping[Slot, Tensor]) -> None:
        """Fills the resting memory of parameters, in their tier too,
        with this rank's elements of them.

        Waits.
        """
        if self.record is None:
            for slot, own in values.items():
                slot.local.copy_(own)
        else:
            numbers = {slot: number for number, slot in enumerate(self.slots)}
            flats = {
                numbers[slot]: slot.path.flat_of(in_memory(own).to(slot.dtype))
                for slot, own in values.items()
            }
            self.record.write(flats)

    # [Note: landing] Where nothing is gathered and the device is the CPU, a forward sees the memory
    # that a fetch reads into: no staging buffer, no copy. It lives as long as a tensor on it, and
    # then serves the next unit. (zero_fn.storage.pool)

    @property
    def _landing(self) -> Record | None:
        """The record that is read to where modules see it, where it is up to date;
        None if there is none."""
        record = self.record
        if record is None or record.landing is None or self.kind.gather is not None:
            return None
        source = record.copies or record
        if all(form.dtype == self.kind.compute_dtype for form in source.forms):
            return source
        return None

    @property
    def landing_nbytes(self) -> int:
        """Bytes of what a fetch reads to where modules see it."""
        record = self._landing
        return record.nbytes if record is not None else 0

    @property
    def starts(self) -> Mapping[Slot, int]:
        """Where each parameter begins in the whole buffer, in elements: in each gather the same,
        whether it is read there or copied, as autograd remembers places."""
        assert self.whole is not None
        record, itemsize = self._landing, self.kind.compute_dtype.itemsize
        if record is None:
            return self.whole.starts
        return {
            slot: start // itemsize for slot, start in zip(self.slots, record.starts, strict=True)
        }

    def landed(self) -> Tensor | None:
        """The memory that parameters have just been read into, flat, in the compute dtype; None if
        they are copied, cast or decoded from there into a buffer."""
        record = self._landing
        if record is None or record.fetched is None:
            return None  # copies in the compute dtype were out of date, or a disk has failed
        return record.fetched.memory.view(self.kind.compute_dtype)

    def memory_for_whole(self) -> Tensor:
        """Memory for whole parameters, flat: that which they were read into,
        or else of the buffer."""
        assert self.whole is not None
        if (landed := self.landed()) is not None:
            return landed
        if self.whole.memory is not None:
            return self.whole.memory
        if self.record is None or self.record.landing is None:
            return self.whole.allocate()
        nbytes = self.landing_nbytes or self.whole.nbytes
        return self.record.landing.take(nbytes)[:nbytes].view(self.whole.dtype)


def groups_of(
    slots: Sequence[Slot], dtypes: Sequence[torch.dtype], devices: Sequence[torch.device]
) -> list[Group]:
    """The parameters of a unit by kind, in their order; `dtypes` and `devices` at rest.

    The groups have no memory yet.
    """
    by_kind: dict[ParameterKind, list[Slot]] = {}
    for slot, dtype, device in zip(slots, dtypes, devices, strict=True):
        by_kind.setdefault(
            ParameterKind.of(
                slot.path, slot.home, dtype, device, by_extension=gathers_by_extension(slot)
            ),
            [],
        ).append(slot)
    return [Group(kind, members) for kind, members in by_kind.items()]


def _aligned(
    slots: Sequence[Slot], numels: Sequence[int], dtype: torch.dtype
) -> tuple[dict[Slot, int], int]:
    *starts, numel = aligned_offsets(numels, dtype.itemsize)
    return dict(zip(slots, starts, strict=True)), numel


def dense_offsets(
    slots: Sequence[Slot], numels: Sequence[int], itemsize: int
) -> tuple[dict[Slot, int], int]:
    """Where each slot begins in a buffer of these slots, of one dtype,
    and the elements of the buffer.

    Alike on every rank.

    Large slots lie on aligned boundaries, small ones back to back, because small ones travel in one
    message: their parameters are then sent from where they rest, and their gradients summed where
    they rest, without a copy on either side.
    """
    sizes = dict(zip(slots, numels, strict=True))
    small = [slot for slot in slots if _is_even_and_small(slot)]
    apart = [slot for slot in slots if not _is_even_and_small(slot)]
    rooms = [*(sizes[slot] for slot in apart), sum(sizes[slot] for slot in small)]
    *starts, total = aligned_offsets(rooms, itemsize)
    run = accumulate((sizes[slot] for slot in small), initial=starts.pop())
    return dict(zip((*apart, *small), (*starts, *run), strict=False)), total


def _is_even_and_small(slot: Slot) -> bool:
    """Whether a slot's piece has the same size on every rank,
    and travels packed with others in one message."""
    is_even = (
        slot.path.sublayout is None and slot.path.numel == slot.path.piece_numel * slot.path.size
    )
    return (
        not slot.path.keeps_whole_gradient
        and is_even
        and slot.path.piece_numel * slot.dtype.itemsize < PACKED_NBYTES
    )


def _forms_of_copies(slots: Sequence[Slot], parcel_nbytes: int) -> list[Form]:
    """The tensors of the compute copies of these parameters;
    empty if copies would not be smaller."""
    saved = sum(
        slot.path.local_numel * (slot.dtype.itemsize - slot.kind.compute_dtype.itemsize)
        for slot in slots
    )
    if saved <= 0:
        return []
    return [
        Form(
            slot.path.local_numel,
            slot.kind.compute_dtype,
            slot.dtype,
            parcel_nbytes,
            slot.kind.lands,
        )
        for slot in slots
    ]
