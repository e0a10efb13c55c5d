"""Passes: where one is in its schedule, the uses of units in it,
and the graphs that a backward may run through.

[Note: forwards that wait] After a backward every rank must remember the same uses, or the next
schedule would differ between ranks. Which uses may still have a backward does differ: a graph may
be alive on some ranks only, and nothing tells beforehand whether a backward will pass through a
frozen use. So the message that begins a backward also carries which uses may run after it, or-ed
over ranks, and those are kept. If every use runs now, on any rank, nothing is kept, and no rank has
to read that.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence

from zero_fn.runtime.ending import Ending
from zero_fn.runtime.gradients import Reduction
from zero_fn.runtime.unit import Unit, UnitUse
from zero_fn.values.schedule import (
    Action,
    Await,
    Enter,
    Event,
    Exit,
    Point,
    Trace,
    Use,
    actions,
    backward_schedule,
    backward_trace,
    limit_reductions,
    points,
)

__all__ = [
    "REDUCTIONS_UNDER_WAY",
    "BackwardPass",
    "ForwardPass",
    "Graphs",
    "Script",
]

REDUCTIONS_UNDER_WAY = 1
# Forwards whose backward never came are forgotten beyond this number, the same on every rank.
_REMEMBERED_USES = 4096


class ForwardPass:
    """A forward that follows the schedule of the last pass that began at the same unit."""

    def __init__(
        self,
        begun_at: tuple[int, str],
        schedule: tuple[Point, ...] | None,
        offsets: dict[int, int],
        *,
        grad: bool,
    ) -> None:
        self.begun_at = begun_at  # the unit and the method
        self.grad = grad  # whether it records a graph
        self.trace: list[Enter | Exit] = []
        self.uses: dict[Use, UnitUse] = {}
        self.depth = 0  # how many units are running
        self.failed = False
        self._points = schedule
        self._at = 0  # the point that comes next
        self._offsets = offsets
        self._counts: dict[int, int] = {}

    def next_number(self, unit: int) -> int:
        """The number of the next use of a unit, counted over all passes
        whose backward is still to come."""
        number = self._counts.get(unit, self._offsets.get(unit, 0))
        self._counts[unit] = number + 1
        return number

    def note(self, kind: type[Enter] | type[Exit], use: UnitUse) -> Point | None:
        """Records a bracket.

        Returns it with the actions around it; None once the pass has left the schedule.
        """
        key, points, at = use.key, self._points, self._at
        bracket: Enter | Exit | None = None
        if points is not None:
            point = points[at] if not self.failed and at < len(points) else None
            relative = self._relative(key) if self._offsets else key
            if point is None or type(point.bracket) is not kind or point.bracket.use != relative:
                self._points = None
            elif relative == key:
                # The same object in each pass: traces that are equal are found to be at once.
                bracket = point.bracket
        if bracket is None:
            bracket = kind(key)
        self.trace.append(bracket)
        self.uses[key] = use
        self.depth += 1 if kind is Enter else -1
        if self._points is None:
            return None
        self._at = at + 1
        return self._points[at]

    def innermost(self) -> UnitUse:
        """The call that runs, and no other in it."""
        ended: set[Use] = set()
        for bracket in reversed(self.trace):
            if isinstance(bracket, Exit):
                ended.add(bracket.use)
            elif bracket.use not in ended and not self.uses[bracket.use].is_read:
                return self.uses[bracket.use]
        raise AssertionError("no call runs in an open forward")

    def go_on(self) -> None:
        """After a backward inside it: another one may pass through what has arrived."""
        for use in self.uses.values():
            use.has_arrived = False

    @property
    def is_on_schedule(self) -> bool:
        """Whether the pass has done what the schedule foresaw."""
        return self._points is not None

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
    """The schedule of a backward, and the uses it was made from:
    the next backward through the same uses follows it, too."""

    def __init__(
        self,
        trace: Sequence[Enter | Exit],
        reduced: frozenset[int],
        *,
        ahead: Callable[[tuple[Event, ...]], tuple[Event, ...]],
    ) -> None:
        """Makes the schedule of a backward through the forwards of `trace`, in which the gradients
        of the units `reduced` are reduced.

        `ahead` moves gathers ahead of their uses.
        """
        self._made_from = (trace, reduced)
        events = ahead(
            backward_schedule(backward_trace(tuple(trace)), reduces=reduced.__contains__)
        )
        events = limit_reductions(events, limit=REDUCTIONS_UNDER_WAY)
        self.events = events
        # What comes before the first wait is done at once, on every rank:
        # a rank may reach another unit first.
        begun = next((at for at, event in enumerate(events) if isinstance(event, Await)), 0)
        self.first = actions(events[:begun])
        self.points = points(events[begun:])
        self.enters = {
            point.bracket.use: at
            for at, point in enumerate(self.points)
            if isinstance(point.bracket, Enter)
        }
        # Units with several uses, the same on every rank.
        units = [use.unit for use in self.enters]
        self.repeated = (
            {unit for unit in units if units.count(unit) > 1}
            if len(set(units)) < len(units)
            else set()
        )

    def serves(self, trace: Sequence[Enter | Exit], reduced: frozenset[int]) -> bool:
        """Whether a backward through these brackets has the same schedule."""
        return self._made_from == (trace, reduced)


class BackwardPass:
    """A backward that follows its schedule as far as autograd has come."""

    def __init__(
        self,
        script: Script,
        ending: Ending,
        *,
        awaited: set[Use],
        passed_only: set[Use],
        waiting: set[Use],
        keeps_graph: bool,
        entered: Iterable[Use] = (),
    ) -> None:
        self.script = script
        self.ending = ending
        self.reductions: list[tuple[Unit, Reduction]] = []  # under way, oldest first
        self.recomputed: list[UnitUse] = []  # uses that checkpoints ran again inside it
        self.closing = False  # whether autograd has run all nodes, so that nothing more arrives
        self.failed = False  # whether it has raised
        # The uses that a later backward may pass through, the same on every rank.
        self.waiting = waiting
        # Whether the graph may have another backward (`retain_graph=True`).
        self.keeps_graph = keeps_graph
        self._at = 0  # the point of the schedule that comes next
        self._awaited = awaited  # the uses whose gradients arrive on this rank
        self._passed_only = passed_only  # those that are passed without gradients of their own
        self._entered = set(entered)
        self._arrived: set[Use] = set()
        self._entered_to = -1  # the last point of the schedule that enters a use which was reached
        # The same, of uses that the backward itself has reached, not only a recomputation.
        self._reached_to = -1

    def has(self, use: Use) -> bool:
        """Whether the schedule waits for this use."""
        return use in self.script.enters and use not in self._arrived

    def has_met(self, use: Use) -> bool:
        return use in self.script.enters

    def enter(self, unit: int, use: Use | None, *, recomputes: bool) -> Use | None:
        """Backward, or a recomputation, has reached a use of a unit;
        if `use` is None the next one, which is returned.

        [Note: recomputation is ahead] A checkpoint around several units enters them in the order of
        the forward: first the unit that backward needs last. So that a use was entered does not
        mean that backward has passed those before it.
        """
        use = use or self._next_use(unit)
        if use is not None:
            self._entered.add(use)
            at = self.script.enters.get(use, -1)
            if at > self._entered_to:
                self._entered_to = at
            if at > self._reached_to and not recomputes:
                self._reached_to = at
        return use

    def _next_use(self, unit: int) -> Use | None:
        for _, bracket, _ in self.script.points[self._at :]:
            if (
                isinstance(bracket, Exit)
                and bracket.use.unit == unit
                and bracket.use not in self._entered
            ):
                return bracket.use
        return None

    def gradients_arrived(self, use: Use) -> None:
        """The gradients of a use are there."""
        self.enter(use.unit, use, recomputes=False)
        self._arrived.add(use)

    def actions(self) -> Iterator[Action | None]:
        """The actions of the schedule; None where autograd must come further first."""
        yield from self.script.first
        for at, (before, bracket, after) in enumerate(self.script.points):
            use, is_enter = bracket.use, isinstance(bracket, Enter)
            while not self.closing:
                if use in self._passed_only:
                    waits = self._may_still_pass(use, is_enter=is_enter)
                else:
                    waits = use in self._awaited and use not in (
                        self._entered if is_enter else self._arrived
                    )
                if not waits:
                    break
                yield None
            self._at = at + 1
            yield from before
            yield from after

    def _may_still_pass(self, use: Use, *, is_enter: bool) -> bool:
        """Whether backward may still come to the next point,
        of a use without gradients of its own."""
        # A use before one that was reached was passed itself, or never will be.
        # [Note: recomputation is ahead]
        if is_enter:
            return use not in self._entered and self._at > self._entered_to
        # Ranks with gradients know when a use was passed. After an error, count the last use
        # reached as passed, as they do: they have issued its reduction, and wait for this rank.
        return (self.script.enters[use] if self.failed else self._at) > self._reached_to


class Graphs:
    """The graphs of one transformed module that a backward may pass through."""

    def __init__(self) -> None:
        self.trace: list[Enter | Exit] = []  # of the forwards
        self._uses: dict[Use, weakref.ref[UnitUse]] = {}  # a use is alive as long as its graph
        # Uses whose backward has run and may run again (`retain_graph=True`).
        self._retained: set[Use] = set()

    def add(self, forward: ForwardPass) -> None:
        """Remembers a forward, if it recorded a graph."""
        if any(use.has_graph for use in forward.uses.values()):
            self.trace += forward.trace
            self._uses.update((key, weakref.ref(use)) for key, use in forward.uses.items())

    def use(self, key: Use) -> UnitUse | None:
        """A use of an earlier forward; None once its graph is gone."""
        reference = self._uses.get(key)
        return reference() if reference is not None else None

    def uses_of(self, unit: int) -> list[UnitUse]:
        """The uses of a unit whose graph is there."""
        return [
            use for key in self._uses if key.unit == unit and (use := self.use(key)) is not None
        ]

    def entered(self) -> list[Use]:
        """All uses, in the order of the forwards."""
        return [bracket.use for bracket in self.trace if isinstance(bracket, Enter)]

    @property
    def is_waiting(self) -> bool:
        """Whether any forward has had no backward yet."""
        return any(bracket.use not in self._retained for bracket in self.trace)

    @property
    def is_held(self) -> bool:
        """Whether this rank still holds the graph of a forward that has had no backward yet."""
        return any(use not in self._retained and self.use(use) is not None for use in self._uses)

    def offsets(self) -> dict[int, int]:
        """For each unit, the number of its next use: one above the highest that is remembered."""
        offsets: dict[int, int] = {}
        for bracket in self.trace:
            if isinstance(bracket, Enter):
                offsets[bracket.use.unit] = max(
                    offsets.get(bracket.use.unit, 0), bracket.use.number + 1
                )
        return offsets

    def leave(self, backward: BackwardPass) -> None:
        """A backward has ended: uses that it did not pass through, or retained,
        wait for a backward of their own.

        [Note: forwards that wait]
        """
        if backward.keeps_graph:
            met = {use for use in self._uses if backward.has_met(use)}
            self._retained |= met
            for key in met:
                use = self.use(key)
                if use is not None:
                    use.has_arrived = False
            return
        self.trace = [bracket for bracket in self.trace if bracket.use in backward.waiting]
        self._uses = {use: held for use, held in self._uses.items() if use in backward.waiting}
        self._retained &= self._uses.keys()

    def limit(self) -> None:
        """Forgets all graphs if there are too many."""
        if len(self.trace) > 2 * _REMEMBERED_USES:
            self.forget()

    def forget(self) -> None:
        """Forgets all graphs: no backward can come."""
        self.trace = []
        self._uses = {}
        self._retained = set()
