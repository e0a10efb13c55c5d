"""A step, walked on its schedule: how often each unit is gathered, and which bytes are whole at each moment.

    gathered     whole parameters, from the event that issues their gather to the one that frees them
    gradients    whole local gradients of a unit, from when its backward begins until they were reduced

Gathered parameters that stay in memory between uses count as held, not here.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from typing import NamedTuple

from zero_fn.runtime.passes import REDUCTIONS_UNDER_WAY
from zero_fn.runtime.run import Run
from zero_fn.runtime.transformed import PREFETCH_DEPTH
from zero_fn.runtime.unit import Unit
from zero_fn.values import schedule
from zero_fn.values.schedule import Enter, Event, Exit, Reshard, Settle, Trace, Unshard, Use

__all__ = ["Walk", "walk"]


class Walk(NamedTuple):
    """What a step does with the units of a module.

    Attributes:
        gathers: How often each unit is gathered, by its number.
        uses: How often each unit runs in a forward, by its number.
        in_flight_nbytes: Bytes of gathered parameters and whole gradients on this rank at the worst moment.
    """

    gathers: Counter[int]
    uses: Counter[int]
    in_flight_nbytes: int


def walk(run: Run, *, backwards: int) -> Walk:
    """Runs the schedule that was recorded last, or, before the first forward, that of units in registration order.

    Args:
        run: The run of a transformed module.
        backwards: Microbatches accumulated in the step: whole gradients of several wait for the last.
    """
    units = {unit.index: unit for unit in run.module.live_units()}
    trained = {index for index, unit in units.items() if unit.gradients.are_wanted}
    trace = run.forwards.recorded_trace() or _nested_trace({index: unit.name for index, unit in units.items()})
    forward, backward = _schedules(trace, trained.__contains__, reduces=backwards == 1)
    uses = Counter(bracket.use.unit for bracket in trace if isinstance(bracket, Enter))
    gathers = Counter({index: 1 for index in uses if not units[index].groups.is_transient})
    gathered: set[int] = set()
    pending: set[int] = set()
    peak = 0
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
            whole = sum(units[index].groups.gathered_nbytes for index in gathered)
            peak = max(peak, whole + sum(_gradient_nbytes(units[index]) for index in pending))
        if not in_forward:
            gathered.clear()  # a backward ends with every transient unit at rest
    return Walk(gathers, uses, peak)


def _gradient_nbytes(unit: Unit) -> int:
    """Bytes of the whole gradients that a backward makes, and that are freed once they are reduced."""
    trained = (slot for slot in unit.slots if slot.parameter.requires_grad)
    return sum(slot.path.numel * slot.kind.compute_dtype.itemsize for slot in trained)


def _schedules(
    trace: Trace, is_trained: Callable[[int], bool], *, reduces: bool
) -> tuple[tuple[Event, ...], tuple[Event, ...]]:
    """Of the forward with this trace, and of its backward: through the uses that end after a trained unit began."""
    begun = False
    taking_part: set[Use] = set()
    for bracket in trace:
        begun |= is_trained(bracket.use.unit)
        if begun and isinstance(bracket, Exit):
            taking_part.add(bracket.use)
    way_back = schedule.backward_trace(tuple(bracket for bracket in trace if bracket.use in taking_part))
    forward = schedule.forward_schedule(trace, keeps_last=True)
    backward = schedule.backward_schedule(way_back, reduces=lambda index: reduces and is_trained(index))
    forward, backward = (schedule.prefetch(events, depth=PREFETCH_DEPTH) for events in (forward, backward))
    return forward, schedule.limit_reductions(backward, limit=REDUCTIONS_UNDER_WAY)


def _nested_trace(units: Mapping[int, str]) -> Trace:
    """The trace of a model whose units run in order, each inside the one that contains it by name; the root is the first."""
    trace: list[Enter | Exit] = []
    around: list[int] = []
    for unit, name in units.items():
        while around and units[around[-1]] and not name.startswith(f"{units[around[-1]]}."):
            trace.append(Exit(Use(around.pop())))
        trace.append(Enter(Use(unit)))
        around.append(unit)
    return (*trace, *(Exit(Use(unit)) for unit in reversed(around)))
