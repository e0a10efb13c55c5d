"""The forwards of one transformed module. Each follows the schedule of the last forward that began at the same unit.

[Note: interrupted passes] A KeyboardInterrupt may come between any two lines, and torch calls no hook after it. So a forward
is marked before it touches anything, with the frame in which it was called (`call`), and the mark goes when everything is
back. Whatever comes next (a call of the module, a verb, a load, a backward, an optimizer) looks whether the marked frame
still runs. If not, nothing is known of what the forward has done, and all units are put at rest as a whole. The next forward
then compares over ranks what they hold. A backward is marked likewise (`Backwards.is_open`).
"""

from __future__ import annotations

import weakref
from threading import get_ident
from types import FrameType
from typing import Protocol

import torch

from zero_fn.errors import StateError, StorageError
from zero_fn.runtime.edits import watch_edits
from zero_fn.runtime.ending import current_graph_task
from zero_fn.runtime.first_use import agree_on_units
from zero_fn.runtime.in_flight import Phase
from zero_fn.runtime.members import is_as_before, note_members
from zero_fn.runtime.passes import ForwardPass
from zero_fn.runtime.saved import drop_packing
from zero_fn.runtime.statistics import Statistics
from zero_fn.runtime.transformed import Transformed
from zero_fn.runtime.unit import Unit
from zero_fn.runtime.unwritten import require_memory, warn_of_unwritten_buffers
from zero_fn.runtime.use import UnitUse
from zero_fn.values.schedule import (
    Action,
    Await,
    Enter,
    Exit,
    Fetch,
    Leg,
    Reshard,
    Trace,
    Unshard,
    forward_schedule,
    legs,
)
from zero_fn.values.tiled import is_tile

__all__ = ["Door", "Forwards", "in_two_threads"]


class Door(Protocol):
    """Where a unit is entered.

    Attributes:
        attribute: The name of the method that is called.
    """

    attribute: str


class Forwards:
    """The forwards of one transformed module, of which one at most is open.

    Attributes:
        current: The forward that is open.
        call: The frame in which it was called; None if everything is at rest. [Note: interrupted passes]
        era: Counts how often interrupted calls were left.
        packed: How many `begin_packing` wait for their end.
        statistics: The module's buffers (running statistics).
        has_agreed: Whether ranks have compared layouts and values since the transform, or since values were loaded.
        is_fresh: Whether nothing was gathered yet in this `accumulate` block.
        recorded: The last forward that began at a unit, with gradients or without: its brackets, and its schedule.
    """

    def __init__(self, module: Transformed, statistics: Statistics) -> None:
        self._module, self.statistics = module, statistics
        self.current: ForwardPass | None = None
        self.call: FrameType | None = None
        self.era = self.packed = 0
        self.has_agreed, self.is_fresh = False, True
        self.recorded: dict[tuple[tuple[int, str], bool], tuple[Trace, tuple[Leg, ...]]] = {}
        self._present = 0  # how many units had their modules in the model in the last forward

    @property
    def are_open(self) -> bool:
        """Whether a forward of the module runs."""
        self.abandon()
        return self.current is not None

    @property
    def is_elsewhere(self) -> bool:
        """Whether a forward is open that another thread has called."""
        return self.call is not None and self._module.caller != get_ident() and current_graph_task() == -1

    def note_loaded(self) -> None:
        """Parameters were loaded: the next forward gathers them anew and compares them over ranks."""
        self.has_agreed, self.is_fresh = False, True

    # -- units ------------------------------------------------------------------------------------------------------

    def enter(self, unit: Unit, entry: Door) -> UnitUse:
        """The forward of a unit begins at `entry`: on return its gathered parameters may be read."""
        forward = self.current
        assert forward is not None, "no forward has begun"
        use = UnitUse(unit, forward.next_number(unit.index), entry)
        if forward.grad:
            unit.shown.last_entry = weakref.ref(entry)
        leg = forward.note(Enter, use)
        try:
            for action in leg.before if leg else ():
                self.do(action)
            unit.require_gathered()
            for action in leg.after if leg else ():
                self.do(action)
        except StorageError:  # raised on every rank alike: the unit is left again
            forward.failed = True
            forward.note(Exit, use)
            if forward.depth == 0:
                self._end(forward)
            raise
        unit.running += 1
        return use

    def leave(self, use: UnitUse, *, failed: bool) -> None:
        """The forward of a unit has ended."""
        unit, forward = use.unit, self.current
        unit.running -= 1
        if forward is None:  # a recomputation: the backward frees the unit
            if any(map(is_tile, unit.at_rest.modules())):  # but not all tiles of a module may be gathered at once
                self.reshard(unit, grad=True)
            return
        forward.failed |= failed
        on_schedule = forward.is_on_schedule
        leg = forward.note(Exit, use)
        is_outermost = forward.depth == 0
        if not failed:
            for action in (*leg.before, *leg.after) if leg else ():
                self.do(action)
            if not on_schedule and not is_outermost:
                self.reshard(unit, grad=torch.is_grad_enabled())
        if is_outermost:
            self._end(forward)

    def do(self, action: Action) -> None:
        """Carries out one action of a schedule, of a forward or a backward: gathers, fetches or frees a unit."""
        kind, unit = type(action), self._module.units[action.unit]()
        assert unit is not None, f"unit {action.unit} is gone"
        if kind is Unshard:
            # Where whole parameters are registered for a block, forwards gather nothing; backwards of forwards before it do.
            if self.current is None or unit.shown.leaves is None:
                unit.unshard()
        elif kind is Await:
            unit.await_gathered()
        elif kind is Reshard:
            assert self.current is not None, "backwards free what no forward uses"
            self.reshard(unit, grad=self.current.grad)
        else:
            assert kind is Fetch, f"no such action: {action}"
            if unit.shown.leaves is None:
                unit.in_flight.fetch()

    def reshard(self, unit: Unit, *, grad: bool) -> None:
        """Frees the gathered parameters of a unit that is not running, unless they are kept until the backward (`grad`)."""
        if unit.groups.is_transient and not unit.running and not (grad and unit.groups.reshards_after_backward):
            unit.reshard()

    # -- of the whole -----------------------------------------------------------------------------------------------

    def begin(self, unit: Unit, entry: Door) -> None:
        """A forward of the module begins at this unit."""
        self.prepare()
        self.is_fresh = False
        if self.statistics.is_active:
            self.statistics.note_begun()
        self._module.graphs.limit()
        grad = torch.is_grad_enabled()
        begun_at = (unit.index, entry.attribute)
        recorded = self.recorded.get((begun_at, grad))
        offsets = self._module.graphs.offsets()
        self.current = ForwardPass(begun_at, recorded[1] if recorded else None, offsets, grad=grad)
        watch_edits(self, is_open=True)

    def prepare(self) -> None:
        """To be called before parameters are gathered for use: follows moved ones, agrees over ranks, broadcasts buffers."""
        module, units = self._module, self._module.live_units()
        if not module.accumulating or self.is_fresh:
            for unit in units:
                unit.mark_stale()
        if not is_as_before(module):
            units = [unit for unit in units if not unit.at_rest.is_gone]
            for unit in units:
                unit.follow_moved()
            if len(units) != self._present:  # layers may be taken out of a model
                self._present = len(units)
                self.recorded.clear()
            note_members(module)
        self.agree()
        if self.statistics.is_active:
            self._broadcast_statistics()

    def agree(self) -> None:
        """Compares over ranks what they hold: once, and again after loading."""
        module = self._module
        if self.has_agreed:
            return
        if (root := module.root()) is not None:
            warn_of_unwritten_buffers(root)
        units = [unit for unit in module.live_units() if not unit.at_rest.is_gone]
        if module.assignment.axis is not None and module.transport.size > 1:
            require_memory([slot.fqn for unit in units for slot in unit.slots if slot.parameter.is_meta])
        self.has_agreed = True
        if module.assignment.axis is not None:
            agree_on_units(module.transport, units)
            self.statistics.begin()

    def _broadcast_statistics(self) -> None:
        """[Note: when buffers are broadcast]"""
        module, statistics = self._module, self.statistics
        bits, about = statistics.to_tell()
        if bits:
            statistics.told(module.control.any(bits, "which forwards change buffers", check=about))
        if not statistics.is_due or (module.accumulating and not self.is_fresh):
            return
        # If no rank holds them, the outputs of forwards that wait were dropped, and no backward can come.
        if module.graphs.is_waiting and module.control.any([module.graphs.is_held], "whose backward may come")[0]:
            return
        statistics.broadcast()

    def _end(self, forward: ForwardPass) -> None:
        self.current = None
        watch_edits(self, is_open=False)
        module = self._module
        if self.statistics.is_active:
            self.statistics.note_ended()
        if forward.failed:
            for unit in module.live_units():
                unit.reshard()
            return
        trace = forward.relative_trace()
        key = (forward.entry, forward.grad)
        recorded = self.recorded.get(key)
        if recorded is None or recorded[0] != trace:
            self.recorded[key] = (trace, legs(module.ahead(forward_schedule(trace, keeps_last=forward.grad))))
        kept = forward.kept_units() if forward.grad else set()
        for unit in module.live_units():
            if unit.in_flight.phase is Phase.AT_REST and not unit.groups.is_away:
                continue
            if unit.in_flight.phase is Phase.GATHERING:
                unit.in_flight.finish()  # prefetched and not used: a gather that is dropped would be taken for the next
            if unit.index not in kept:
                self.reshard(unit, grad=forward.grad)
        if forward.grad:
            module.graphs.add(forward)

    # -- interrupts ------------------------------------------------------------------------------------------------

    def abandon(self) -> None:
        """Puts everything at rest if the forward that is open was interrupted. [Note: interrupted passes]

        Raises:
            StateError: It is running in another thread.
        """
        if self.call is None:
            return
        try:
            self.call.clear()
        except RuntimeError:  # it is executing: see `still_runs`
            if self._module.caller != get_ident() and self.is_elsewhere:
                raise in_two_threads() from None
            return
        self.start_over()
        self.has_agreed = False
        self.current = self.call = None
        watch_edits(self, is_open=False)

    def start_over(self) -> None:
        """Leaves all units, whatever an interrupted pass has done to them."""
        self.era += 1
        drop_packing(self.packed)
        self.packed = 0
        for unit in self._module.live_units():
            unit.start_over()
        self._module.control.finish_unread()


def in_two_threads() -> StateError:
    """The error for a module that is called while another thread calls it."""
    return StateError(
        "A transformed module was called while another thread runs it.",
        why="both would gather into the same memory, and free it",
        fix="call it in one thread at a time: lock = threading.Lock(); with lock: y = model(x)",
    )
