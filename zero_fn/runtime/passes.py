"""One forward or backward pass: where it is in its schedule."""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Iterator
from typing import TYPE_CHECKING

from torch.autograd import Variable

from zero_fn.runtime.uncompiled import uncompiled
from zero_fn.schedule import Await, Enter, Event, Exit, Trace, Use

if TYPE_CHECKING:
    from zero_fn.runtime.gather import UnitUse
    from zero_fn.runtime.gradients import Reduction
    from zero_fn.runtime.step import Step
    from zero_fn.runtime.unit import Unit

__all__ = ["BackwardPass", "ForwardPass"]


class ForwardPass:
    """A forward that follows the schedule of the last pass that began at the same unit.

    Attributes:
        entry: The unit that began it, and the method.
        grad: Whether it records a graph.
        trace: Its brackets so far.
        uses: Its uses.
        depth: Units that are running.
        failed: Whether an exception passed through it.
        is_swapped: Whether some parameters are replaced by other tensors: its gathers are no pattern for later passes.
    """

    def __init__(
        self, entry: tuple[int, str], events: tuple[Event, ...] | None, offsets: dict[int, int], *, grad: bool
    ) -> None:
        self.entry, self.grad = entry, grad
        self.trace: list[Enter | Exit] = []
        self.uses: dict[Use, UnitUse] = {}
        self.depth = 0
        self.failed = False
        self.is_swapped = False
        self._events = events
        self._cursor = 0
        self._offsets = offsets
        self._counts: dict[int, int] = {}

    def next_number(self, unit: int) -> int:
        """The number of the next use of a unit, counted over all passes whose backward is still to come."""
        number = self._counts.get(unit, self._offsets.get(unit, 0))
        self._counts[unit] = number + 1
        return number

    def note(self, bracket: Enter | Exit, use: UnitUse) -> None:
        """Records a bracket."""
        self.trace.append(bracket)
        self.uses[bracket.use] = use
        self.depth += 1 if isinstance(bracket, Enter) else -1

    @property
    def is_on_schedule(self) -> bool:
        """Whether the pass has done what the schedule foresaw."""
        return self._events is not None

    def before(self, bracket: Enter | Exit) -> Iterator[Event]:
        """The events to run before a bracket; none once the pass has left the schedule."""
        expected = self._relative(bracket)
        start = self._cursor
        end = self._next_bracket(start)
        if self._events is None:
            return
        if end == len(self._events) or self._events[end] != expected:
            self._events = None
            return
        self._cursor = end + 1
        yield from self._events[start:end]

    def after(self) -> Iterator[Event]:
        """The events right after the last bracket that do not wait."""
        while self._events is not None and self._cursor < len(self._events):
            event = self._events[self._cursor]
            if isinstance(event, Enter | Exit | Await):
                return
            self._cursor += 1
            yield event

    def relative_trace(self) -> Trace:
        """The brackets with uses numbered from 0 in this pass."""
        return tuple(self._relative(bracket) for bracket in self.trace)

    def kept_units(self) -> set[int]:
        """Units after whose last Exit nothing began: backward needs them first."""
        kept: set[int] = set()
        for bracket in reversed(self.trace):
            if isinstance(bracket, Enter):
                break
            kept.add(bracket.use.unit)
        return kept

    def _relative(self, bracket: Enter | Exit) -> Enter | Exit:
        unit = bracket.use.unit
        return type(bracket)(Use(unit, bracket.use.count - self._offsets.get(unit, 0)))

    def _next_bracket(self, at: int) -> int:
        if self._events is None:
            return at
        while at < len(self._events) and not isinstance(self._events[at], Enter | Exit):
            at += 1
        return at


class BackwardPass:
    """A backward that follows its schedule as far as autograd has come.

    Attributes:
        reductions: Reductions under way, oldest first.
        recomputed: Uses that checkpoints ran again inside this backward.
        keeps_graph: `retain_graph=True`: the graph may have another backward.
        closing: Autograd has run all nodes: nothing more will arrive.
    """

    def __init__(self, events: tuple[Event, ...], *, awaited: set[Use], frozen: set[Use], keeps_graph: bool) -> None:
        """Begins a pass.

        Args:
            events: The schedule.
            awaited: Uses whose gradients will arrive on this rank.
            frozen: Uses without gradients of their own, which backward may pass through.
            keeps_graph: See the attribute.
        """
        self.reductions: list[tuple[Unit, Reduction]] = []
        self.recomputed: list[UnitUse] = []
        self.closing = False
        self.keeps_graph = keeps_graph
        self._events = events
        self._cursor = 0
        self._awaited, self._frozen = awaited, frozen
        self._entered: set[Use] = set()
        self._arrived: set[Use] = set()
        self._uses = {event.use for event in events if isinstance(event, Exit)}
        self._uses_by_unit = Counter(use.unit for use in self._uses)
        self._callback: weakref.ref[_EndOfBackward] | None = None

    def register(self, step: Step) -> None:
        """Asks the engine to call back when the running backward has ended."""
        callback = _EndOfBackward(step, self)
        owner = weakref.ref(step)

        def on_death(_: object) -> None:
            step = owner()
            if step is not None:
                step.give_up(self)

        self._callback = weakref.ref(callback, on_death)
        Variable._execution_engine.queue_callback(callback)

    @property
    def is_alive(self) -> bool:
        """Whether the engine still holds the callback; it drops it when a backward raises."""
        return self._callback is not None and self._callback() is not None

    def has(self, use: Use) -> bool:
        """Whether the schedule waits for this use."""
        return use in self._uses and use not in self._arrived

    def has_met(self, use: Use) -> bool:
        """Whether the use is in the schedule."""
        return use in self._uses

    def uses_of(self, unit: int) -> int:
        """Uses of a unit in the schedule, the same number on every rank."""
        return self._uses_by_unit[unit]

    def enter(self, unit: int, number: int | None) -> Use | None:
        """Backward has reached a use of a unit; with no number, the next one in the schedule, which is returned."""
        if number is not None:
            self._entered.add(Use(unit, number))
            return Use(unit, number)
        for event in self._events[self._cursor :]:
            if isinstance(event, Enter) and event.use.unit == unit and event.use not in self._entered:
                self._entered.add(event.use)
                return event.use
        return None

    def arrive(self, use: Use) -> None:
        """The gradients of a use are there."""
        self._entered.add(use)
        self._arrived.add(use)

    def next_event(self) -> Event | None:
        """The next event, or None if it must wait for autograd."""
        if self._cursor == len(self._events):
            return None
        event = self._events[self._cursor]
        if not self.closing and self._must_wait(event):
            return None
        self._cursor += 1
        return event

    def _must_wait(self, event: Event) -> bool:
        if isinstance(event, Enter | Exit):
            use = event.use
            if use in self._frozen:
                return not (isinstance(event, Enter) and use in self._entered) and not self._is_passed()
            return use in self._awaited and use not in (self._arrived if isinstance(event, Exit) else self._entered)
        if isinstance(event, Await):
            # Waiting for bytes before autograd needs them would only keep the host from issuing work.
            ahead = (self._events[i] for i in range(self._cursor, len(self._events)))
            following = next((e for e in ahead if isinstance(e, Enter)), None)
            return following is not None and self._must_wait(following)
        return False

    def _is_passed(self) -> bool:
        """Whether backward has reached a use beyond the cursor: the frozen uses before it have run or never will."""
        beyond = self._events[self._cursor + 1 :]
        return any(isinstance(event, Enter) and event.use in self._entered for event in beyond)


class _EndOfBackward:
    """Held by the engine alone, so that its death tells of a backward that raised."""

    __slots__ = ("__weakref__", "_backward", "_step")

    def __init__(self, step: Step, backward: BackwardPass) -> None:
        self._step, self._backward = weakref.ref(step), backward

    @uncompiled
    def __call__(self) -> None:
        step = self._step()
        if step is not None:
            step.finish_backward(self._backward)
