"""The forwards of one transformed module.

Each follows the schedule of the last forward that began at the same unit.
"""

from __future__ import annotations

import weakref
from threading import get_ident

import torch

from zero_fn.errors import StorageError
from zero_fn.runtime.backward import Backward
from zero_fn.runtime.call import in_two_threads
from zero_fn.runtime.module_tree import is_as_before, note_members
from zero_fn.runtime.passes import ForwardPass
from zero_fn.runtime.resting_edits import watch_edits
from zero_fn.runtime.unit import ReadUse, Unit, UnitUse
from zero_fn.runtime.unit_agreement import agree_on_units
from zero_fn.runtime.unwritten_memory import require_memory, warn_of_unwritten_buffers
from zero_fn.transport.line import Line
from zero_fn.values.assignment import Assignment
from zero_fn.values.schedule import (
    Enter,
    Exit,
    Point,
    Trace,
    forward_schedule,
    points,
)
from zero_fn.values.tiled import is_tile

__all__ = ["Forward"]


class Forward(Backward):
    """The forwards of one transformed module, of which one at most is open."""

    def __init__(self, transport: Line, assignment: Assignment) -> None:
        super().__init__(transport, assignment)
        self.is_fresh = True  # nothing was gathered yet in this `accumulate` block
        # The last forward that began at a unit, with gradients or without:
        # its brackets, and its schedule.
        self.recorded: dict[tuple[tuple[int, str], bool], tuple[Trace, tuple[Point, ...]]] = {}
        self._present = 0  # how many units had their modules in the model in the last forward

    # -- units -------------------------------------------------------------------------------------

    def enter(
        self, unit: Unit, entry: object, method: str, reader: UnitUse | None = None
    ) -> UnitUse:
        """The forward of a unit begins at a method of `entry`, or that of `reader` reads its
        weights: on return its gathered parameters may be read."""
        forward = self.forward or self.begin(unit, method)
        if self.is_backward_open:
            self.recover_raised()
        number = forward.next_number(unit.index)
        use = UnitUse(unit, number, entry) if reader is None else ReadUse(unit, number, reader)
        if forward.grad:
            unit.visible.last_entry = weakref.ref(entry)
        point = forward.note(Enter, use)
        try:
            for action in point.before if point else ():
                self.do(action)
            unit.require_gathered()
            for action in point.after if point else ():
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
        unit, forward = use.unit, self.forward
        unit.running -= 1
        if forward is None:  # a recomputation: the backward frees the unit
            # Not all tiles of a module may be gathered at once.
            if any(map(is_tile, unit.modules())):
                self.reshard(unit, grad=True)
            return
        forward.failed |= failed
        on_schedule = forward.is_on_schedule
        point = forward.note(Exit, use)
        is_outermost = forward.depth == 0
        if not failed:
            for action in (*point.before, *point.after) if point else ():
                self.do(action)
            if not on_schedule and not is_outermost:
                self.reshard(unit, grad=torch.is_grad_enabled())
        if is_outermost:
            self._end(forward)

    # -- of the whole ------------------------------------------------------------------------------

    def begin(self, unit: Unit, method: str) -> ForwardPass:
        """A forward of the module begins at a method of this unit."""
        self.prepare()
        self.is_fresh = False
        if self.buffers.is_active:
            self.buffers.note_begun()
        self.graphs.limit()
        grad = torch.is_grad_enabled()
        begun_at = (unit.index, method)
        recorded = self.recorded.get((begun_at, grad))
        offsets = self.graphs.offsets()
        self.forward = ForwardPass(begun_at, recorded[1] if recorded else None, offsets, grad=grad)
        watch_edits(self, is_open=True)
        return self.forward

    def prepare(self) -> None:
        """To be called before parameters are gathered for use: recovers from a backward that
        raised, follows parameters that were moved, agrees over ranks, broadcasts buffers."""
        if self.is_backward_open:
            if self.backward is not None and self.backward.ending.is_elsewhere:
                raise in_two_threads()
            self.recover_backward()
        self.calls.thread = get_ident()
        units = self.live_units()
        if not self.accumulating or self.is_fresh:
            for unit in units:
                unit.mark_stale()
        root = self.root()
        if not is_as_before(root):
            units = [unit for unit in units if not unit.is_gone]
            for unit in units:
                unit.follow_moved()
            if len(units) != self._present:  # layers may be taken out of a model
                self._present = len(units)
                self.recorded.clear()
            note_members(root, self.live_units())
        self.agree()
        if self.buffers.is_active:
            self._broadcast_buffers()

    def agree(self) -> None:
        """Compares over ranks what they hold: once, and again after loading."""
        if self.has_agreed:
            return
        if (root := self.root()) is not None:
            warn_of_unwritten_buffers(root)
        units = [unit for unit in self.live_units() if not unit.is_gone]
        for unit in units:
            unit.gather.reference_is_shared = False
        if self.assignment.axis is not None and self.transport.size > 1:
            require_memory(
                [slot.fqn for unit in units for slot in unit.slots if slot.parameter.is_meta]
            )
        if self.assignment.axis is not None:
            agree_on_units(self.transport, units)
            self.buffers.begin()
        self.has_agreed = True  # not before: a caller may catch the error, and call again

    def _broadcast_buffers(self) -> None:
        """[Note: when buffers are broadcast]"""
        buffers = self.buffers
        bits, about = buffers.to_tell()
        if bits:
            buffers.told(self.bits.any(bits, "which forwards change buffers", check=about))
        if not buffers.is_due or (self.accumulating and not self.is_fresh):
            return
        # If no rank holds them, the outputs of forwards that wait were dropped,
        # and no backward can come.
        if (
            self.graphs.is_waiting
            and self.bits.any([self.graphs.is_held], "whose backward may come")[0]
        ):
            return
        buffers.broadcast()

    def _end(self, forward: ForwardPass) -> None:
        if self.is_backward_open:
            self.recover_raised()
        self.forward = None
        watch_edits(self, is_open=False)
        if self.buffers.is_active:
            self.buffers.note_ended()
        if forward.failed:
            for unit in self.live_units():
                unit.reshard()
            return
        trace = forward.relative_trace()
        key = (forward.begun_at, forward.grad)
        recorded = self.recorded.get(key)
        if recorded is None or recorded[0] != trace:
            self.recorded[key] = (
                trace,
                points(self.ahead(forward_schedule(trace, keeps_last=forward.grad))),
            )
        kept = forward.kept_units() if forward.grad else set()
        for unit in self.live_units():
            if unit.gather.level < unit.gather.top and not unit.memory.away:
                continue
            if unit.gather.pending is not None:
                # Prefetched and not used: a gather that is dropped would be taken for the next.
                unit.gather.wait()
            if unit.index not in kept:
                self.reshard(unit, grad=forward.grad)
        if forward.grad:
            self.graphs.add(forward)

    @property
    def is_forward_open(self) -> bool:
        """Whether a forward of the module runs."""
        self.abandon()
        return self.forward is not None
