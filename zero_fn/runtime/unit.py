"""A unit: parameters that are gathered, freed and reduced together, and the memory they use.

What a rank holds for each parameter, by home, for `numel` elements over `n` ranks:

    home       at rest                       in flight                     gradient after backward
    NOTHING    whole                         the same memory               whole
    OPTIMIZER  a view of the kept buffer     kept buffer, whole            a view of a whole gradient buffer
    GRADS      a view of the kept buffer     kept buffer, whole            a shard
    PARAMS     a shard                       whole, freed between uses     a shard

[Note: away] Parameters whose resting memory is in another tier are a record of the unit there, and tensors without memory
(`TierTensor`) stand for them. The record is fetched before each gather, copied into the gathered buffer, and let go. That
buffer is freed between uses at every stage: keeping it would keep the parameters in memory. A disk may fail on one rank, so
each gather of such a unit carries a byte of each rank that says so, and all ranks raise the same.

Where the compute dtype differs from the dtype at rest, the shard (or the whole, for NOTHING) rests in a buffer of its
own and the kept buffer has the compute dtype.
"""

from __future__ import annotations

import copy
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from enum import Enum, auto
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from zero_fn.errors import PlacementError, StateError, StorageError
from zero_fn.home import ReshardAfter
from zero_fn.mesh import Axis
from zero_fn.resting import local_of, resting_parameter
from zero_fn.runtime.changes import Changes
from zero_fn.runtime.everywhere import Told, tell
from zero_fn.runtime.gathered import Gathered
from zero_fn.runtime.gradients import GradientMemory, Gradients, Reduction
from zero_fn.runtime.group import Group, groups_of
from zero_fn.runtime.kind import Shelved
from zero_fn.runtime.names import Names
from zero_fn.runtime.record import Form, Record, record_of
from zero_fn.runtime.replaced import on_other_memory, resting_successor
from zero_fn.runtime.slot import Slot
from zero_fn.runtime.swapped import swapped_values
from zero_fn.runtime.tier_tensor import TierTensor, same_place
from zero_fn.runtime.uncompiled import uncompiled
from zero_fn.tiled import is_tile
from zero_fn.transport.links import Links, Waits

if TYPE_CHECKING:
    from zero_fn.runtime.step import Step

__all__ = ["Phase", "Unit", "unit_of"]


class Phase(Enum):
    """Where the gathered parameters of a unit are: AT_REST -> GATHERING -> GATHERED -> AT_REST, nothing else."""

    AT_REST = auto()
    GATHERING = auto()
    GATHERED = auto()


class Unit:
    """The parameters of one anchor module over one axis.

    Attributes:
        name: Name of the anchor module in the transformed module; "" is the root.
        index: Its number in the step, the same on every rank.
        slots: Its parameters, in registration order.
        groups: Its parameters by kind, and the buffers they have.
        is_away: Whether any resting parameter is in another tier.
        is_transient: Whether any gathered parameter is freed between uses.
        watched: Which parameters were trained when hooks on their nodes were looked for.
        deferred_in: The last backward (its graph task) whose gradients of the unit were reduced outside autograd.
        generation: Counts optimizer steps: a gradient computed with older parameters is refused.
        backward_entry: While backward is in the unit, the entry at which its forward began; else None.
        demanded_in: The backward (its graph task) that has put it there.
        is_left: Whether a backward inside that one has run its nodes: it may be resharded once that one goes on.
        last_entry: The entry at which its last forward with gradients began, weakly.
        is_evicted: Whether its parameters are in another tier, and cannot be used.
        swapped: Tensors that stand in for parameters in the running forward, by slot: `torch.func.functional_call`.
        has_model_axes: Whether any of its parameters is a DTensor in flight.
        leaves: Whole parameters that are registered in place of the resting ones, in a block that gathers once.
        lenders: Numbers of units around it whose parameters stand in modules inside it too (ties).
        gathered: The memory of the gathered parameters, from the gather until they are freed.
        changes: What forwards have changed in gathered parameters.
        open: Forwards of the unit that are running (more than one when a module calls itself).
        anchor: The anchor module, weakly.
        inner: Modules below the anchor whose hooks are taken out while the unit runs.
        reshards_after_backward: Whether gathered parameters stay from forward to backward.
    """

    def __init__(
        self, name: str, index: int, slots: list[Slot], axis: Axis | None, transport: Links, step: Step
    ) -> None:
        self.name, self.index, self.slots, self.axis = name, index, slots, axis
        self.transport, self.step = transport, step
        self.phase = Phase.AT_REST
        self.generation = 0
        self.open = 0
        self.anchor: Callable[[], nn.Module | None] = _no_anchor
        self.lenders: tuple[int, ...] = ()
        self.inner: list[weakref.ref[nn.Module]] = []
        self.deferred_in: int | None = None
        self.watched: list[bool] = []
        self.last_entry: Callable[[], object] = _no_entry
        self.pinned: list[Tensor] | None = None
        self.leaves: list[nn.Parameter] | None = None
        self.swapped: dict[int, Tensor] = {}
        self.has_model_axes = any(slot.model is not None for slot in slots)
        self.reshards_after_backward = any(slot.home.reshard_after is ReshardAfter.BACKWARD for slot in slots)
        self.groups: list[Group] = []
        self.is_away = self.is_transient = False
        self._known_records: list[Record] = []
        self._failure: StorageError | None = None
        self._told: Told | None = None
        self.gradients, self._names = Gradients(slots), Names(slots)
        self.changes = Changes()
        self.gathered: Gathered | None = None
        self._spare: Gathered | None = None  # without memory, for the next gather
        self._pending: Waits | None = None
        self._memory: tuple[list[bool], GradientMemory] | None = None
        self._backward_tensors: list[Tensor] = []
        self.backward_entry: object = None
        self.demanded_in, self.is_left = -1, False
        self.is_evicted = False
        self._gathering, self._reducing = f"parameters of {self}", f"gradients of {self}"
        step.units.append(weakref.ref(self))
        for slot in slots:
            slot.owner = weakref.ref(self)

    # -- memory at rest ---------------------------------------------------------------------------------------------

    def settle_in(self, sources: list[Tensor], owned: list[Tensor]) -> None:
        """Lays out the memory at rest and fills it.

        Args:
            sources: For each slot, the parameter it takes the place of.
            owned: For each slot, what this rank holds of it from now on.
        """
        self.allocate([source.requires_grad for source in sources])
        with self.in_memory():
            for slot, values in zip(self.slots, owned, strict=True):
                if values.device.type != "meta":
                    slot.path.local_view(slot.flat).copy_(values)

    def allocate(self, requires_grad: list[bool]) -> None:
        """Lays out the memory at rest, and registers parameters on it. Their values are still to be written."""
        self._lay_out()
        for slot, flag in zip(self.slots, requires_grad, strict=True):
            parameter = resting_parameter(slot.resting_local(), slot.spec, requires_grad=flag)
            slot.adopt(parameter, slot.flat)
            for place in slot.places:
                place.register(parameter)

    @contextmanager
    def in_memory(self) -> Iterator[None]:
        """Inside, resting parameters in another tier are in memory; what is written into them arrives there at the end."""
        with ExitStack() as stack:
            for group in self.groups:
                stack.enter_context(group.in_memory())
            yield

    @property
    def is_gone(self) -> bool:
        """Whether its modules were taken out of the model, and nobody holds them."""
        return bool(self.slots) and all(place.is_gone for slot in self.slots for place in slot.places)

    def readopt(self) -> None:
        """Follows parameters that `.to`, `to_empty`, `deepcopy` or `load_state_dict(assign=True)` moved elsewhere.

        Raises:
            PlacementError: A parameter was replaced by one that is not sharded as the unit is, or its `.data` was assigned.
        """
        self.swapped = {}
        if self.leaves is not None:
            return
        if self.pinned is None:
            for slot in self.slots:
                if not slot.is_current():
                    break
            else:
                return
        if self.is_evicted:
            raise StateError(
                "The model is evicted: its parameters are not in memory.",
                unit=self.name or "root",
                fix="bring it back first: evicted = zf.evict(model, optimizer, to=...); ...; evicted.restore()",
            )
        for slot in self.slots:
            slot.refuse_assignment()
        self.swapped = swapped_values(self.slots)
        if self.pinned is not None:
            return
        if self.swapped and all(i in self.swapped or slot.is_current() for i, slot in enumerate(self.slots)):
            return
        self.reshard()
        with torch.inference_mode(False), torch.no_grad():  # memory made in inference mode could never be trained
            self._take_over([resting_successor(slot) for slot in self.slots])

    def vacate(self) -> None:
        """Drops the memory of parameters, whose values were taken elsewhere; `readopt` raises until they are back."""
        self.reshard()
        self.is_evicted = True
        if all(isinstance(slot.flat, TierTensor) for slot in self.slots):
            return  # it is in another tier already
        for group in self.groups:
            group.vacate()
        self._spare = self._memory = None

    def move_in_again(self) -> None:
        """Undoes `vacate`, when parameters have memory again."""
        self.is_evicted = False
        self.readopt()

    def _take_over(self, moved: list[nn.Parameter]) -> None:
        locals_ = [local_of(parameter) for parameter in moved]
        self.form_groups([parameter.dtype for parameter in moved], [local.device for local in locals_])
        self._lay_out()
        with self.in_memory():
            for slot, parameter, local in zip(self.slots, moved, locals_, strict=True):
                if not same_place(local, slot.flat):
                    view = slot.resting_local()
                    if local.device.type != "meta":
                        view.copy_(local)
                    parameter = on_other_memory(parameter, view, slot)
                slot.adopt(parameter, slot.flat)
                for place in slot.places:
                    place.register(slot.parameter)

    def __deepcopy__(self, memo: dict[int, Any]) -> Unit:
        for slot in self.slots:  # a copy of a parameter has no gradient: torch says so, and forgets it for DTensors
            grad, slot.parameter.grad = slot.parameter.grad, None
            copy.deepcopy(slot.parameter, memo).grad = None
            slot.parameter.grad = grad
        # The copied modules may still be under construction: the twin finds its parameters at its first `readopt`.
        twin = object.__new__(Unit)
        memo[id(self)] = twin
        twin.name, twin.index, twin.axis, twin.transport = self.name, self.index, self.axis, self.transport
        twin.phase, twin.generation, twin.open = Phase.AT_REST, 0, 0
        twin.pinned, twin.leaves, twin.lenders = None, None, self.lenders
        twin.anchor = _no_anchor
        twin.inner, twin.has_model_axes, twin.groups = [], self.has_model_axes, []
        twin._known_records, twin.is_away, twin.is_transient = [], False, False
        twin.reshards_after_backward = self.reshards_after_backward
        twin.deferred_in, twin.watched, twin.swapped, twin.last_entry = None, [], {}, _no_entry
        twin.gathered, twin._spare, twin._pending, twin._backward_tensors = None, None, None, []
        twin._failure, twin._told = None, None
        twin.demanded_in, twin.is_left = -1, False
        twin.backward_entry, twin._memory, twin.is_evicted = None, None, self.is_evicted
        twin._gathering, twin._reducing = self._gathering, self._reducing
        twin.slots = [slot.twin(memo) for slot in self.slots]
        twin.gradients, twin._names, twin.changes = Gradients(twin.slots), Names(twin.slots), Changes()
        for slot in twin.slots:
            slot.owner = weakref.ref(twin)
        twin.step = copy.deepcopy(self.step, memo)
        twin.step.units[self.index] = weakref.ref(twin)
        return twin

    def form_groups(self, dtypes: Sequence[torch.dtype], devices: Sequence[torch.device]) -> None:
        """Decides how the parameters, of these dtypes on these devices, rest, compute and are summed."""
        records = self._records()
        self.groups = groups_of(self.slots, dtypes, devices)
        self._known_records = records

    def _lay_out(self) -> None:
        self._memory = self._spare = None
        self.watched = []
        for group in self.groups:
            group.lay_out(self._record_for)
        self.is_away = any(group.record is not None for group in self.groups)
        self.is_transient = any(group.is_transient for group in self.groups)
        self._known_records = []

    def group_of(self, slot: Slot) -> Group:
        """The group of one of its parameters."""
        return next(group for group in self.groups if group.kind is slot.kind)

    def _records(self) -> list[Record]:
        return [record for group in self.groups for record in group.records()]

    def _record_for(self, what: Shelved, forms: list[Form], device: torch.device, record_type: type[Record]) -> Record:
        """Room in another tier; that of before, where nothing has changed. [Note: away]"""
        for known in self._known_records:
            if type(known) is record_type and known.is_for(what[1], forms, device):
                self._known_records.remove(known)
                return known
        away = self.step.away
        record = record_type(away.shelf(what), forms, device, away.place_for(what, forms, device))
        record.owner = weakref.ref(self)
        return record

    # -- gathered parameters ----------------------------------------------------------------------------------------

    @property
    def is_replaced(self) -> bool:
        """Whether the running forward uses other tensors in place of every parameter."""
        return bool(self.swapped) and len(self.swapped) == len(self.slots)

    def unshard(self, *, even_pinned: bool = False) -> None:
        """Issues the all-gather; `await_gathered` makes its result readable."""
        if self.phase is not Phase.AT_REST or self.is_replaced or (self.pinned is not None and not even_pinned):
            return
        if self.is_away:
            self._failure = self._arrive()
        for group in self.groups:
            if group.inner is not None and not group.is_inner_current:
                group.gather_inner(self.transport, str(self))
        gathered, self._spare = self._spare, None
        if gathered is None:
            gathered = Gathered(self, self.slots, self.groups, self.transport)
        else:
            gathered.renew()
        self.gathered = gathered
        gathered.fill_own(has_failed=self._failure is not None)
        if gathered.segments:
            gathered.wait_for_own()
        self._pending = self.transport.all_gather(gathered.segments, self._gathering) if gathered.segments else None
        self.phase = Phase.GATHERING
        if self.is_away:
            self._let_go()
            self._told = tell(self.transport, self._failure, f"Fetching {self}")

    def fetch(self) -> None:
        """Begins to bring resting parameters from their tier, for the next `unshard`."""
        if self.phase is Phase.AT_REST and self.pinned is None and self.leaves is None and not self.is_replaced:
            for group in self.groups:
                group.fetch()

    def _arrive(self, *, exact: bool = False) -> StorageError | None:
        """Waits for resting parameters that are in another tier; the first failure. `exact`: see `Group.arrive`."""
        failures = [group.arrive(exact=exact) for group in self.groups]
        return next((failure for failure in failures if failure is not None), None)

    def _let_go(self) -> None:
        for group in self.groups:
            group.let_go()

    def expire(self) -> None:
        """The resting parameters may have changed: whatever was gathered of them counts as out of date."""
        self.reshard()
        for group in self.groups:
            group.is_inner_current = False

    def await_gathered(self) -> None:
        """Waits for the all-gather that `unshard` issued.

        Raises:
            StorageError: The tier of resting parameters failed, on this rank or another: on every rank. The unit is at rest.
        """
        if self.phase is Phase.GATHERING:
            self.finish_gathering()
        if self._failure is not None:
            failure, self._failure = self._failure, None
            self.reshard()
            raise failure

    def finish_gathering(self) -> None:
        """The same; a failure is raised by the next `await_gathered`, unless the unit is resharded before."""
        if self.phase is not Phase.GATHERING:
            return
        if self._pending is not None:
            self._pending.wait()
            self._pending = None
        if self.gathered is not None:
            self.gathered.wait_for_own()
        if self._told is not None:
            self._failure = self._told.failure(self._failure)
            self._told = None
        self.phase = Phase.GATHERED

    def reshard(self) -> None:
        """Frees the gathered parameters; kept buffers stay but count as out of date."""
        if self.backward_entry is not None:
            self.leave_backward()
        if self.is_away:
            self._let_go()
        if self.phase is Phase.AT_REST:
            return
        if self.phase is Phase.GATHERING:
            self.finish_gathering()
        self._failure = None
        gathered, self.gathered = self.gathered, None
        if gathered is not None and gathered.free():
            self._spare = gathered
        self.phase = Phase.AT_REST

    def tensors(self) -> list[Tensor]:
        """The parameters as the forward sees them: whole, in the compute dtype, fresh autograd identities."""
        if self.pinned is not None:
            return [
                whole.to(slot.kind.compute_dtype) if slot.kind.compute_dtype != whole.dtype else whole.data
                for slot, whole in zip(self.slots, self.pinned, strict=True)
            ]
        assert self.phase is Phase.GATHERED and self.gathered is not None, f"unit {self.name!r} is {self.phase}"
        return self.gathered.tensors()

    def buffer_for_backward(self, group: int) -> Tensor:
        """The gathered buffer that a packed tensor lies in, gathered again if it was freed."""
        if (
            self.phase is not Phase.GATHERED or self.backward_entry is None
        ):  # backward has come, or this is the first it sees
            self.step.demand(self)
        if self.pinned is not None:  # of a forward before `unsharded`: what it saved are not the copies in there
            self.unshard(even_pinned=True)
            self.await_gathered()
        assert self.gathered is not None, f"unit {self.name!r} is {self.phase}"
        return self.gathered.buffers[group]

    def buffers(self) -> list[Tensor]:
        """All memory of parameters that the unit holds beside that of its resting ones."""
        gathered = self.gathered.buffers if self.gathered is not None else ()
        return [*(kept for group in self.groups for kept in group.kept()), *gathered, *(self.pinned or ())]

    @property
    def gathered_nbytes(self) -> int:
        """Bytes of its gathered parameters that are freed between uses."""
        return sum(group.whole.nbytes for group in self.groups if group.is_transient and group.whole is not None)

    @property
    def local_gradient_nbytes(self) -> int:
        """Bytes of the whole gradients that a backward makes, and that are freed once they are reduced."""
        return sum(
            slot.path.numel * slot.kind.compute_dtype.itemsize for slot in self.slots if slot.parameter.requires_grad
        )

    def padding_nbytes(self) -> tuple[int, int]:
        """Bytes of padding in the memory at rest, and in that of gradients."""
        is_away = any(group.kind.is_gradient_away for group in self.groups)
        return sum(
            group.padding_nbytes for group in self.groups
        ), 0 if is_away else self.gradient_memory().padding_nbytes

    # -- gradients --------------------------------------------------------------------------------------------------

    def gradient_memory(self) -> GradientMemory:
        """The layout of the gradients of the parameters that are trained now."""
        trained = [slot.parameter.requires_grad for slot in self.slots]
        if self._memory is None or self._memory[0] != trained:
            taken = self._memory[1].taken if self._memory is not None else []
            memory = GradientMemory([slot for slot, flag in zip(self.slots, trained, strict=True) if flag], taken)
            self._memory = (trained, memory)
        return self._memory[1]

    def add_gradients(self, grads: Sequence[Tensor | None], *, exact: bool, pending: bool = False) -> None:
        """Adds to the local gradients; see `Gradients.add` and, where they stay local for now, `Gradients.add_pending`.

        Raises:
            PlacementError: A gradient is sparse.
        """
        for slot, grad in zip(self.slots, grads, strict=True):
            if grad is not None and grad.layout is not torch.strided:
                raise PlacementError(
                    "Sparse gradients cannot be reduced over an axis.",
                    parameter=slot,
                    unit=self.name or "root",
                    fix="compute it with sparse=False: F.embedding(tokens, weight)",
                )
        if pending:
            self.gradients.add_pending(grads, self.gradient_memory())
        else:
            self.gradients.add(grads, self.gradient_memory(), exact=exact)

    def reduce_local(self, *, exact: bool, present: Sequence[bool] | None = None) -> Reduction:
        """Issues the reduction of the local gradients, which the unit then no longer holds.

        Args:
            exact: See `Reduction`.
            present: For each parameter, whether any rank has a gradient; of parameters frozen since, too.
        """
        memory = self.gradient_memory()
        if present is not None and any(
            has_any and slot not in memory.ranges for slot, has_any in zip(self.slots, present, strict=True)
        ):
            memory = GradientMemory(
                [slot for slot, has_any in zip(self.slots, present, strict=True) if has_any or slot in memory.ranges]
            )
        local, buffers = self.gradients.take(memory)
        return Reduction(self.slots, memory, local, self.transport, str(self), exact=exact, buffers=buffers)

    def has_pending(self) -> bool:
        """Whether gradients wait on this rank that the user did not drop."""
        self.gradients.forget_dropped()
        return not self.gradients.is_empty

    @property
    def is_in_use(self) -> bool:
        """Whether a forward of the unit runs, a block of the user has its parameters whole, or gradients wait."""
        return self.open > 0 or self.pinned is not None or self.leaves is not None or self.has_pending()

    def reduce(self, grads: Sequence[Tensor | None]) -> Reduction:
        """Issues the reduction of these gradients."""
        return Reduction(self.slots, self.gradient_memory(), grads, self.transport, str(self), exact=True)

    # -- whole parameters outside forward ---------------------------------------------------------------------------

    def gather_whole(self) -> list[Tensor]:
        """New tensors with the whole parameters in the dtype at rest. Communicates one all-gather; waits."""
        wholes, pending = self.issue_whole()
        if pending is not None:
            pending.wait()
        return wholes

    def issue_whole(self) -> tuple[list[Tensor], Waits | None]:
        """The same, not waited for.

        Raises:
            StorageError: The tier of resting parameters failed, on this rank or another: on every rank.
        """
        if self.is_away:
            failure = self._arrive(exact=True)
            told = tell(self.transport, failure, f"Fetching {self}")
            failure = told.failure(failure)
            if failure is not None:
                raise failure
        wholes, segments = [], []
        for slot in self.slots:
            own = slot.flat
            if isinstance(own, TierTensor):
                own = record_of(own).values(own.number)
            if slot.path.layout is None:
                wholes.append(slot.path.whole_view(own).to(slot.flat.device, copy=True))
                continue
            flat = torch.empty(slot.path.layout.padded_numel, dtype=slot.dtype, device=slot.flat.device)
            flat.narrow(0, slot.path.start, slot.path.local_numel).copy_(own)
            segments.append(slot.path.segment(flat))
            wholes.append(slot.path.whole_view(flat))
        self._let_go()
        return wholes, self.transport.all_gather(segments, f"whole parameters of {self}") if segments else None

    def scatter_whole(self, wholes: Mapping[Slot, Tensor]) -> None:
        """Writes this rank's part of whole parameters back to rest. No communication."""
        with self.in_memory():
            for slot, whole in wholes.items():
                slot.local.copy_(slot.path.owned(local_of(whole)))

    # -- in flight --------------------------------------------------------------------------------------------------

    @uncompiled
    def shadow(self, tensors: list[Tensor]) -> None:
        """Lets modules see `tensors` under the names of the parameters."""
        self._names.show(tensors)

    def shadow_for_backward(self, tensors: list[Tensor], entry: object) -> None:
        """As `shadow`, until the unit is resharded, for the backward of a forward that began at `entry`."""
        self._backward_tensors, self.backward_entry = tensors, entry
        self.shadow(tensors)

    def leave_backward(self) -> None:
        """Undoes `shadow_for_backward`, if backward was in the unit."""
        if self.backward_entry is not None:
            tensors, self._backward_tensors = self._backward_tensors, []
            self.backward_entry, self.is_left = None, False
            self.unshadow()
            if self.phase is Phase.GATHERED and self.leaves is None:
                self.changes.keep(self, tensors)

    @uncompiled
    def unshadow(self) -> None:
        """Undoes `shadow`."""
        if self._backward_tensors:
            self._names.show(self._backward_tensors)
        else:
            self._names.hide()

    def hide_gathered(self) -> None:
        """Lets modules see resting parameters, whatever backward has shown them."""
        if self.backward_entry is not None:
            self._names.hide()

    @property
    def requires_grad(self) -> bool:
        """Whether any parameter of the unit is trained."""
        return any(slot.parameter.requires_grad for slot in self.slots)

    def modules(self) -> list[nn.Module]:
        """The modules that hold the parameters, each once."""
        found = {id(place.module): place.module for slot in self.slots for place in slot.places}
        return list(found.values())

    @property
    def is_tile(self) -> bool:
        """Whether it is a part of a tiled module."""
        return any(map(is_tile, self.modules()))

    def __str__(self) -> str:
        return f"unit {self.name or 'root'}"

    def __repr__(self) -> str:
        return f"Unit({self.name or 'root'!r}, {len(self.slots)} parameters, {self.phase.name})"


def unit_of(slot: Slot | None) -> Unit | None:
    """The unit of a parameter; None if it is gone, or if there is no parameter."""
    unit = slot.owner() if slot is not None else None
    assert unit is None or isinstance(unit, Unit)
    return unit


def _no_anchor() -> nn.Module | None:
    """Of a unit whose anchor was not copied with it."""
    return None


def _no_entry() -> None:
    """Of a unit that has not run."""
