"""The memory of a unit at rest: its groups, in memory of the device and in other tiers."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor, nn

from zero_fn.errors import StorageError
from zero_fn.runtime.group import Group, groups_of
from zero_fn.runtime.slot import Slot
from zero_fn.tiers.compute_copies import ParameterRecord
from zero_fn.tiers.offloaded_state import OffloadedState
from zero_fn.tiers.parcels import Form, lands
from zero_fn.tiers.record import Record
from zero_fn.tiers.tier_tensor import TierTensor
from zero_fn.transport.agree import Outcome
from zero_fn.transport.line import Line, Work
from zero_fn.values.dtensors import local_of, resting_parameter
from zero_fn.values.home import ReshardAfter
from zero_fn.values.tiers import Shelved

__all__ = ["Memory", "gather_wholes"]


class Memory:
    """The resting parameters of a unit, in groups of those that rest,
    compute and are summed alike."""

    def __init__(
        self, unit: str, slots: Sequence[Slot], line: Line, offloaded: OffloadedState, owner: object
    ) -> None:
        self.slots = slots
        self.line = line
        self.groups: list[Group] = []
        self.away: list[ParameterRecord] = []  # of groups that rest in another tier
        # Whether nothing comes from other ranks, so that a gather ahead of
        # its use would only take memory.
        self.is_local = False
        self.is_transient = False  # whether any gathered parameter is freed between uses
        # Gathered parameters stay from the forward to the end of the backward.
        self.reshards_after_backward = False
        # `evict` has moved the parameters to another tier, so that they cannot be used.
        self.is_evicted = False
        # Values were assigned to a parameter (`.data =`) in a forward:
        # the next gather follows them.
        self.is_moved = False
        # While moved parameters are taken over: each, and its values where it was moved to. An
        # interrupt in the midst leaves them here, and the next `follow` takes them over.
        # (moved_memory.py)
        self.moving: list[tuple[nn.Parameter, Tensor]] | None = None
        self.unit = unit
        self._offloaded = offloaded
        self._owner: Callable[[], object] = weakref.ref(owner)
        # Records of the earlier groups, which new groups may take over.
        self._known: list[Record] = []

    def group_of(self, slot: Slot) -> Group:
        """The group of a parameter of the unit."""
        return next(group for group in self.groups if group.kind is slot.kind)

    # -- memory ------------------------------------------------------------------------------------

    def form(self, dtypes: Sequence[torch.dtype], devices: Sequence[torch.device]) -> None:
        """Groups the parameters by how they rest, compute and are summed.

        `dtypes` and `devices`: of each at rest.
        """
        self._known = self.records()
        self.groups = groups_of(self.slots, dtypes, devices)
        self.reshards_after_backward = any(
            slot.home.reshard_after is ReshardAfter.BACKWARD for slot in self.slots
        )

    def lay_out(self) -> None:
        """Allocates the buffers at rest, and drops those that were gathered of earlier ones."""
        for group in self.groups:
            group.lay_out(self._record_for)
        self._known = []
        self.away = [group.record for group in self.groups if group.record is not None]
        self.is_transient = any(not group.kind.is_kept for group in self.groups)
        self.is_local = all(
            each.kind.lands or (each.kind.is_kept and not each.kind.is_cut) for each in self.groups
        )

    def allocate(self, requires_grad: Sequence[bool]) -> None:
        """Lays out the memory, and registers parameters on it.

        Their values are still to be written.
        """
        self.lay_out()
        for slot, flag in zip(self.slots, requires_grad, strict=True):
            parameter = resting_parameter(slot.resting_local(), slot.spec, requires_grad=flag)
            slot.adopt(parameter, slot.flat)
            slot.register(parameter)

    def vacate(self) -> None:
        """Drops the memory of the parameters, whose values were moved elsewhere."""
        self.is_evicted = True
        is_in_tier = all(isinstance(slot.flat, TierTensor) for slot in self.slots)
        if not is_in_tier:
            for group in self.groups:
                group.vacate()

    def _record_for(
        self, what: Shelved, forms: list[Form], device: torch.device, record_type: type[Record]
    ) -> Record:
        """Room in another tier: the earlier record, where nothing has changed, or a new one."""
        for known in self._known:
            is_alike = (known.shelf.tier, known.forms, known.device) == (what[1], forms, device)
            if type(known) is record_type and is_alike:
                self._known.remove(known)
                return known
        record = record_type(
            self._offloaded.shelf(what),
            forms,
            device,
            self._offloaded.place_for(what, forms, device),
        )
        record.owner = self._owner
        if lands(forms):
            record.landing = self._offloaded.landing
        return record

    def records(self) -> list[Record]:
        """The records of all groups in other tiers."""
        return [record for group in self.groups for record in group.records()]

    @property
    def landing_nbytes(self) -> int:
        """Bytes that are in memory from the fetch on, where the end of the fetch is all
        that a gather waits for; else 0."""
        return sum(group.landing_nbytes for group in self.groups) if self.is_local else 0

    # -- at rest -----------------------------------------------------------------------------------

    def write(self, values: Mapping[Slot, Tensor]) -> None:
        """Fills the memory of parameters with this rank's elements of them. No communication."""
        with torch.no_grad():
            known = {s: value for s, value in values.items() if value.device.type != "meta"}
            for group in self.groups:
                group.write({s: known[s] for s in group.slots if s in known})

    def scatter(self, wholes: Mapping[Slot, Tensor]) -> None:
        """Writes this rank's part of whole parameters back to rest. No communication."""
        self.write({slot: slot.path.owned(local_of(whole)) for slot, whole in wholes.items()})

    def wholes(self, slots: Sequence[Slot] | None = None) -> list[Tensor]:
        """New tensors with all whole parameters, or some, in the dtype at rest.

        Communicates one all-gather; waits.
        """
        wholes, pending = self.issue_wholes(slots)
        pending.wait()
        return wholes

    def issue_wholes(self, slots: Sequence[Slot] | None = None) -> tuple[list[Tensor], Work]:
        """Whole parameters as of `wholes`, and the all-gather that is still to be waited for.

        Raises:
            StorageError: The tier of resting parameters failed,
                on this rank or another: on every rank.
        """
        if self.away:
            failure = self.arrived(exact=True)
            failed = Outcome(self.line, failure, f"Fetching {self.unit}").failed_on_any_rank()
            if failed is not None:
                raise failed
        flats = []
        for slot in self.slots if slots is None else slots:
            flat = slot.flat
            if isinstance(flat, TierTensor):
                flat = flat.record.values(flat.number)
            elif slots is not None and not slot.is_current():
                # Values were assigned to a slot in a forward.
                flat = slot.path.flat_of(local_of(slot.parameter))
            flats.append(flat)
        wholes = gather_wholes(
            self.slots if slots is None else slots,
            flats,
            self.line,
            f"whole parameters of {self.unit}",
        )
        self.let_go()
        return wholes

    @property
    def may_fail(self) -> bool:
        """Whether parameters may fail to arrive from their tier on one rank alone.

        The same on all.
        """
        return any(record.shelf.may_fail for record in self.away)

    def arrived(self, *, exact: bool) -> StorageError | None:
        """Waits until resting parameters in other tiers can be read; returns the first failure."""
        failures = [record.arrived(exact=exact) for record in self.away]
        return next((failure for failure in failures if failure is not None), None)

    def let_go(self) -> None:
        """Gives up what was fetched."""
        for record in self.away:
            record.let_go()


def gather_wholes(
    slots: Sequence[Slot], flats: Sequence[Tensor], line: Line, what: str
) -> tuple[list[Tensor], Work]:
    """New whole tensors of what ranks hold of parameters, flat,
    and the all-gather that is still to be waited for."""
    wholes, segments = [], []
    for slot, flat in zip(slots, flats, strict=True):
        room = slot.path.around(flat, flat.dtype, slot.flat.device)
        wholes.append(slot.path.whole_view(room.memory))
        segments += [room] if slot.path.layout is not None else []
    return wholes, line.all_gather(segments, what)
