"""A step, walked along the schedule that the runtime follows: how often each unit is gathered, and which bytes are in flight.

    gathered     whole parameters, from the event that issues their gather to the event that frees them
    gradients    whole local gradients of a unit, from the beginning of its backward until they were reduced

Gathered parameters that stay in memory between uses are not in flight: they count as held.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Set
from typing import NamedTuple

from zero_fn.runtime.passes import Script
from zero_fn.runtime.run import Run
from zero_fn.runtime.unit import Unit
from zero_fn.values.schedule import Enter, Exit, Reshard, Settle, Trace, Unshard, Use, forward_schedule

__all__ = ["Walk", "walk"]


class Walk(NamedTuple):
    """What a step does with the units of a module.

    Attributes:
        gathers: How often each unit is gathered, by its number.
        uses: How often each unit runs in a forward, by its number.
        in_flight_nbytes: Most bytes of gathered parameters and whole gradients on this rank at one moment.
    """

    gathers: Counter[int]
    uses: Counter[int]
    in_flight_nbytes: int


def walk(run: Run, *, backwards: int) -> Walk:
    """Counts along the schedule of the longest forward that was recorded and of its backward. Before the first forward it is
    the schedule of units that run in registration order.

    Args:
        run: The run of a transformed module.
        backwards: Backwards accumulated in the step. Of several, the gradients stay whole until the last.
    """
    units = {unit.index: unit for unit in run.module.live_units()}
    trained = frozenset(index for index, unit in units.items() if unit.gradients.are_wanted)
    recorded = (trace for (_, grad), (trace, _) in run.forwards.recorded.items() if grad)
    trace = max(recorded, key=len, default=None) or _nested_trace({index: unit.name for index, unit in units.items()})
    forward = run.module.ahead(forward_schedule(trace, keeps_last=True))
    reduced = trained if backwards == 1 else frozenset()
    backward = Script(_way_back(trace, trained), reduced, ahead=run.module.ahead).events
    uses = Counter(bracket.use.unit for bracket in trace if isinstance(bracket, Enter))
    gathers = Counter({index: 1 for index in uses if not units[index].groups.is_transient})
    gathered: set[int] = set()
    pending: set[int] = set()
    peak = 0
    gathered_nbytes = {index: unit.groups.gathered_nbytes for index, unit in units.items()}
    gradient_nbytes = {index: _gradient_nbytes(unit) for index, unit in units.items()}
    for events, in_forward in ((forward, True), (backward, False)) * backwards:
        for event in events:
            if isinstance(event, Unshard):
                gathers[event.unit] += units[event.unit].groups.is_transient and event.unit not in gathered
                gathered.add(event.unit)
            elif isinstance(event, Reshard) and not (in_forward and units[event.unit].groups.reshards_after_backward):
                gathered.discard(event.unit)
            elif isinstance(event, Enter) and not in_forward:
                pending.add(event.use.unit)
            elif isinstance(event, Settle):
                pending.discard(event.unit)
            whole = sum(map(gathered_nbytes.__getitem__, gathered))
            peak = max(peak, whole + sum(map(gradient_nbytes.__getitem__, pending)))
        if not in_forward:
            gathered.clear()  # a backward ends with every transient unit at rest
    return Walk(gathers, uses, peak)


def _gradient_nbytes(unit: Unit) -> int:
    """Bytes of the whole gradients of a unit, from the backward that makes them until they are reduced."""
    trained = (slot for slot in unit.slots if slot.parameter.requires_grad)
    return sum(slot.path.numel * slot.kind.compute_dtype.itemsize for slot in trained)


def _way_back(trace: Trace, trained: Set[int]) -> Trace:
    """The part of a forward that its backward runs through: the uses that end after the first trained unit has begun."""
    begun = False
    uses: set[Use] = set()
    for bracket in trace:
        begun |= bracket.use.unit in trained
        if begun and isinstance(bracket, Exit):
            uses.add(bracket.use)
    return tuple(bracket for bracket in trace if bracket.use in uses)


def _nested_trace(units: Mapping[int, str]) -> Trace:
    """The trace of a model whose units run in order, the root first, each inside the unit whose name begins its own."""
    trace: list[Enter | Exit] = []
    around: list[int] = []
    for unit, name in units.items():
        while around and units[around[-1]] and not name.startswith(f"{units[around[-1]]}."):
            trace.append(Exit(Use(around.pop())))
        trace.append(Enter(Use(unit)))
        around.append(unit)
    return (*trace, *(Exit(Use(unit)) for unit in reversed(around)))
