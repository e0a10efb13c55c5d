"""The most bytes that a step has beyond what is at rest, read off its schedule.

    gathered     whole parameters, from the event that issues their gather to the one that frees them
    gradients    whole local gradients of a unit, from when its backward begins until they were reduced

Gathered parameters that stay in memory between uses are held, and are counted there.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from zero_fn.plan.sent import with_backward
from zero_fn.runtime.passes import REDUCTIONS_UNDER_WAY
from zero_fn.runtime.step import PREFETCH_DEPTH, Step
from zero_fn.runtime.unit import Unit
from zero_fn.schedule import (
    Enter,
    Event,
    Reshard,
    Settle,
    Trace,
    Unshard,
    backward_schedule,
    backward_trace,
    forward_schedule,
    limit_reductions,
    prefetch,
)

__all__ = ["in_flight_nbytes"]


def in_flight_nbytes(step: Step, trace: Trace, *, backwards: int) -> int:
    """Bytes of gathered parameters and whole gradients on this rank at the worst moment of a step.

    Args:
        step: Of a transformed module.
        trace: Of one forward.
        backwards: Microbatches accumulated in the step: whole gradients then wait for the last.
    """
    forward = prefetch(forward_schedule(trace, keeps_last=True), depth=PREFETCH_DEPTH)
    taking_part = with_backward(trace, lambda index: step.unit(index).requires_grad)
    backward = prefetch(
        backward_schedule(
            backward_trace(taking_part), reduces=lambda index: backwards == 1 and step.unit(index).requires_grad
        ),
        depth=PREFETCH_DEPTH,
    )
    backward = limit_reductions(backward, limit=REDUCTIONS_UNDER_WAY)
    gathered: set[int] = set()
    pending: set[int] = set()
    peak = 0
    for events, in_forward in ((forward, True), (backward, False)) * min(backwards, 2):
        for now in _moments(events, gathered, pending, step.unit, in_forward=in_forward):
            peak = max(peak, now)
        if not in_forward:
            gathered.clear()  # a backward ends with every transient unit at rest
    return peak


def _moments(
    events: Iterable[Event], gathered: set[int], pending: set[int], unit_of: Callable[[int], Unit], *, in_forward: bool
) -> Iterable[int]:
    """The bytes in flight after each event; notes what is there."""
    for event in events:
        if isinstance(event, Unshard):
            gathered.add(event.unit)
        elif isinstance(event, Reshard) and not (in_forward and unit_of(event.unit).reshards_after_backward):
            gathered.discard(event.unit)
        elif isinstance(event, Enter) and not in_forward:
            pending.add(event.use.unit)
        elif isinstance(event, Settle):
            pending.discard(event.unit)
        yield sum(unit_of(index).gathered_nbytes for index in gathered) + sum(
            unit_of(index).local_gradient_nbytes for index in pending
        )
