"""The forwards of one transformed module. Each follows the schedule of the last forward that began at the same unit."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from threading import get_ident

import torch
from torch import nn

from zero_fn.errors import StateError, StorageError
from zero_fn.runtime.blocks import UserBlock
from zero_fn.runtime.call import Call, left_packing, still_runs
from zero_fn.runtime.edits import watch_edits
from zero_fn.runtime.ending import current_graph_task
from zero_fn.runtime.members import is_as_before, note_members
from zero_fn.runtime.passes import ForwardPass, Graphs, ReadUse, UnitUse
from zero_fn.runtime.saved import drop_packing
from zero_fn.runtime.statistics import Statistics
from zero_fn.runtime.unit import Unit
from zero_fn.runtime.unit_agreement import agree_on_units
from zero_fn.runtime.unwritten import require_memory, warn_of_unwritten_buffers
from zero_fn.tiers.offloaded_state import OffloadedState
from zero_fn.transport.agree import Bits
from zero_fn.transport.line import Line
from zero_fn.values.assignment import Assignment
from zero_fn.values.schedule import (
    Action,
    Await,
    Enter,
    Event,
    Exit,
    Fetch,
    Point,
    Trace,
    Unshard,
    fetch_ahead,
    forward_schedule,
    land_ahead,
    points,
    prefetch,
)
from zero_fn.values.tiled import is_tile

__all__ = ["PREFETCH_DEPTH", "Forward", "in_two_threads", "no_unit"]

PREFETCH_DEPTH = 1
_FETCH_DEPTH = 1  # Enters between the fetch of a unit from its tier and its gather


class Forward:
    """One transformed module: its units, and its forwards, of which one at most is open."""

    def __init__(self, transport: Line, assignment: Assignment) -> None:
        self.transport, self.assignment = transport, assignment
        self.depth = PREFETCH_DEPTH  # how many units are gathered ahead of their use
        self.units: list[Callable[[], Unit | None]] = []  # weakly, by index
        # For each unit, those around it that have parameters in it (ties).
        self.tied_around: dict[int, tuple[int, ...]] = {}
        self.offloaded = OffloadedState(transport)
        self.statistics = Statistics(transport, are_local=assignment.buffers == "local")
        self.graphs = Graphs()
        self.blocks: list[UserBlock] = []  # all that are open, or were interrupted while they closed
        self.accumulating = 0  # how many `accumulate` blocks are open
        self.caller = 0  # the thread that has begun the last forward; it calls the backward, too
        self.forward: ForwardPass | None = None  # the one that is open
        self.calls: list[
            Call
        ] = []  # of forwards, outermost first; none if all is at rest. [Note: interrupted passes] (call.py)
        self.recomputations: list[Call] = []  # in a backward, outermost first
        self.is_backward_open = False  # begun, and not everything is back. [Note: interrupted passes]
        self.reads: list[ReadUse] = []  # weights that running forwards have read of other units, oldest first
        self.has_agreed = False  # on layouts and values, since the transform, or since values were loaded
        self.is_fresh = True  # nothing was gathered yet in this `accumulate` block
        # The last forward that began at a unit, with gradients or without: its brackets, and its schedule.
        self.recorded: dict[tuple[tuple[int, str], bool], tuple[Trace, tuple[Point, ...]]] = {}
        self._present = 0  # how many units had their modules in the model in the last forward
        self._unread: list[Bits] = []

    # -- the module -------------------------------------------------------------------------------------------------

    def adopt(self, unit: Unit) -> None:
        """Registers a unit: a new one, or the copy of the one with its index."""
        if unit.index == len(self.units):
            self.units.append(no_unit)
        self.units[unit.index] = weakref.ref(unit)

    def live_units(self) -> list[Unit]:
        """The units that are alive, in order."""
        return [unit for reference in self.units if (unit := reference()) is not None]

    def unit(self, index: int) -> Unit:
        """The unit of this number."""
        unit = self.units[index]()
        assert unit is not None, f"unit {index} is gone"
        return unit

    def root(self) -> nn.Module | None:
        """The module that was transformed; None in a copy of a part of it."""
        unit = self.units[0]()
        return unit.anchor() if unit is not None else None

    def ahead(self, events: tuple[Event, ...]) -> tuple[Event, ...]:
        """Events with gathers, and fetches from tiers, moved ahead of their uses: they run beside the computation."""
        memories = {unit.index: unit.memory for unit in self.live_units()}
        events = prefetch(
            events, depth=self.depth, stays=lambda unit: bool(memories[unit].away) and memories[unit].is_local
        )
        events = land_ahead(events, nbytes_of=lambda unit: memories[unit].landing_nbytes)
        is_fetched = {unit: bool(each.away) and not each.landing_nbytes for unit, each in memories.items()}
        return fetch_ahead(events, is_away=is_fetched.__getitem__, depth=_FETCH_DEPTH)

    # -- what ranks tell one another --------------------------------------------------------------------------------

    def any(self, local: list[bool], what: str, *, check: str = "", second: Sequence[bool] = ()) -> list[bool]:
        """The bits `local`, or-ed over ranks. If some are set on no rank, those of `second` follow. If all are set on this
        rank, the host does not wait. `what`: what they mean, for errors; `check`: a text that must be equal on all ranks."""
        message = Bits(self.transport, [*local, *second], what, check=check)
        if all(local):
            self._unread.append(message)  # the result is known: the host need not wait for it now
            return local
        union = message.read()
        return union[: len(local)] if all(union[: len(local)]) else union

    def finish_unread(self) -> None:
        """Waits for the messages that nobody had to read."""
        unread, self._unread = self._unread, []
        for message in unread:
            message.finish_unread()

    # -- units ------------------------------------------------------------------------------------------------------

    def enter(self, unit: Unit, door: object, method: str, reader: UnitUse | None = None) -> UnitUse:
        """The forward of a unit begins at a method of `door`, or that of `reader` reads its weights: on return its gathered
        parameters may be read."""
        forward = self.forward or self.begin(unit, method)
        if self.is_backward_open:
            self.recover_raised()
        number = forward.next_number(unit.index)
        use = UnitUse(unit, number, door) if reader is None else ReadUse(unit, number, reader)
        if forward.grad:
            unit.shown.last_door = weakref.ref(door)
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
            if any(map(is_tile, unit.modules())):  # but not all tiles of a module may be gathered at once
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

    def do(self, action: Action) -> None:
        """Carries out one action of a schedule, of a forward or a backward: gathers, fetches or frees a unit."""
        kind, unit = type(action), self.units[action.unit]()
        assert unit is not None, f"unit {action.unit} is gone"
        if kind is Unshard:
            # Where whole parameters are registered for a block, forwards gather nothing; backwards of forwards before it do.
            if self.forward is None or unit.shown.leaves is None:
                unit.unshard()
        elif kind is Await:
            unit.await_gathered()
        elif kind is Fetch:
            if unit.shown.leaves is None:
                unit.gather.fetch()
        elif self.forward is not None:
            self.reshard(unit, grad=self.forward.grad)
        elif not unit.running and unit.memory.is_transient:
            unit.reshard()
        elif not unit.running:  # it stays gathered: only the ranks that run its next use would gather it again
            unit.leave_backward()

    def reshard(self, unit: Unit, *, grad: bool) -> None:
        """Frees the gathered parameters of a unit that is not running, unless they are kept until the backward (`grad`)."""
        if unit.memory.is_transient and not unit.running and not (grad and unit.memory.reshards_after_backward):
            unit.reshard()

    # -- of the whole -----------------------------------------------------------------------------------------------

    def begin(self, unit: Unit, method: str) -> ForwardPass:
        """A forward of the module begins at a method of this unit."""
        self.prepare()
        self.is_fresh = False
        if self.statistics.is_active:
            self.statistics.note_begun()
        self.graphs.limit()
        grad = torch.is_grad_enabled()
        begun_at = (unit.index, method)
        recorded = self.recorded.get((begun_at, grad))
        offsets = self.graphs.offsets()
        self.forward = ForwardPass(begun_at, recorded[1] if recorded else None, offsets, grad=grad)
        watch_edits(self, is_open=True)
        return self.forward

    def prepare(self) -> None:
        """To be called before parameters are gathered for use: follows moved ones, agrees over ranks, broadcasts buffers."""
        self.caller = get_ident()
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
        if self.statistics.is_active:
            self._broadcast_statistics()

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
            require_memory([slot.fqn for unit in units for slot in unit.slots if slot.parameter.is_meta])
        if self.assignment.axis is not None:
            agree_on_units(self.transport, units)
            self.statistics.begin()
        self.has_agreed = True  # not before: a caller may catch the error, and call again

    def _broadcast_statistics(self) -> None:
        """[Note: when buffers are broadcast]"""
        statistics = self.statistics
        bits, about = statistics.to_tell()
        if bits:
            statistics.told(self.any(bits, "which forwards change buffers", check=about))
        if not statistics.is_due or (self.accumulating and not self.is_fresh):
            return
        # If no rank holds them, the outputs of forwards that wait were dropped, and no backward can come.
        if self.graphs.is_waiting and self.any([self.graphs.is_held], "whose backward may come")[0]:
            return
        statistics.broadcast()

    def _end(self, forward: ForwardPass) -> None:
        if self.is_backward_open:
            self.recover_raised()
        self.forward = None
        watch_edits(self, is_open=False)
        if self.statistics.is_active:
            self.statistics.note_ended()
        if forward.failed:
            for unit in self.live_units():
                unit.reshard()
            return
        trace = forward.relative_trace()
        key = (forward.entry, forward.grad)
        recorded = self.recorded.get(key)
        if recorded is None or recorded[0] != trace:
            self.recorded[key] = (trace, points(self.ahead(forward_schedule(trace, keeps_last=forward.grad))))
        kept = forward.kept_units() if forward.grad else set()
        for unit in self.live_units():
            if unit.gather.level < unit.gather.top and not unit.memory.away:
                continue
            if unit.gather.pending is not None:
                unit.gather.wait()  # prefetched and not used: a gather that is dropped would be taken for the next
            if unit.index not in kept:
                self.reshard(unit, grad=forward.grad)
        if forward.grad:
            self.graphs.add(forward)

    def recover_raised(self) -> None:
        """Recovers from a backward inside the forward, if it has raised. (backward.py)"""
        raise NotImplementedError

    # -- interrupts ------------------------------------------------------------------------------------------------

    @property
    def is_forward_open(self) -> bool:
        """Whether a forward of the module runs."""
        self.abandon()
        return self.forward is not None

    @property
    def is_elsewhere(self) -> bool:
        """Whether a forward is open that another thread has called."""
        return bool(self.calls) and self.caller != get_ident() and current_graph_task() == -1

    def abandon(self) -> None:
        """Puts everything at rest if the forward that is open was interrupted. [Note: interrupted passes] (call.py)

        Raises:
            StateError: It is running in another thread.
        """
        if not self.calls:
            return
        if still_runs(self.calls[0].frame):
            if self.caller != get_ident() and self.is_elsewhere:
                raise in_two_threads()
            return
        self.start_over()
        self.has_agreed = False
        self.forward = None
        watch_edits(self, is_open=False)
        self.calls = []

    def start_over(self) -> None:
        """Leaves all units, whatever an interrupted pass has done to them."""
        drop_packing(left_packing((*self.calls, *self.recomputations)))
        self.reads = []
        for unit in self.live_units():
            unit.start_over()
        self.finish_unread()
        self.recomputations = []


def in_two_threads() -> StateError:
    """The error for a module that is called while another thread calls it."""
    return StateError(
        "A transformed module was called while another thread runs it.",
        why="both would gather into the same memory, and free it",
        fix="call it in one thread at a time: lock = threading.Lock(); with lock: y = model(x)",
    )


def no_unit() -> Unit | None:
    """Stands, in a copy of part of a model, for a unit that was not copied."""
    return None
