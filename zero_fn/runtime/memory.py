"""The memory of a unit: its groups at rest, its whole buffers, and how far the moves between the two have come.

A gather makes the moves (moves.py) from `level` on: so many have brought values that count. Freeing goes back to what is kept
(hpZ), a step of an optimizer to rest.

[Note: a disk may fail on one rank] Resting parameters in another tier are fetched before each gather, copied into the
gathered buffer, and let go. If they are on a disk, every rank sends a byte before each gather that says whether its disk
failed, and all ranks raise the same error. Memory of the host does not fail, and the host waits for no answer. The byte comes
first because the host reads the answer: the communicator of an accelerator has one queue, so it would wait for the gather.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence

import torch
from torch import Tensor, nn

from zero_fn.errors import StorageError
from zero_fn.resting import local_of, resting_parameter
from zero_fn.runtime.group import Group, groups_of
from zero_fn.runtime.moves import Arrivals, Move, depth_of, moves_of
from zero_fn.runtime.slot import Slot
from zero_fn.runtime.whole_buffers import WholeBuffers
from zero_fn.tiers.compute_copies import ParameterRecord
from zero_fn.tiers.offloaded_state import OffloadedState
from zero_fn.tiers.parcels import Form, lands
from zero_fn.tiers.record import Record
from zero_fn.tiers.tier_tensor import TierTensor
from zero_fn.transport.agree import Outcome
from zero_fn.transport.line import Line, Work
from zero_fn.values.home import ReshardAfter
from zero_fn.values.tiers import Shelved

__all__ = ["Memory", "gather_wholes"]


class Memory:
    """The parameters of a unit: its groups, in the order of their first parameters, and its whole buffers."""

    def __init__(self, unit: str, slots: Sequence[Slot], line: Line, offloaded: OffloadedState, owner: object) -> None:
        self.slots = slots
        self.line = line
        self.groups: list[Group] = []
        self.away: list[ParameterRecord] = []  # of groups that rest in another tier
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
        # How many of the moves were made, the last of them perhaps only begun. Below the top, which is
        # how many there are, parameters are at rest.
        self.level = 0
        self.top = 1
        self._kept_level = 0  # as many are left when whole parameters are freed
        self.pending: list[Work] | None = None  # the collectives of the last move, if it is under way
        self.whole: WholeBuffers | None = None  # kept without memory for the next gather, unless somebody holds a part
        # Known once the parameters are gathered: a tier could not be read on some rank (every rank has it then), or a tensor
        # subclass raised in `fsdp_post_all_gather`.
        self.failure: Exception | None = None
        # Whether all ranks hold the same of what travels as differences. [Note: what the others hold] (wire_gather.py)
        self.reference_is_shared = False
        self._unit = unit
        self._offloaded = offloaded
        self._owner: Callable[[], object] = weakref.ref(owner)
        self._known: list[Record] = []  # records of the earlier groups, which new groups may take over
        self._told: Outcome | None = None  # whether the fetch went well on each rank
        self._moves: tuple[list[Move], list[Move]] = ([], [])  # before and after the reference is shared
        self._arrivals: Arrivals = {}

    def __iter__(self) -> Iterator[Group]:
        return iter(self.groups)

    def group_of(self, slot: Slot) -> Group:
        """The group of a parameter of the unit."""
        return next(group for group in self.groups if group.kind is slot.kind)

    # -- memory -----------------------------------------------------------------------------------------------------

    def form(self, dtypes: Sequence[torch.dtype], devices: Sequence[torch.device]) -> None:
        """Groups the parameters by how they rest, compute and are summed. `dtypes` and `devices`: of each at rest."""
        self._known = self.records()
        self.groups = groups_of(self.slots, dtypes, devices)
        self.reshards_after_backward = any(slot.home.reshard_after is ReshardAfter.BACKWARD for slot in self.slots)

    def lay_out(self) -> None:
        """Allocates the buffers at rest, and drops those that were gathered of earlier ones."""
        for group in self.groups:
            group.lay_out(self._record_for)
        self._known = []
        self.away = [group.record for group in self.groups if group.record is not None]
        self.is_transient = any(group.is_transient for group in self.groups)
        self.is_local = all(each.kind.lands or (each.kind.is_kept and not each.kind.is_cut) for each in self.groups)
        self.top = depth_of(self.groups)
        self._forget_whole()

    def _forget_whole(self) -> None:
        self.level = self._kept_level = 0
        self.pending = self.whole = self.failure = None
        self.reference_is_shared = False

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
            for group in self.groups:
                group.vacate()
        self.whole = None

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
        return [record for group in self.groups for record in group.records()]

    def kept(self) -> list[Tensor]:
        """The buffers beside resting parameters that stay in memory."""
        return [buffer for group in self.groups for buffer in group.kept()]

    @property
    def gathered_nbytes(self) -> int:
        """Bytes of the buffers that have memory during a use only, and of records."""
        whole = sum(group.whole.nbytes for group in self.groups if group.is_transient and group.whole is not None)
        return whole + sum(group.kind.records_nbytes(slot.path) for group in self.groups for slot in group.slots)

    @property
    def landing_nbytes(self) -> int:
        """Bytes that are in memory from the fetch on, where the end of the fetch is all that a gather waits for; else 0."""
        return sum(group.landing_nbytes for group in self.groups) if self.is_local else 0

    @property
    def padding_nbytes(self) -> int:
        """Bytes of padding in the memory at rest."""
        return sum(group.padding_nbytes for group in self.groups)

    # -- at rest ----------------------------------------------------------------------------------------------------

    def write(self, values: Mapping[Slot, Tensor]) -> None:
        """Fills the memory of parameters with this rank's elements of them. No communication."""
        with torch.no_grad():
            for group in self.groups:
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
        if self.away:
            failure = self._arrived(exact=True)
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

    @property
    def moves(self) -> list[Move]:
        """The moves of a gather, once buffers were cut."""
        return self._moves[self.reference_is_shared]

    @property
    def is_at_rest(self) -> bool:
        """Whether the parameters are not gathered, and no gather is under way."""
        return self.level < self.top

    @property
    def is_whole(self) -> bool:
        """Whether the parameters are gathered."""
        return self.level == self.top and self.pending is None

    def fetch(self) -> None:
        """Begins to read resting parameters from their tier, for the next gather."""
        if self.is_at_rest:
            for record in self.away:
                record.fetch_ahead()

    def gather(self, unit: object) -> None:
        """Makes the moves up to the last, and begins that; `wait` waits for it. `unit` gathers again when backward needs a
        freed buffer."""
        if self.away:
            self.failure = self._arrived(exact=False)
            if self.may_fail:
                self._told = Outcome(self.line, self.failure, f"Fetching {self._unit}")
        if self.whole is None:
            self._cut(unit)
        else:
            self.whole.renew()
        for move in self._moves[self.reference_is_shared][self.level :]:
            for fill in move.fill:
                fill(self._arrivals)
            self.level += 1
            if self._arrivals:
                self.pending = self._send_beside(move)
            else:
                self.pending = self._send(move)
            if self.level < self.top:
                self.pending = None
                self._kept_level += move.is_kept
        if self.away:
            self._let_go()

    def _send(self, move: Move) -> list[Work]:
        """Codes this rank's own parts, and issues the all-gathers. Of the last move they are still to be waited for."""
        for encode in move.encode:
            encode()
        works = []
        for line, plan in move.sends:
            works.append(line.all_gather(plan, move.what))
        if self.level < self.top:
            for work in works:
                work.wait()
            for decode in move.decode:
                decode()
        return works

    def _send_beside(self, move: Move) -> list[Work]:
        """The same on the stream of copies from the host, which are waited for there: what computes waits in `wait`."""
        (stream,) = self._arrivals
        with stream.there:
            works = self._send(move)
            self._arrivals[stream] = stream.there.record_event()
        return works

    def _cut(self, unit: object) -> None:
        """Cuts the whole buffers into parameters and into what moves."""
        self.whole = whole = WholeBuffers(unit, self.slots, self.groups)
        extended = [segment for each in whole.travelling.values() for segment in each.segments]
        self._moves = moves_of(whole.of_groups, extended, self.line, self._unit)
        assert len(self._moves[0]) == self.top, f"{self._unit}: {self._moves[0]}"
        whole.note_references()

    def wait(self) -> None:
        """Waits for the move that is under way."""
        if self._told is not None:
            self.failure = self._told.failed_on_any_rank()
            self._told = None
        assert self.pending is not None and self.whole is not None, f"{self._unit}: nothing was begun"
        for work in self.pending:
            work.wait()
        while self._arrivals:
            stream, end = self._arrivals.popitem()
            stream.wait_for(end)
        for decode in self._moves[self.reference_is_shared][-1].decode:
            decode()
        self.reference_is_shared = True
        if self.whole.travelling:
            try:
                self.whole.make_products()
            except Exception as error:  # in the user's tensor subclass; `Unit.await_gathered` raises it
                self.failure = self.failure or error
        self.pending = None

    def free(self) -> None:
        """Frees the gathered parameters; kept buffers stay but count as out of date."""
        if self.away:
            self._let_go()
        if self.level < self.top:
            return
        if self.pending is not None:
            self.wait()
        self.failure = None
        if self.whole is not None and not self.whole.free():
            self.whole = None
        self.level = self._kept_level

    def outdate(self) -> None:
        """Resting parameters have changed: the next gather makes all moves. To be called again when whole ones are freed."""
        self._kept_level = 0
        if self.level < self.top:
            self.level = 0

    def drop(self) -> None:
        """Drops the gathered parameters, and gives up a gather under way, wherever an interrupt has left it."""
        pending, told, self.pending, self._told = self.pending, self._told, None, None
        if told is not None:
            told.failed_on_any_rank()
        for work in pending or ():
            work.wait()  # the next message would be taken for it
        self._let_go()
        self._arrivals = {}
        self._forget_whole()

    @property
    def may_fail(self) -> bool:
        """Whether parameters may fail to arrive from their tier on one rank alone. The same on all."""
        return any(record.shelf.may_fail for record in self.away)

    def _arrived(self, *, exact: bool) -> StorageError | None:
        """Waits until resting parameters in other tiers can be read; returns the first failure."""
        failures = [record.arrived(exact=exact) for record in self.away]
        return next((failure for failure in failures if failure is not None), None)

    def _let_go(self) -> None:
        for record in self.away:
            record.let_go()


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
