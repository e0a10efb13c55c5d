"""One transformed module, apart from its running passes: its units, their transport, their tiers."""

from __future__ import annotations

from collections.abc import Callable

from torch import nn

from zero_fn.runtime.away import Away
from zero_fn.runtime.blocks import UserBlock
from zero_fn.runtime.control import Control
from zero_fn.runtime.graphs import Graphs
from zero_fn.runtime.unit import Unit
from zero_fn.transport.line import Line
from zero_fn.values.assignment import Assignment
from zero_fn.values.schedule import Event, fetch_ahead, prefetch

__all__ = ["PREFETCH_DEPTH", "Transformed"]

PREFETCH_DEPTH = 1
_FETCH_DEPTH = 1  # Enters between the fetch of a unit from its tier and its gather


class Transformed:
    """One transformed module.

    Attributes:
        transport: Collectives over the data axes.
        assignment: The homes and options that the transforms asked for.
        depth: How many units are gathered ahead of their use (prefetch).
        units: Weak references to the units, by index.
        lenders: For each unit, the units around it whose parameters also stand in modules inside it (ties).
        away: The storage of parameters and gradients in other tiers.
        control: The control messages between ranks.
        graphs: The graphs of forwards whose backward may come.
        accumulating: How many `accumulate` blocks are open.
        blocks: All blocks of the user that are open, or were interrupted while they closed.
        caller: The thread that has begun the last forward. It calls the backward, too.
    """

    def __init__(self, transport: Line, assignment: Assignment) -> None:
        self.transport, self.assignment, self.depth = transport, assignment, PREFETCH_DEPTH
        self.units: list[Callable[[], Unit | None]] = []
        self.lenders: dict[int, tuple[int, ...]] = {}
        self.away = Away(transport)
        self.control = Control(transport)
        self.graphs = Graphs()
        self.accumulating = self.caller = 0
        self.blocks: list[UserBlock] = []

    def unit(self, index: int) -> Unit:
        """The unit of this number."""
        unit = self.units[index]()
        assert unit is not None, f"unit {index} is gone"
        return unit

    def live_units(self) -> list[Unit]:
        """The units that are alive, in order."""
        return [unit for reference in self.units if (unit := reference()) is not None]

    def root(self) -> nn.Module | None:
        """The module that was transformed; None in a copy of a part of it."""
        unit = self.units[0]()
        return unit.anchor() if unit is not None else None

    def ahead(self, events: tuple[Event, ...]) -> tuple[Event, ...]:
        """Events with gathers, and fetches from tiers, moved ahead of their uses: they run beside the computation."""
        events = prefetch(events, depth=self.depth)
        return fetch_ahead(events, is_away=lambda index: self.unit(index).groups.is_away, depth=_FETCH_DEPTH)
