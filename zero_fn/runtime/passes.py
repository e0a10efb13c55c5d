"""One forward or backward pass: where it is in its schedule."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence

from zero_fn.runtime.ending import Ending
from zero_fn.runtime.gradients import Reduction
from zero_fn.runtime.unit import Unit
from zero_fn.runtime.use import UnitUse
from zero_fn.values.schedule import (
    BRACKETS,
    Action,
    Await,
    Enter,
    Event,
    Exit,
    Leg,
    Trace,
    Use,
    backward_schedule,
    backward_trace,
    limit_reductions,
)

__all__ = ["REDUCTIONS_UNDER_WAY", "BackwardPass", "ForwardPass", "Script"]

REDUCTIONS_UNDER_WAY = 1


class ForwardPass:
    """A forward that follows the schedule of the last pass that began at the same unit.

    Attributes:
        entry: The unit that began it, and the method.
        grad: Whether it records a graph.
        trace: The brackets of this pass so far.
        uses: The uses of this pass.
        depth: Units that are running.
        failed: Whether an exception passed through it.
        is_swapped: Whether some parameters are replaced by other tensors: its gathers are no pattern for later passes.
    """

    def __init__(
        self, entry: tuple[int, str], legs: tuple[Leg, ...] | None, offsets: dict[int, int], *, grad: bool
    ) -> None:
        self.entry, self.grad = entry, grad
        self.trace: list[Enter | Exit] = []
        self.uses: dict[Use, UnitUse] = {}
        self.depth = 0
        self.failed = False
        self.is_swapped = False
        self._legs = legs
        self._at = 0  # the leg that comes next
        self._offsets = offsets
        self._counts: dict[int, int] = {}

    def next_number(self, unit: int) -> int:
        """The number of the next use of a unit, counted over all passes whose backward is still to come."""
        number = self._counts.get(unit, self._offsets.get(unit, 0))
        self._counts[unit] = number + 1
        return number

    def note(self, kind: type[Enter] | type[Exit], use: UnitUse) -> Sequence[Action]:
        """Records a bracket. Returns what to do before it; none once the pass has left the schedule."""
        unit, number = use.unit.index, use.number
        legs, at = self._legs, self._at
        bracket: Enter | Exit | None = None
        if legs is not None:
            leg = legs[at] if not self.failed and at < len(legs) else None
            if leg is None or type(leg.bracket) is not kind or leg.bracket.use != (unit, self._relative(unit, number)):
                self._legs = None
            elif leg.bracket.use.number == number:
                bracket = leg.bracket  # the same object in each pass: traces that are equal are found to be at once
        if bracket is None:
            bracket = kind(Use(unit, number))
        self.trace.append(bracket)
        self.uses[bracket.use] = use
        self.depth += 1 if kind is Enter else -1
        if self._legs is None:
            return ()
        self._at = at + 1
        return self._legs[at].before

    @property
    def is_on_schedule(self) -> bool:
        """Whether the pass has done what the schedule foresaw."""
        return self._legs is not None

    def after(self) -> Sequence[Action]:
        """What to begin right after the last bracket: actions that wait for nothing."""
        return self._legs[self._at - 1].after if self._legs is not None else ()

    def relative_trace(self) -> Trace:
        """The brackets with uses numbered from 0 in this pass."""
        if not self._offsets:
            return tuple(self.trace)
        return tuple(type(each)(Use(each.use.unit, self._relative(*each.use))) for each in self.trace)

    def kept_units(self) -> set[int]:
        """Units after whose last Exit nothing began: backward needs them first."""
        kept: set[int] = set()
        for bracket in reversed(self.trace):
            if isinstance(bracket, Enter):
                break
            kept.add(bracket.use.unit)
        return kept

    def _relative(self, unit: int, number: int) -> int:
        """The number of a use, counted from 0 in this pass."""
        return number - self._offsets.get(unit, 0) if self._offsets else number


class Script:
    """The schedule of a backward, and what it was made from: the next backward through the same uses follows it too.

    Attributes:
        events: The schedule.
        enters: Its uses, each with the number of the event that enters it.
        uses_of: How many of them each unit has, the same number on every rank.
        gates: For each event, the Enter or Exit that autograd must have come to before it may run, if there is one.
    """

    def __init__(
        self,
        trace: Sequence[Enter | Exit],
        reduced: frozenset[int],
        *,
        ahead: Callable[[tuple[Event, ...]], tuple[Event, ...]],
    ) -> None:
        """Makes the schedule.

        Args:
            trace: Brackets of the forwards that this backward runs through.
            reduced: Units whose gradients are reduced in it.
            ahead: Moves gathers ahead of their uses.
        """
        self._made_from = (trace, reduced)
        events = backward_schedule(backward_trace(tuple(trace)), reduces=reduced.__contains__)
        self.events = limit_reductions(ahead(events), limit=REDUCTIONS_UNDER_WAY)
        self.enters = {event.use: at for at, event in enumerate(self.events) if isinstance(event, Enter)}
        self.uses_of = Counter(use.unit for use in self.enters)
        self.gates: list[Enter | Exit | None] = []
        following: Enter | None = None
        for event in reversed(self.events):
            following = event if isinstance(event, Enter) else following
            if isinstance(event, Enter | Exit):
                self.gates.append(event)
            else:
                # Waiting for bytes before autograd needs them would only keep the host from issuing work.
                self.gates.append(following if isinstance(event, Await) else None)
        self.gates.reverse()

    def serves(self, trace: Sequence[Enter | Exit], reduced: frozenset[int]) -> bool:
        """Whether a backward through these brackets has the same schedule."""
        return self._made_from == (trace, reduced)


class BackwardPass:
    """A backward that follows its schedule as far as autograd has come.

    Attributes:
        ending: Tells when it has ended.
        reductions: Reductions under way, oldest first.
        recomputed: Uses that checkpoints ran again inside this backward.
        waiting: Uses that a later backward may pass through, the same on every rank.
        keeps_graph: `retain_graph=True`: the graph may have another backward.
        closing: Autograd has run all nodes: nothing more will arrive.
        failed: Whether it raised.
    """

    def __init__(
        self,
        script: Script,
        ending: Ending,
        *,
        awaited: set[Use],
        passed_only: set[Use],
        waiting: set[Use],
        keeps_graph: bool,
    ) -> None:
        """Begins a pass.

        Args:
            script: The schedule.
            ending: Tells when it has ended.
            awaited: Uses whose gradients will arrive on this rank.
            passed_only: Uses without gradients of their own on this rank, which backward may pass through.
            waiting, keeps_graph: See the attributes of the class.
        """
        self.ending = ending
        self.reductions: list[tuple[Unit, Reduction]] = []
        self.recomputed: list[UnitUse] = []
        self.closing = self.failed = False
        self.waiting, self.keeps_graph = waiting, keeps_graph
        self._script = script
        self._cursor = 0
        self._awaited, self._passed_only = awaited, passed_only
        self._entered: set[Use] = set()
        self._arrived: set[Use] = set()
        self._entered_to = self._reached_to = -1  # the last event that enters one of them; that backward itself came to

    def has(self, use: Use) -> bool:
        """Whether the schedule waits for this use."""
        return use in self._script.enters and use not in self._arrived

    def has_met(self, use: Use) -> bool:
        """Whether the use is in the schedule."""
        return use in self._script.enters

    def uses_of(self, unit: int) -> int:
        """Uses of a unit in the schedule, the same number on every rank."""
        return self._script.uses_of[unit]

    def enter(self, unit: int, number: int | None, *, recomputes: bool) -> Use | None:
        """Backward, or a recomputation, has reached a use of a unit; with no number the next one, which is returned.

        [Note: recomputation is ahead] A checkpoint around several units enters them in the order of the forward, the one that
        backward needs last first. So that it was entered does not mean that backward has passed the others: they stay.
        """
        use = Use(unit, number) if number is not None else self._next_use(unit)
        if use is not None:
            self._note(use, recomputes=recomputes)
        return use

    def _note(self, use: Use, *, recomputes: bool) -> None:
        at = self._script.enters.get(use, -1)
        self._entered.add(use)
        self._entered_to = max(self._entered_to, at)
        if not recomputes:
            self._reached_to = max(self._reached_to, at)

    def _next_use(self, unit: int) -> Use | None:
        for event in self._script.events[self._cursor :]:
            if isinstance(event, Exit) and event.use.unit == unit and event.use not in self._entered:
                return event.use
        return None

    def gradients_arrived(self, use: Use) -> None:
        """The gradients of a use are there."""
        self._note(use, recomputes=False)
        self._arrived.add(use)

    def next_action(self) -> Action | None:
        """What comes next beside brackets, or None if it must wait for autograd."""
        for at in range(self._cursor, len(self._script.events)):
            event, gate = self._script.events[at], self._script.gates[at]
            if gate is not None and not self.closing and self._must_wait(at, gate):
                self._cursor = at
                return None
            if not isinstance(event, BRACKETS):
                self._cursor = at + 1
                return event
        self._cursor = len(self._script.events)
        return None

    def _must_wait(self, at: int, gate: Enter | Exit) -> bool:
        use, is_enter = gate.use, type(gate) is Enter
        if use in self._passed_only:
            # What lies before a use that was reached was passed, or never will be. [Note: recomputation is ahead]
            if is_enter:
                return use not in self._entered and at > self._entered_to
            # Ranks with gradients know when a use was passed. If it raised, take the last one for passed, as they do: they
            # have issued its reduction, and wait for this rank.
            return (self._script.enters[use] if self.failed else at) > self._reached_to
        return use in self._awaited and use not in (self._entered if is_enter else self._arrived)
