"""One transformed module while it runs: follows its schedules and falls back when the model leaves them.

A `Step` belongs to the module a transform returned and is shared by its units. It has at most one forward pass and one
backward pass open.

[Note: every rank runs the same program] Which gradients exist may differ between ranks, so it decides nothing by itself.
A backward begins by or-ing over ranks which uses will run; the schedule is built from that, and a rank whose graph
misses a use takes part in its gather and contributes zeros. Reductions are issued in the order of the schedule, not
in the order of arrival.

[Note: recomputation in a unit] A checkpoint inside a unit runs parts of its forward again in backward, possibly parts that
read a parameter by its name. From the moment backward reaches the unit until it is resharded, the names show gathered
parameters again, through one autograd node of their own; the modules inside step aside as they did in forward.

[Note: nested backward] A reentrant checkpoint runs a backward inside the backward. Its uses are not in the schedule:
they gather on demand, and a unit is reduced as soon as none of its nodes is left. The outer backward settles them. The
backward around it may still recompute other checkpoints of the unit, and hooks there read parameters before a module is
called: the unit is resharded when the backward that demanded it goes on.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from threading import Lock, get_ident
from typing import TYPE_CHECKING, Any, Protocol
from zlib import crc32

import torch
from torch import Tensor

from zero_fn.assignment import Assignment
from zero_fn.errors import StorageError
from zero_fn.runtime.away import Away
from zero_fn.runtime.buffers import Buffers
from zero_fn.runtime.control import Control
from zero_fn.runtime.first_use import agree_on_units
from zero_fn.runtime.gather import UnitUse, gather_again, returns_gradients
from zero_fn.runtime.graphs import Graphs
from zero_fn.runtime.passes import REDUCTIONS_UNDER_WAY, BackwardPass, ForwardPass, Script, current_graph_task
from zero_fn.runtime.settling import Settling
from zero_fn.runtime.uncompiled import uncompiled
from zero_fn.schedule import (
    Action,
    Await,
    Enter,
    Event,
    Exit,
    Fetch,
    Leg,
    Reduce,
    Reshard,
    Settle,
    Trace,
    Unshard,
    Use,
    fetch_ahead,
    forward_schedule,
    legs,
    prefetch,
)
from zero_fn.transport.links import Links

if TYPE_CHECKING:
    from zero_fn.runtime.unit import Unit

__all__ = ["Door", "Step"]

PREFETCH_DEPTH = 1
FETCH_DEPTH = 1  # Enters between the fetch of a unit from its tier and its gather

_keeps_graph = torch._C._autograd._get_current_graph_task_keep_graph


class Door(Protocol):
    """Where a unit is entered.

    Attributes:
        attribute: The name of the method that is called.
    """

    attribute: str

    def is_on_stack(self, thread: int) -> bool:
        """Whether a call of it is running in a thread."""


class Step:
    """The running state of one transformed module.

    Attributes:
        assignment: What was asked of the module.
        units: Weak references to its units, by index.
        away: What of it rests in other tiers.
        accumulating: Depth of open `accumulate` blocks.
        caller: The thread that has begun the last forward; it calls the backward, too.
        has_agreed: Whether ranks compared layouts and values, since the transform or since values were loaded.
    """

    def __init__(self, transport: Links, assignment: Assignment, *, depth: int = PREFETCH_DEPTH) -> None:
        self.transport, self.assignment, self.depth = transport, assignment, depth
        self.units: list[Callable[[], Unit | None]] = []
        self.buffers = Buffers(transport, are_local=assignment.buffers == "local")
        self.accumulating = self.caller = 0
        self.away = Away(transport, assignment)
        self.has_agreed = False
        self._is_fresh = True  # nothing was gathered yet in this accumulate block
        self._updates = 0  # of units, by optimizers
        self._forward: ForwardPass | None = None
        self._forward_door: Door | None = None  # at which it began
        self._backward: BackwardPass | None = None
        self._recorded: dict[tuple[tuple[int, str], bool], tuple[Trace, tuple[Leg, ...]]] = {}
        self._present = 0  # units whose modules were there in the last forward
        self._script: Script | None = None  # of the last backward
        self._graphs = Graphs()
        self._left: list[Unit] = []  # by nested backwards, still to be resharded
        self._control = Control(transport, assignment)
        self._settling = Settling(self.away, self._control)
        self._recovering = Lock()  # [Note: threads of the engine]

    def __deepcopy__(self, memo: dict[int, Any]) -> Step:
        twin = Step(self.transport, self.assignment, depth=self.depth)
        memo[id(self)] = twin
        twin.units = [_no_unit] * len(self.units)
        return twin

    def unit(self, index: int) -> Unit:
        """The unit of this number."""
        unit = self.units[index]()
        assert unit is not None, f"unit {index} is gone"
        return unit

    def live_units(self) -> list[Unit]:
        """All units, in order."""
        return [unit for reference in self.units if (unit := reference()) is not None]

    def recorded_trace(self) -> Trace | None:
        """The longest forward that was recorded for training, if any."""
        traces = [trace for (_, grad), (trace, _) in self._recorded.items() if grad]
        return max(traces, key=len, default=None)

    @property
    def is_in_forward(self) -> bool:
        """Whether a forward of the module runs."""
        self.abandon()
        return self._forward is not None

    # -- forward ----------------------------------------------------------------------------------------------------

    @uncompiled
    def enter(self, unit: Unit, entry: Door) -> UnitUse:
        """The forward of a unit begins at `entry`: on return its gathered parameters may be read."""
        if current_graph_task() != -1:
            return self._enter_recomputation(unit, entry)
        if self._forward is None:
            self._begin_forward(unit, entry)
        assert self._forward is not None
        use = UnitUse(unit, self._forward.next_number(unit.index), entry)
        if self._forward.grad:
            unit.last_entry = weakref.ref(entry)
        before = self._forward.note(Enter, use)
        try:
            for action in before:
                self._run(action)
            unit.unshard()
            unit.await_gathered()
            for action in self._forward.after():
                self._run(action)
        except StorageError:  # on every rank alike: what was entered is left again
            self._give_up_entering(self._forward, use)
            raise
        unit.open += 1
        return use

    def _give_up_entering(self, forward: ForwardPass, use: UnitUse) -> None:
        forward.failed = True
        forward.note(Exit, use)
        if forward.depth == 0:
            self._end_forward(forward)

    @uncompiled
    def leave(self, use: UnitUse, *, failed: bool) -> None:
        """The forward of a unit has ended."""
        unit = use.unit
        unit.open -= 1
        forward = self._forward
        if forward is None:  # recomputation: the backward frees it
            if unit.is_tile:  # but all parts of a module must not be there at once
                self._reshard_in_forward(unit, grad=True)
            return
        forward.failed |= failed
        on_schedule = forward.is_on_schedule
        before = forward.note(Exit, use)
        is_outermost = forward.depth == 0
        if not failed:
            for action in (*before, *forward.after()):
                self._run(action)
            if not on_schedule and not is_outermost:
                self._reshard_in_forward(unit)
        if is_outermost:
            self._end_forward(forward)

    def _begin_forward(self, unit: Unit, entry: Door) -> None:
        is_swapped = self.prepare()
        self._is_fresh = False
        self._graphs.limit()
        grad = torch.is_grad_enabled()
        begun_at = (unit.index, entry.attribute)
        recorded = self._recorded.get((begun_at, grad)) if not is_swapped else None
        self._forward = ForwardPass(begun_at, recorded[1] if recorded else None, self._graphs.offsets(), grad=grad)
        self._forward_door = entry
        self._forward.is_swapped = is_swapped

    def prepare(self) -> bool:
        """Before parameters are gathered for use: what moved is followed, ranks agree, buffers are those of rank 0.

        Returns:
            Whether other tensors stand in for some parameters.
        """
        self._recover()
        self.caller = get_ident()
        is_swapped, present = False, 0
        for other in self.live_units():
            if other.is_gone:
                continue
            present += 1
            if not self.accumulating or self._is_fresh:
                other.expire()
            other.readopt()
            is_swapped |= bool(other.swapped)
        if present != self._present:
            self._forget_gone(present)
        if not self.has_agreed:
            self._agree()
        if self.buffers.is_active and not is_swapped:
            self._broadcast_buffers()
        return is_swapped

    def _forget_gone(self, present: int) -> None:
        """Layers may be taken out of a model: no pass follows what was recorded with them."""
        self._present = present
        gone = {i for i, unit in enumerate(self.units) if (found := unit()) is None or found.is_gone}
        self._recorded = {
            key: recorded
            for key, recorded in self._recorded.items()
            if gone.isdisjoint(bracket.use.unit for bracket in recorded[0])
        }

    def _agree(self) -> None:
        """Ranks compare what they hold, once, and again after loading."""
        self.has_agreed = True
        if self.assignment.axis is not None:
            agree_on_units(self.transport, [unit for unit in self.live_units() if not unit.is_gone])
            self.buffers.begin()

    def _broadcast_buffers(self) -> None:
        """[Note: when buffers are broadcast]"""
        for notes in self._control.take_notes():
            self.buffers.told(notes)
        if self._graphs.is_waiting or (self.accumulating and not self._is_fresh):
            return
        if self.buffers.must_ask:
            self.buffers.told(self._control.any(self.buffers.bits(), "which buffers changed"))
        self.buffers.broadcast()

    def _reshard_in_forward(self, unit: Unit, *, grad: bool | None = None) -> None:
        grad = torch.is_grad_enabled() if grad is None else grad
        if unit.is_transient and not unit.open and not (grad and unit.reshards_after_backward):
            unit.reshard()

    def _end_forward(self, forward: ForwardPass) -> None:
        self._forward = self._forward_door = None
        if self.buffers.is_active:
            self.buffers.note()
        if forward.is_swapped:
            for unit in self.live_units():
                unit.swapped = {}
        if forward.failed:
            for unit in self.live_units():
                unit.reshard()
            return
        trace = forward.relative_trace()
        key = (forward.entry, forward.grad)
        recorded = self._recorded.get(key)
        if not forward.is_swapped and (recorded is None or recorded[0] != trace):
            events = self._ahead(forward_schedule(trace, keeps_last=forward.grad))
            self._recorded[key] = (trace, legs(events))
        kept = forward.kept_units() if forward.grad else set()
        for unit in self.live_units():
            unit.finish_gathering()  # what was prefetched and not used: a gather that is dropped would be taken for the next
            if unit.index not in kept:
                self._reshard_in_forward(unit, grad=forward.grad)
        if forward.grad:
            self._graphs.add(forward)

    # -- backward ---------------------------------------------------------------------------------------------------

    def demand(self, unit: Unit, use: UnitUse | None = None, *, recomputes: bool = False) -> None:
        """Backward, or a recomputation in it, needs the gathered parameters of a unit."""
        backward = self._open_backward()
        self._reshard_left()
        if backward is not None:
            key = backward.enter(unit.index, use.number if use is not None else None, recomputes=recomputes)
            if use is not None and use.is_passed_only:
                use.has_arrived = True  # nothing else will tell
            use = use or (self._graphs.use(key) if key is not None else None)
            self._pump(backward)
        unit.unshard()
        unit.await_gathered()
        began_at = use.began_at if use is not None else unit.last_entry()
        if began_at is not None and backward is not None:
            self._prepare_recomputation(unit, began_at)

    def arrive(self, use: UnitUse, grads: Sequence[Tensor | None] | None) -> None:
        """All gradients of one use are there. `grads` is None if they go back through autograd."""
        backward = self._open_backward()
        self._reshard_left()
        unit = use.unit
        key = Use(unit.index, use.number)
        scheduled = backward is not None and backward.has(key)
        if grads is not None:
            exact = backward is None or not scheduled or backward.uses_of(unit.index) > 1
            unit.add_gradients(grads, exact=exact, pending=bool(self.accumulating))
        if backward is None:
            return
        backward.arrive(key)
        use.has_arrived = True
        if not scheduled and grads is not None and not self.accumulating and not self._has_nodes(unit):
            self._leave_nested(unit)
            while len(backward.reductions) >= REDUCTIONS_UNDER_WAY:
                self._settling.settle(*backward.reductions.pop(0))
            backward.reductions.append((unit, unit.reduce_local(exact=True)))
        self._pump(backward)

    def _leave_nested(self, unit: Unit) -> None:
        """Reshards a unit, now or when the backward that demanded it goes on. [Note: nested backward]"""
        if unit.backward_entry is not None and current_graph_task() > unit.demanded_in:
            self._left.append(unit)
            unit.is_left = True
        else:
            unit.reshard()

    def _reshard_left(self) -> None:
        """Reshards what nested backwards have left, once they have ended. [Note: nested backward]"""
        if self._left:
            now = current_graph_task()  # tasks inside others have larger numbers
            for unit in self._left:
                if unit.is_left and now <= unit.demanded_in:
                    unit.reshard()
            self._left = [unit for unit in self._left if unit.is_left]

    def finish_backward(self, backward: BackwardPass) -> None:
        """Called by the engine when the outermost backward has run all its nodes."""
        if self._backward is not backward:
            return
        backward.closing = True
        self._pump(backward)
        for unit, reduction in backward.reductions:
            self._settling.settle(unit, reduction)
        if not self.accumulating:
            for unit in self.live_units():
                if not unit.gradients.is_empty:
                    self._settling.settle(unit, unit.reduce_local(exact=True))
            self._settling.decide()
        self._end_backward()
        if not self.accumulating:
            self.away.finish_gradients(self.live_units())

    def give_up(self, backward: BackwardPass) -> None:
        """Called when the engine is done with a backward. If it raised, names show resting parameters again, and what was
        under way is waited for: should the model be dropped now, other models would take its messages for theirs.
        """
        if self._backward is backward:
            self._recover()

    def show_resting(self, backward: BackwardPass) -> None:
        """Lets names show resting parameters again after a backward that raised, unless it was recovered meanwhile."""
        with self._recovering:
            if self._backward is backward:
                for unit in self.live_units():
                    unit.hide_gathered()

    def _open_backward(self) -> BackwardPass | None:
        if current_graph_task() == -1:
            return None  # a saved tensor was read outside backward
        if self._backward is not None and self._backward.is_alive:
            return self._backward
        self.abandon()
        self._recover()
        uses = self._graphs.entered()
        alive = [self._graphs.use(use) for use in uses]
        local = [use is not None and use.will_run for use in alive]
        later = [False] * len(uses) if all(local) else [use is not None and use.may_run_later for use in alive]
        # Optimizer steps are counted in: a rank that left a backward out would else take the next one of the others for it.
        passed = crc32(b"".join([use.unit.to_bytes(4, "little") for use in uses]), self._updates)
        what = "what the backward runs through"
        union = self._control.any(local, what, check=passed, second=later, notes=self.buffers.bits())
        taking_part = {use for use, runs in zip(uses, union, strict=False) if runs}
        # Where every use runs, forwards are done with: nothing was read then. [Note: forwards that wait]
        waiting = {use for use, waits in zip(uses, union[len(uses) :], strict=False) if waits}
        trace = [bracket for bracket in self._graphs.trace if bracket.use in taking_part]
        defers = not self.accumulating and not returns_gradients()
        reduced = frozenset(
            index for index in {use.unit for use in taking_part} if defers and self.unit(index).requires_grad
        )
        if self._script is None or not self._script.serves(trace, reduced):
            self._script = Script(trace, reduced, ahead=self._ahead)
        awaited, passed_only = set(), set()
        for key, use, runs in zip(uses, alive, local, strict=True):
            if use is not None and use.is_passed_only:
                passed_only.add(key)
            elif runs:
                awaited.add(key)
        self._backward = backward = BackwardPass(
            self._script, awaited=awaited, passed_only=passed_only, waiting=waiting, keeps_graph=_keeps_graph()
        )
        backward.register(self)
        return backward

    def _ahead(self, events: tuple[Event, ...]) -> tuple[Event, ...]:
        """What comes next is gathered, and before that fetched, beside what is computed."""
        events = prefetch(events, depth=self.depth)
        return fetch_ahead(events, is_away=lambda index: self.unit(index).is_away, depth=FETCH_DEPTH)

    def _pump(self, backward: BackwardPass) -> None:
        """Runs the events of the schedule up to the first that must wait for autograd."""
        while (action := backward.next_action()) is not None:
            self._run(action)

    def _run(self, action: Action) -> None:
        kind, unit = type(action), self.units[action.unit]()
        assert unit is not None, f"unit {action.unit} is gone"
        if kind is Unshard:
            unit.unshard()
        elif kind is Await:
            unit.await_gathered()
        elif kind is Reshard:
            if self._forward is not None:
                self._reshard_in_forward(unit, grad=self._forward.grad)
            elif not unit.open and unit.is_transient:
                unit.reshard()
            elif not unit.open:
                # Kept: were it gathered again for its next use, only the ranks that run that use would do so.
                unit.leave_backward()
        elif kind is Reduce:
            assert self._backward is not None
            exact = self._backward.uses_of(unit.index) > 1
            self._backward.reductions.append((unit, unit.reduce_local(exact=exact)))
        elif kind is Settle:
            assert self._backward is not None
            if self._backward.reductions:  # else one that came out of order has settled it
                self._settling.settle(*self._backward.reductions.pop(0))
        else:
            assert kind is Fetch, f"no such action: {action}"
            unit.fetch()

    def _has_nodes(self, unit: Unit) -> bool:
        """Whether a graph through this unit is still alive and has not arrived."""
        uses = (*self._graphs.uses_of(unit.index), *self._recomputed)
        return any(use.unit is unit and use.is_awaited for use in uses)

    @property
    def _recomputed(self) -> list[UnitUse]:
        return self._backward.recomputed if self._backward is not None else []

    def is_recomputing(self, unit: Unit, entry: Door) -> bool:
        """Whether a checkpoint inside the unit runs `entry` again: its parameters are in place then."""
        if current_graph_task() == -1:
            return False
        began = self._graphs.uses_of(unit.index)
        if any(use.began_at is entry for use in began):
            return False  # the unit was entered here, so it is now
        if unit.backward_entry is None and any(use.is_awaited for use in began):
            self.demand(unit, recomputes=True)  # before backward itself: the outputs were not watched
        found = unit.backward_entry is not None and unit.backward_entry is not entry
        if found:
            self._demand_lenders(unit)
        return found

    def _enter_recomputation(self, unit: Unit, entry: Door) -> UnitUse:
        """A checkpoint around the unit runs its forward inside backward."""
        backward = self._open_backward()
        assert backward is not None
        self.demand(unit, recomputes=True)
        self._demand_lenders(unit)
        use = UnitUse(unit, -1, entry)
        backward.recomputed.append(use)
        unit.open += 1
        return use

    def _demand_lenders(self, unit: Unit) -> None:
        """What the recomputed forward of a unit may read beyond its own: in forward, units around it were open."""
        for index in unit.lenders:
            lender = self.units[index]()
            if lender is not None and lender.backward_entry is None and not lender.open:
                self.demand(lender, recomputes=True)

    def _prepare_recomputation(self, unit: Unit, began_at: object) -> None:
        """Puts the parameters under their names, for checkpoints inside the unit. [Note: recomputation in a unit]"""
        if unit.backward_entry is None:
            unit.shadow_for_backward(gather_again(unit), began_at)
            unit.demanded_in = current_graph_task()

    def note_loaded(self) -> None:
        """Parameters were loaded: the next forward gathers them anew and compares them over ranks."""
        self.has_agreed, self._is_fresh = False, True

    # -- ends and errors --------------------------------------------------------------------------------------------

    def flush(self) -> None:
        """Reduces and settles all local gradients: the end of `accumulate`. All ranks call it."""
        units = self.live_units()
        if not units:
            return
        for unit in units:
            unit.gradients.unmark()
        local = [grad is not None for unit in units for grad in unit.gradients.local]
        union = iter(self._control.any(local, "which gradients were accumulated"))
        for unit in units:
            present = [next(union) for _ in unit.slots]
            if any(present):
                self._settling.settle(unit, unit.reduce_local(exact=True, present=present))
        self._settling.decide()
        self._control.read()
        self.away.finish_gradients(self.live_units())

    def drop_gradients(self) -> None:
        """Forgets local gradients that were not reduced."""
        for unit in self.live_units():
            unit.gradients.take(unit.gradient_memory())

    def begin_accumulation(self) -> None:
        """Entered by `accumulate`."""
        if not self.accumulating:
            self.recover()  # what a backward before left must not be taken for a part of this sum
            self._is_fresh = True
        self.accumulating += 1

    def end_accumulation(self, *, failed: bool) -> None:
        """Left by `accumulate`: reduces, or after an exception drops, what was accumulated."""
        self.accumulating -= 1
        if self.accumulating:
            return
        try:
            if not failed:
                failed = True  # until it is done: hooks of the user run inside
                self.flush()
                failed = False
        finally:
            if failed:
                self._recover()
                self._settling.drop()
                self._control.read()
                self.drop_gradients()
            for unit in self.live_units():
                unit.expire()

    def _end_backward(self) -> None:
        backward, self._backward = self._backward, None
        if backward is not None:
            self._graphs.leave(backward)
        self._control.read()
        self._left = []
        for unit in self.live_units():
            unit.leave_backward()
            if unit.is_transient or not self.accumulating:
                unit.reshard()

    def note_optimizer_step(self) -> None:
        """Graphs of forwards before it can have no backward any more."""
        self.abandon()
        self._updates += 1
        if self._backward is None and self._forward is None:
            self._graphs.forget()

    def recover(self) -> None:
        """Puts the module at rest if its last pass raised; verbs call it first. Ranks that raised alike stay in step."""
        self.abandon()
        if self._backward is not None and not self._backward.is_alive:
            self._recover()

    def abandon(self) -> None:
        """Ends a forward that was interrupted and left nothing. [Note: interrupted forwards] (entry.py)"""
        forward, door = self._forward, self._forward_door
        if forward is None or door is None or door.is_on_stack(self.caller):
            return
        forward.failed = True
        for unit in self.live_units():
            unit.open = 0
            unit.unshadow()
        self._end_forward(forward)

    def _recover(self) -> None:
        """Drops what a forward or backward that raised left behind. Ranks that raised alike stay in step."""
        backward = self._backward
        if backward is None:
            return
        backward.failed = True
        try:
            while (action := backward.next_action()) is not None:
                if type(action) is not Settle:  # which calls hooks of the user
                    self._run(action)
        finally:
            with self._recovering:
                self._backward = None
        for _, reduction in backward.reductions:
            reduction.wait()
        self._settling.drop()
        self._left = []
        self._control.read()
        self._graphs.forget()
        if not self.accumulating:
            self.drop_gradients()
        for unit in self.live_units():
            unit.open = 0
            unit.expire()


def _no_unit() -> Unit | None:
    """In a copy of part of a model, the place of a unit that was not copied."""
    return None
