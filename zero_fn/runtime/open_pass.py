"""What the forwards and the backwards of one transformed module share: its units, the pass that is
open, and how a unit is gathered and freed in it."""

from __future__ import annotations

import weakref
from collections.abc import Callable

from torch import nn

from zero_fn.runtime.call import Calls
from zero_fn.runtime.module_buffers import ModuleBuffers
from zero_fn.runtime.passes import BackwardPass, ForwardPass, Graphs
from zero_fn.runtime.resting_edits import watch_edits
from zero_fn.runtime.unit import Unit
from zero_fn.tiers.offloaded_state import OffloadedState
from zero_fn.transport.agree import Unions
from zero_fn.transport.line import Line
from zero_fn.values.assignment import Assignment
from zero_fn.values.schedule import (
    Action,
    Await,
    Event,
    Fetch,
    Unshard,
    fetch_ahead,
    land_ahead,
    prefetch,
)

__all__ = ["PREFETCH_DEPTH", "OpenPass", "no_unit"]

PREFETCH_DEPTH = 1
_FETCH_DEPTH = 1  # Enters between the fetch of a unit from its tier and its gather


class OpenPass:
    """One transformed module: its units, and the pass that is open."""

    def __init__(self, transport: Line, assignment: Assignment) -> None:
        self.transport = transport
        self.assignment = assignment
        self.depth = PREFETCH_DEPTH  # how many units are gathered ahead of their use
        self.units: list[Callable[[], Unit | None]] = []  # weakly, by index
        self.offloaded = OffloadedState(transport)
        self.buffers = ModuleBuffers(transport, are_local=assignment.buffers == "local")
        self.graphs = Graphs()
        self.bits = Unions(transport)  # what ranks tell one another about a pass
        self.calls = Calls()
        self.accumulating = 0  # how many `accumulate` blocks are open
        # Whether ranks have agreed on layouts and values since the transform,
        # or since values were loaded.
        self.has_agreed = False
        self.forward: ForwardPass | None = None
        self.backward: BackwardPass | None = None
        # A backward has begun, and not everything is back. [Note: interrupted passes] (call.py)
        self.is_backward_open = False

    # -- the module --------------------------------------------------------------------------------

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
        """Events with gathers, and fetches from tiers, moved ahead of their uses:
        they run beside the computation."""
        memories = {unit.index: unit.memory for unit in self.live_units()}
        events = prefetch(
            events,
            depth=self.depth,
            stays=lambda unit: bool(memories[unit].away) and memories[unit].is_local,
        )
        events = land_ahead(events, nbytes_of=lambda unit: memories[unit].landing_nbytes)
        is_fetched = {
            unit: bool(each.away) and not each.landing_nbytes for unit, each in memories.items()
        }
        return fetch_ahead(events, is_away=is_fetched.__getitem__, depth=_FETCH_DEPTH)

    # -- units -------------------------------------------------------------------------------------

    def do(self, action: Action) -> None:
        """Carries out one action of a schedule, of a forward or a backward:
        gathers, fetches or frees a unit."""
        kind, unit = type(action), self.units[action.unit]()
        assert unit is not None, f"unit {action.unit} is gone"
        if kind is Unshard:
            # Where whole parameters are registered for a block, forwards gather nothing;
            # backwards of forwards before it do.
            if self.forward is None or unit.visible.leaves is None:
                unit.unshard()
        elif kind is Await:
            unit.await_gathered()
        elif kind is Fetch:
            if unit.visible.leaves is None:
                unit.gather.fetch()
        elif self.forward is not None:
            self.reshard(unit, grad=self.forward.grad)
        elif not unit.running and unit.memory.is_transient:
            unit.reshard()
        elif not unit.running:
            # A unit that runs stays gathered: only the ranks that run its
            # next use would gather it again.
            unit.leave_backward()

    def reshard(self, unit: Unit, *, grad: bool) -> None:
        """Frees the gathered parameters of a unit that is not running,
        unless they are kept until the backward (`grad`)."""
        if (
            unit.memory.is_transient
            and not unit.running
            and not (grad and unit.memory.reshards_after_backward)
        ):
            unit.reshard()

    # -- interrupts --------------------------------------------------------------------------------

    def abandon(self) -> None:
        """Puts everything at rest if the forward that is open was interrupted.
        [Note: interrupted passes] (call.py)

        Raises:
            StateError: It is running in another thread.
        """
        if self.calls.are_interrupted():
            self.start_over()
            self.has_agreed = False
            self.forward = None
            watch_edits(self, is_open=False)
            self.calls.forward = []

    def start_over(self) -> None:
        """Leaves all units, whatever an interrupted pass has done to them."""
        self.calls.leave()
        for unit in self.live_units():
            unit.start_over()
        self.bits.finish_unread()
        self.calls.backward = []


def no_unit() -> Unit | None:
    """Stands, in a copy of part of a model, for a unit that was not copied."""
    return None
