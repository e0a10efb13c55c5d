"""One forward or backward pass: where it is in its schedule."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence

from zero_fn.runtime.ending import Ending
from zero_fn.runtime.gradients import Reduction
from zero_fn.runtime.unit import Unit
from zero_fn.runtime.use import UnitUse
from zero_fn.values.schedule import (
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
        entry: The unit that the forward began at, and the name of the method.
        grad: Whether it records a graph.
        trace: The brackets (Enter, Exit) of this pass so far.
        uses: The uses of this pass.
        depth: How many units are running.
        failed: Whether an exception passed through the forward.
    """

    def __init__(
        self, entry: tuple[int, str], legs: tuple[Leg, ...] | None, offsets: dict[int, int], *, grad: bool
    ) -> None:
        self.entry, self.grad = entry, grad
        self.trace: list[Enter | Exit] = []
        self.uses: dict[Use, UnitUse] = {}
        self.depth = 0
        self.failed = False
        self._legs = legs
        self._at = 0  # the leg that comes next
        self._offsets = offsets
        self._counts: dict[int, int] = {}

    def next_number(self, unit: int) -> int:
        """The number of the next use of a unit, counted over all passes whose backward is still to come."""
        number = self._counts.get(unit, self._offsets.get(unit, 0))
        self._counts[unit] = number + 1
        return number

    def note(self, kind: type[Enter] | type[Exit], use: UnitUse) -> Leg | None:
        """Records a bracket. Returns it with the actions around it; None once the pass has left the schedule."""
        key, legs, at = use.key, self._legs, self._at
        bracket: Enter | Exit | None = None
        if legs is not None:
            leg = legs[at] if not self.failed and at < len(legs) else None
            relative = self._relative(key) if self._offsets else key
            if leg is None or type(leg.bracket) is not kind or leg.bracket.use != relative:
                self._legs = None
            elif relative == key:
                bracket = leg.bracket  # the same object in each pass: traces that are equal are found to be at once
        if bracket is None:
            bracket = kind(key)
        self.trace.append(bracket)
        self.uses[key] = use
        self.depth += 1 if kind is Enter else -1
        if self._legs is None:
            return None
        self._at = at + 1
        return self._legs[at]

    def go_on(self) -> None:
        """After a backward inside it: another one may pass through what has arrived."""
        for use in self.uses.values():
            use.has_arrived = False

    @property
    def is_on_schedule(self) -> bool:
        """Whether the pass has done what the schedule foresaw."""
        return self._legs is not None

    def relative_trace(self) -> Trace:
        """The brackets with uses numbered from 0 in this pass."""
        if not self._offsets:
            return tuple(self.trace)
        return tuple(type(each)(self._relative(each.use)) for each in self.trace)

    def kept_units(self) -> set[int]:
        """The units that nothing was entered after: backward needs them first."""
        kept: set[int] = set()
        for bracket in reversed(self.trace):
            if isinstance(bracket, Enter):
                break
            kept.add(bracket.use.unit)
        return kept

    def _relative(self, use: Use) -> Use:
        """A use, with the uses of each unit counted from 0 in this pass."""
        return Use(use.unit, use.number - self._offsets.get(use.unit, 0))


class Script:
    """The schedule of a backward, and the uses it was made from: the next backward through the same uses follows it, too.

    Attributes:
        events: The schedule.
        enters: Its uses, each with the number of the event that enters it.
        uses_of: How many of them each unit has, the same number on every rank.
        steps: For each event, the action to run (None at a bracket), and the Enter or Exit that autograd must have come to
            before, if there is one.
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
            trace: The brackets of the forwards that the backward runs through.
            reduced: Units whose gradients are reduced in it.
            ahead: Moves gathers ahead of their uses.
        """
        self._made_from = (trace, reduced)
        events = backward_schedule(backward_trace(tuple(trace)), reduces=reduced.__contains__)
        self.events = limit_reductions(ahead(events), limit=REDUCTIONS_UNDER_WAY)
        self.enters = {event.use: at for at, event in enumerate(self.events) if isinstance(event, Enter)}
        self.uses_of = Counter(use.unit for use in self.enters)
        self.steps: list[tuple[Action | None, Enter | Exit | None]] = []
        following: Enter | None = None
        for event in reversed(self.events):
            following = event if isinstance(event, Enter) else following
            if isinstance(event, Enter | Exit):
                self.steps.append((None, event))
            else:
                # Waiting for bytes before autograd needs them would only keep the host from issuing work.
                self.steps.append((event, following if isinstance(event, Await) else None))
        self.steps.reverse()

    def serves(self, trace: Sequence[Enter | Exit], reduced: frozenset[int]) -> bool:
        """Whether a backward through these brackets has the same schedule."""
        return self._made_from == (trace, reduced)


class BackwardPass:
    """A backward that follows its schedule as far as autograd has come.

    Attributes:
        ending: Tells when the backward has ended.
        reductions: The reductions under way, oldest first.
        recomputed: The uses that checkpoints ran again inside this backward.
        waiting: The uses that a later backward may pass through, the same on every rank.
        keeps_graph: Whether the graph may have another backward (`retain_graph=True`).
        closing: Whether autograd has run all nodes, so that nothing more will arrive.
        failed: Whether the backward raised.
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
            awaited: The uses whose gradients will arrive on this rank.
            passed_only: The uses that backward may pass through on this rank, without gradients of their own.
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
        self._entered_to = -1  # the last event of the schedule that enters a use which was reached
        self._reached_to = -1  # the same, of uses that backward itself has reached, not only a recomputation

    def has(self, use: Use) -> bool:
        """Whether the schedule waits for this use."""
        return use in self._script.enters and use not in self._arrived

    def has_met(self, use: Use) -> bool:
        """Whether the use is in the schedule."""
        return use in self._script.enters

    def uses_of(self, unit: int) -> int:
        """Uses of a unit in the schedule, the same number on every rank."""
        return self._script.uses_of[unit]

    def enter(self, unit: int, use: Use | None, *, recomputes: bool) -> Use | None:
        """Backward, or a recomputation, has reached a use of a unit; if `use` is None the next one, which is returned.

        [Note: recomputation is ahead] A checkpoint around several units enters them in the order of the forward: first the
        unit that backward needs last. So that a use was entered does not mean that backward has passed those before it.
        """
        use = use or self._next_use(unit)
        if use is not None:
            self._note(use, recomputes=recomputes)
        return use

    def _note(self, use: Use, *, recomputes: bool) -> None:
        at = self._script.enters.get(use, -1)
        self._entered.add(use)
        if at > self._entered_to:
            self._entered_to = at
        if at > self._reached_to and not recomputes:
            self._reached_to = at

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
        """The next action, or None if it must wait for autograd."""
        steps = self._script.steps
        while (at := self._cursor) < len(steps):
            action, gate = steps[at]
            if gate is not None and not self.closing and self._must_wait(at, gate):
                return None
            self._cursor = at + 1
            if action is not None:
                return action
        return None

    def _must_wait(self, at: int, gate: Enter | Exit) -> bool:
        use, is_enter = gate.use, type(gate) is Enter
        if use in self._passed_only:
            # A use before one that was reached was passed itself, or never will be. [Note: recomputation is ahead]
            if is_enter:
                return use not in self._entered and at > self._entered_to
            # Ranks with gradients know when a use was passed. After an error, count the last use reached as passed, as they
            # do: they have issued its reduction, and wait for this rank.
            return (self._script.enters[use] if self.failed else at) > self._reached_to
        return use in self._awaited and use not in (self._entered if is_enter else self._arrived)
