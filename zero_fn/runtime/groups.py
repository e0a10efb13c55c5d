"""The memory of a unit: its groups at rest and gathered, and what is under way between the two.

    rest  --- axis 2 --->  inner  --- axis 1 --->  whole

A gather goes by these hops, over one axis or two. Their plans are made once for the same memory. Of most groups `inner` is a
part of `whole`, and one plan has both hops; where it is kept (hpZ), the first hop is made once after each step. (kind.py)

[Note: a disk may fail on one rank] Resting parameters in another tier are fetched before each gather, copied into the
gathered buffer, and let go. If they are on a disk, every rank sends a byte before each gather that says whether its disk
failed, and all ranks raise the same error. Memory of the host does not fail, and the host waits for no answer. The byte comes
first because the host reads the answer: the communicator of an accelerator has one queue, so it would wait for the gather.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from enum import Enum, auto

import torch
from torch import Tensor, nn

from zero_fn.errors import StorageError
from zero_fn.resting import local_of, resting_parameter
from zero_fn.runtime.gathered import Gathered
from zero_fn.runtime.group import Group, groups_of
from zero_fn.runtime.landing import landing_nbytes
from zero_fn.runtime.slot import Slot
from zero_fn.tiers.offloaded_state import OffloadedState
from zero_fn.tiers.parcels import Form, lands
from zero_fn.tiers.record import Record
from zero_fn.tiers.tier_tensor import TierTensor
from zero_fn.transport.agree import Outcome
from zero_fn.transport.line import Line, Work
from zero_fn.values.home import ReshardAfter
from zero_fn.values.tiers import Shelved

__all__ = ["Groups", "Phase", "gather_wholes"]


class Phase(Enum):
    """Where the gathered parameters of a unit are: AT_REST -> GATHERING -> GATHERED -> AT_REST, nothing else."""

    AT_REST = auto()
    GATHERING = auto()
    GATHERED = auto()


class Groups:
    """The groups of a unit, in the order of their first parameters."""

    def __init__(self, unit: str, slots: Sequence[Slot], line: Line, offloaded: OffloadedState, owner: object) -> None:
        self.slots, self.line = slots, line
        self.members: list[Group] = []
        self.is_away = False  # whether any resting parameter is in another tier
        # Whether nothing comes from other ranks, so that a gather ahead of its use would only take memory.
        self.is_local = False
        self.is_transient = False  # whether any gathered parameter is freed between uses
        self.reshards_after_backward = False  # gathered parameters stay from the forward to the end of the backward
        self.is_evicted = False  # `evict` has moved the parameters to another tier, so that they cannot be used
        # Values were assigned to a parameter (`.data =`) in a forward: the next gather follows them.
        self.is_moved = False
        # While moved parameters are taken over: each, and its values where it was moved to. An interrupt in the midst leaves
        # them here, and the next `follow` takes them over. (moved.py)
        self.moving: list[tuple[nn.Parameter, Tensor]] | None = None
        self.is_inner_current = False  # whether kept parts on the first axis have the values that rest now
        # Whether all ranks hold the same of what travels as differences. [Note: what the others hold] (coded_parameters.py)
        self.is_held = False
        self.phase = Phase.AT_REST
        self.gathered: Gathered | None = None  # kept without memory for the next gather, unless somebody holds a part
        # Known once the parameters are gathered: a tier could not be read on some rank (every rank has it then), or a tensor
        # subclass raised in `fsdp_post_all_gather`.
        self.failure: Exception | None = None
        self._unit, self._offloaded = unit, offloaded
        self._owner: Callable[[], object] = weakref.ref(owner)
        self._known: list[Record] = []  # records of the earlier groups, which new groups may take over
        self._pending: Work | None = None
        self._told: Outcome | None = None  # whether the fetch went well on each rank

    def __iter__(self) -> Iterator[Group]:
        return iter(self.members)

    def of(self, slot: Slot) -> Group:
        return next(group for group in self.members if group.kind is slot.kind)

    # -- memory -----------------------------------------------------------------------------------------------------

    def form(self, dtypes: Sequence[torch.dtype], devices: Sequence[torch.device]) -> None:
        """Groups the parameters by how they rest, compute and are summed. `dtypes` and `devices`: of each at rest."""
        self._known = self.records()
        self.members = groups_of(self.slots, dtypes, devices)
        self.reshards_after_backward = any(slot.home.reshard_after is ReshardAfter.BACKWARD for slot in self.slots)

    def lay_out(self) -> None:
        """Allocates the buffers at rest, and drops those that were gathered of earlier ones."""
        for group in self.members:
            group.lay_out(self._record_for)
        self._known = []
        self.is_away = any(group.record is not None for group in self.members)
        self.is_transient = any(group.is_transient for group in self.members)
        self.is_local = all(each.kind.lands or (each.kind.is_kept and not each.kind.is_cut) for each in self.members)
        self.phase, self.gathered, self.failure = Phase.AT_REST, None, None
        self.is_inner_current = self.is_held = False

    def allocate(self, requires_grad: Sequence[bool]) -> None:
        """Lays out the memory, and registers parameters on it. Their values are still to be written."""
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
            for group in self.members:
                group.vacate()
        self.gathered = None

    def _record_for(self, what: Shelved, forms: list[Form], device: torch.device, record_type: type[Record]) -> Record:
        """Room in another tier: the earlier record, where nothing has changed, or a new one."""
        for known in self._known:
            is_alike = (known.shelf.tier, known.forms, known.device) == (what[1], forms, device)
            if type(known) is record_type and is_alike:
                self._known.remove(known)
                return known
        record = record_type(self._offloaded.shelf(what), forms, device, self._offloaded.place_for(what, forms, device))
        record.owner = self._owner
        if lands(forms):
            record.landing = self._offloaded.landing
        return record

    def records(self) -> list[Record]:
        """The records of all groups in other tiers."""
        return [record for group in self.members for record in group.records()]

    def kept(self) -> list[Tensor]:
        """The buffers beside resting parameters that stay in memory."""
        return [buffer for group in self.members for buffer in group.kept()]

    @property
    def gathered_nbytes(self) -> int:
        """Bytes of the buffers that have memory during a use only, and of records."""
        whole = sum(group.whole.nbytes for group in self.members if group.is_transient and group.whole is not None)
        return whole + sum(group.kind.records_nbytes(slot.path) for group in self.members for slot in group.slots)

    @property
    def landing_nbytes(self) -> int:
        """Bytes that are in memory from the fetch on, where the end of the fetch is all that a gather waits for; else 0."""
        return sum(map(landing_nbytes, self.members)) if self.is_local else 0

    @property
    def padding_nbytes(self) -> int:
        """Bytes of padding in the memory at rest."""
        return sum(group.padding_nbytes for group in self.members)

    # -- at rest ----------------------------------------------------------------------------------------------------

    def write(self, values: Mapping[Slot, Tensor]) -> None:
        """Fills the memory of parameters with this rank's elements of them. No communication."""
        with torch.no_grad():
            for group in self.members:
                group.write({s: values[s] for s in group.slots if s in values and values[s].device.type != "meta"})

    def scatter(self, wholes: Mapping[Slot, Tensor]) -> None:
        """Writes this rank's part of whole parameters back to rest. No communication."""
        self.write({slot: slot.path.owned(local_of(whole)) for slot, whole in wholes.items()})

    def wholes(self, slots: Sequence[Slot] | None = None) -> list[Tensor]:
        """New tensors with all whole parameters, or some, in the dtype at rest. Communicates one all-gather; waits."""
        wholes, pending = self.issue_wholes(slots)
        if pending is not None:
            pending.wait()
        return wholes

    def issue_wholes(self, slots: Sequence[Slot] | None = None) -> tuple[list[Tensor], Work | None]:
        """Whole parameters as of `wholes`, and the all-gather that is still to be waited for, if there is one.

        Raises:
            StorageError: The tier of resting parameters failed, on this rank or another: on every rank.
        """
        if self.is_away:
            failure = self._arrive(exact=True)
            failed = Outcome(self.line, failure, f"Fetching {self._unit}").failed_on_any_rank()
            if failed is not None:
                raise failed
        flats = []
        for slot in self.slots if slots is None else slots:
            flat = slot.flat
            if isinstance(flat, TierTensor):
                flat = flat.record.values(flat.number)
            elif slots is not None and not slot.is_current():  # values were assigned to it in a forward
                flat = slot.path.flat_of(local_of(slot.parameter))
            flats.append(flat)
        wholes = gather_wholes(
            self.slots if slots is None else slots, flats, self.line, f"whole parameters of {self._unit}"
        )
        self._let_go()
        return wholes

    # -- gathered ---------------------------------------------------------------------------------------------------

    def fetch(self) -> None:
        """Begins to read resting parameters from their tier, for the next gather."""
        if self.phase is Phase.AT_REST:
            for group in self.members:
                group.fetch()

    def gather(self, unit: object) -> None:
        """Issues the all-gather; `wait` waits for it. `unit` gathers again when backward needs a freed buffer."""
        if self.is_away:
            self.failure = self._arrive()
        gathered = self.gathered
        if gathered is None:
            self.gathered = gathered = Gathered(unit, self.slots, self.members, self.line)
        else:
            gathered.renew()
        inner_plan = gathered.inner_plans[self.is_held]
        if inner_plan is not None and not self.is_inner_current:
            gathered.fill_inner()
            for coded in gathered.coded:
                coded.begin_inner(is_held=self.is_held)
            self.line.all_gather(inner_plan, f"inner parameters of {self._unit}").wait()
            for coded in gathered.coded:
                coded.end_inner(is_held=self.is_held)
            self.is_inner_current = True
        if self.is_away and any(group.may_fail for group in self.members):
            self._told = Outcome(self.line, self.failure, f"Fetching {self._unit}")
        gathered.fill_own()
        if gathered.coded:
            with gathered.beside or nullcontext():
                for coded in gathered.coded:
                    coded.begin(is_held=self.is_held)
            gathered.note_beside()
        plan = gathered.plans[self.is_held]
        if plan is not None:
            what = f"parameters of {self._unit}"
            if gathered.beside is None:
                self._pending = self.line.all_gather(plan, what)
            else:
                with gathered.beside:  # it waits for the copies there; what computes waits for neither before `wait`
                    self._pending = self.line.all_gather(plan, what)
        self.phase = Phase.GATHERING
        if self.is_away:
            self._let_go()

    def wait(self) -> None:
        """Waits for the all-gather that is under way."""
        if self._told is not None:
            self.failure = self._told.failed_on_any_rank()
            self._told = None
        if self._pending is not None:
            self._pending.wait()
            self._pending = None
        if self.gathered is not None:
            self.gathered.wait_for_own()
            for coded in self.gathered.coded:
                coded.end(is_held=self.is_held)
            self.is_held = True
            if self.gathered.travelling:
                try:
                    self.gathered.make_products()
                except Exception as error:  # in the user's tensor subclass; `Unit.await_gathered` raises it
                    self.failure = self.failure or error
        self.phase = Phase.GATHERED

    def tensors(self) -> list[Tensor]:
        """The parameters as the forward sees them: new tensors, whole, in the compute dtype, without autograd history."""
        assert self.phase is Phase.GATHERED and self.gathered is not None, f"{self._unit} is {self.phase}"
        return self.gathered.tensors()

    def free(self) -> None:
        """Frees the gathered parameters; kept buffers stay but count as out of date."""
        if self.is_away:
            self._let_go()
        if self.phase is Phase.AT_REST:
            return
        if self.phase is Phase.GATHERING:
            self.wait()
        self.failure = None
        if self.gathered is not None and not self.gathered.free():
            self.gathered = None
        self.phase = Phase.AT_REST

    def drop(self) -> None:
        """Drops the gathered parameters, and gives up a gather under way, wherever an interrupt has left it."""
        pending, told, self._pending, self._told = self._pending, self._told, None, None
        if told is not None:
            told.failed_on_any_rank()
        if pending is not None:
            pending.wait()  # the next message would be taken for it
        self._let_go()
        self.phase, self.gathered, self.failure = Phase.AT_REST, None, None
        self.is_inner_current = self.is_held = False

    def _arrive(self, *, exact: bool = False) -> StorageError | None:
        """Waits until resting parameters in other tiers can be read; returns the first failure. See `Group.arrive`."""
        failures = [group.arrive(exact=exact) for group in self.members]
        return next((failure for failure in failures if failure is not None), None)

    def _let_go(self) -> None:
        for group in self.members:
            group.let_go()


def gather_wholes(
    slots: Sequence[Slot], flats: Sequence[Tensor], line: Line, what: str
) -> tuple[list[Tensor], Work | None]:
    """New whole tensors of what ranks hold of parameters, flat, and the all-gather that is still to be waited for, if any."""
    wholes, segments = [], []
    for slot, flat in zip(slots, flats, strict=True):
        path = slot.path
        if path.layout is None:
            wholes.append(path.whole_view(flat).to(slot.flat.device, copy=True))
            continue
        room = flat.new_empty(path.padded_numel, device=slot.flat.device)
        room.narrow(0, path.start, path.local_numel).copy_(flat)
        wholes.append(path.whole_view(room))
        segments.append(path.segment(room))
    return wholes, line.all_gather(segments, what) if segments else None
