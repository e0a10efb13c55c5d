"""A step as the host or the device has gone through it:
spans of time without gaps, each of one part.

compute         inside the forward or backward of a unit
communication   waits for collectives, and issues them; what of it was a wait for a slower rank is
                told apart when all ranks are compared
copies          waits for a tier
idle            of compute and the optimizer: on a CPU the time in which the process did not run (it
                slept, or other processes had its cores); on an accelerator the time in which the
                device kept up with the host
data            waits for a batch of torch's DataLoader
optimizer       inside `optimizer.step()`
other           between these: the loss outside the model, clipping, the loop
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

from zero_fn.profiling.clock import Collective, Mark
from zero_fn.values.watching import WITHIN, Moment

__all__ = ["PARTS", "Span", "spans_of", "steps_of"]

PARTS = ("compute", "communication", "waiting", "copies", "idle", "data", "optimizer", "other")
"""What a step consists of. "waiting": of communication, for slower ranks."""

_PAIRS = {
    Moment.LEAVE: Moment.ENTER,
    Moment.ISSUED: Moment.ISSUE,
    Moment.WAITED: Moment.WAIT,
    Moment.COPIED: Moment.COPY,
    Moment.LOADED: Moment.LOAD,
    Moment.STEPPED: Moment.OPTIMIZER,
}
"""Ends, with what begins."""

_PART = {
    Moment.ENTER: "compute",
    Moment.ISSUE: "communication",
    Moment.WAIT: "communication",
    Moment.COPY: "copies",
    Moment.LOAD: "data",
    Moment.OPTIMIZER: "optimizer",
}

_PAUSE_NS = 100_000  # less than that is how exact the two clocks are
_CAUGHT_UP_NS = 50_000  # a device that is no further behind the host has nothing to do


@dataclass(slots=True)
class Span:
    """Nanoseconds of one part of a step. `idle_ns` of them are idle."""

    begin_ns: int
    end_ns: int
    part: str
    phase: str  # "forward", "backward", "optimizer"; "" between them
    unit: str  # whose forward or backward it is; "" in none
    collective: Collective | None
    tier: str = ""  # what a copy comes from or goes to
    idle_ns: int = 0

    @property
    def ns(self) -> int:
        """How long it is."""
        return self.end_ns - self.begin_ns


def spans_of(marks: Sequence[Mark], *, on_device: bool) -> Iterator[Span]:
    """The spans between marks. `on_device`: by the times of the device."""
    open_: list[Mark] = []
    in_backward, reached = False, list[str]()
    phase = unit = ""
    for mark, after in pairwise(marks):
        moment = mark.moment
        if moment in _PAIRS:
            _close(open_, mark)
            if moment is Moment.STEPPED:
                in_backward = False
                open_.clear()
        elif moment in _PART:
            open_.append(mark)
        elif moment is Moment.BACKWARD:
            in_backward, reached = True, ["root"]
        elif moment is Moment.BACKWARD_END:
            in_backward = False
        elif moment is Moment.NEED:
            _reach(reached, mark.what)
        elif moment is Moment.ARRIVED and mark.what in reached:
            reached.remove(mark.what)
        if moment not in WITHIN:
            entered = [each.what for each in open_ if each.moment is Moment.ENTER]
            is_stepping = any(each.moment is Moment.OPTIMIZER for each in open_)
            phase = (
                "optimizer"
                if is_stepping
                else "backward"
                if in_backward
                else "forward"
                if entered
                else ""
            )
            unit = (entered[-1] or "root") if entered else reached[-1] if in_backward else ""
        part, collective, tier = "compute" if in_backward else "other", None, ""
        if open_:
            top = open_[-1]
            part = _PART[top.moment]
            if part == "communication":
                # The collective that ISSUED names.
                collective = after.collective if top.moment is Moment.ISSUE else top.collective
            elif part == "copies":
                tier = top.what
        begin, end = (mark.device_ns, after.device_ns) if on_device else (mark.at_ns, after.at_ns)
        idle_ns = 0
        if part in ("compute", "optimizer"):
            if not on_device:
                paused = end - begin - (after.cpu_ns - mark.cpu_ns)
                idle_ns = paused if paused > _PAUSE_NS else 0
            elif max(begin - mark.at_ns, end - after.at_ns) < _CAUGHT_UP_NS:
                idle_ns = end - begin
        yield Span(begin, end, part, phase, unit, collective, tier, idle_ns)


def _close(open_: list[Mark], end: Mark) -> None:
    """Ends what the mark ends, with what an exception has left open inside; nothing,
    if it began before the first mark."""
    begin = _PAIRS[end.moment]
    for at in range(len(open_) - 1, -1, -1):
        if open_[at].moment is begin and (begin is not Moment.ENTER or open_[at].what == end.what):
            del open_[at:]
            return


def _reach(reached: list[str], unit: str) -> None:
    """Backward has come to a unit.

    Of one tensor that is the output of several, the innermost is computed first.
    """
    if unit and unit not in reached:
        inside = (at for at, other in enumerate(reached) if other.startswith(f"{unit}."))
        reached.insert(next(inside, len(reached)), unit)


def steps_of(marks: Sequence[Mark]) -> list[tuple[int, int]]:
    """The first and the last mark of each step: from the end of one step of the
    optimizer to that of the next."""
    ends = [0, *(number for number, mark in enumerate(marks) if mark.moment is Moment.STEPPED)]
    return [(begin, end) for begin, end in pairwise(ends) if end > begin]
