"""A step as a list of events: pure values, the same on every rank.

A *trace* is what a forward of the model did: `Enter(use)` where the forward of a unit began and
`Exit(use)` where it ended, called brackets, nested as modules nest. From a trace the functions
below make a *schedule*, in which events that gather, free and reduce stand around the brackets::

    forward     Unshard(a) Await(a) Enter(a) .. Exit(a) Reshard(a) ...
    backward    the trace reversed; after the last Exit of a unit: Reshard(unit) Reduce(unit)

`prefetch`, `fetch_ahead` and `limit_reductions` take a schedule and return another. The runtime
does what the schedule says. A schedule is computed from what all ranks share, so every rank issues
the same collectives in the same order.

A unit may run several times in a pass (a shared block),
so a bracket names a use: a unit and a number.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

__all__ = [
    "BRACKETS",
    "Action",
    "Await",
    "Enter",
    "Event",
    "Exit",
    "Fetch",
    "Point",
    "Reduce",
    "Reshard",
    "Settle",
    "Trace",
    "Unshard",
    "Use",
    "actions",
    "backward_schedule",
    "backward_trace",
    "fetch_ahead",
    "forward_schedule",
    "land_ahead",
    "limit_reductions",
    "points",
    "prefetch",
]


class Use(NamedTuple):
    """The `number`-th time that unit number `unit` runs in a pass."""

    unit: int
    number: int = 0


@dataclass(frozen=True, slots=True)
class Fetch:
    """Begin to read the resting parameters of a unit from their tier."""

    unit: int


@dataclass(frozen=True, slots=True)
class Unshard:
    """Issue the all-gather of a unit."""

    unit: int


@dataclass(frozen=True, slots=True)
class Await:
    """Wait until the gathered parameters of a unit may be read."""

    unit: int


@dataclass(frozen=True, slots=True)
class Enter:
    """The computation of a use begins."""

    use: Use


@dataclass(frozen=True, slots=True)
class Exit:
    """The computation of a use has ended; in backward, the gradients of the use are complete."""

    use: Use


@dataclass(frozen=True, slots=True)
class Reshard:
    """Free the gathered parameters of a unit."""

    unit: int


@dataclass(frozen=True, slots=True)
class Reduce:
    """Issue the reduce-scatter of the gradients of a unit."""

    unit: int


@dataclass(frozen=True, slots=True)
class Settle:
    """Wait for the reduction of a unit and hand its gradients to the resting parameters."""

    unit: int


Action = Fetch | Unshard | Await | Reshard | Reduce | Settle
"""What is done to a unit around its brackets."""

BRACKETS = Enter, Exit

Event = Action | Enter | Exit
Trace = tuple[Enter | Exit, ...]


def forward_schedule(trace: Trace, *, keeps_last: bool) -> tuple[Event, ...]:
    """The schedule of a forward: a unit is gathered before each use and freed after it.

    `keeps_last`: a backward follows, and begins with the units that end after the last Enter (the
    last block and the modules around it): they stay gathered.
    """
    last_enter = max(
        (i for i, bracket in enumerate(trace) if isinstance(bracket, Enter)), default=-1
    )
    return _around(trace, stays=lambda i: keeps_last and i > last_enter, reduces=lambda unit: False)


def _around(
    trace: Trace, *, stays: Callable[[int], bool], reduces: Callable[[int], bool]
) -> tuple[Event, ...]:
    """The brackets of a trace with the events around them.

    `stays`: whether a unit stays gathered after the bracket of this number; `reduces`: whether the
    gradients of a unit are reduced after its last Exit.
    """
    events: list[Event] = []
    running: list[int] = []  # units that were entered and not left, once for each use
    last_exit = {
        bracket.use.unit: i for i, bracket in enumerate(trace) if isinstance(bracket, Exit)
    }
    for i, bracket in enumerate(trace):
        unit = bracket.use.unit
        if isinstance(bracket, Enter):
            if unit not in running:
                events += (Unshard(unit), Await(unit))
            running.append(unit)
            events.append(bracket)
        else:
            events.append(bracket)
            running.remove(unit)
            if unit not in running and not stays(i):
                events.append(Reshard(unit))
            if i == last_exit[unit] and reduces(unit):
                events.append(Reduce(unit))
    return tuple(events)


class Point(NamedTuple):
    """One bracket of a schedule, with the actions around it."""

    # Actions before the bracket that are not in `after` of the previous point.
    before: tuple[Action, ...]
    bracket: Enter | Exit
    after: tuple[Action, ...]  # those right after the bracket, up to the first that waits


def points(events: Sequence[Event]) -> tuple[Point, ...]:
    """A schedule cut at its brackets. Actions before the first bracket belong to that."""
    at = [i for i, event in enumerate(events) if isinstance(event, Enter | Exit)]
    found: list[Point] = []
    start = 0
    for i, following in pairwise((*at, len(events))):
        bracket = events[i]
        assert isinstance(bracket, Enter | Exit)
        waits = (j for j in range(i + 1, following) if isinstance(events[j], Await))
        end = next(waits, following)
        found.append(Point(actions(events[start:i]), bracket, actions(events[i + 1 : end])))
        start = end
    return tuple(found)


def actions(events: Sequence[Event]) -> tuple[Action, ...]:
    """Events between two brackets."""
    return tuple(event for event in events if not isinstance(event, BRACKETS))


def backward_trace(trace: Trace) -> Trace:
    """The brackets of the backward pass of a forward trace: reversed,
    with Enter and Exit exchanged."""
    return tuple(
        Exit(bracket.use) if isinstance(bracket, Enter) else Enter(bracket.use)
        for bracket in reversed(trace)
    )


def backward_schedule(trace: Trace, *, reduces: Callable[[int], bool]) -> tuple[Event, ...]:
    """The schedule of a backward: a unit is gathered before each use, freed after it, and reduced
    after its last use, if it `reduces` in this backward (not while accumulating, not if frozen)."""
    return _around(trace, stays=lambda i: False, reduces=reduces)


def prefetch(
    events: Sequence[Event], *, depth: int, stays: Callable[[int], bool] = lambda unit: False
) -> tuple[Event, ...]:
    """Moves each Unshard before the `depth` Enters that precede it,
    so that it runs beside their compute.

    Not that of a unit that `stays`.

    An Unshard does not move before a Reshard of the same unit.
    """
    moved: list[Event] = []
    for event in events:
        if not isinstance(event, Unshard) or depth == 0 or stays(event.unit):
            moved.append(event)
            continue
        at, passed = len(moved), 0
        place = at
        while at and passed < depth:
            before = moved[at - 1]
            if isinstance(before, Reshard) and before.unit == event.unit:
                break
            at -= 1
            if isinstance(before, Enter):
                passed += 1
                place = at
        moved.insert(place, event)
    return tuple(moved)


def fetch_ahead(
    events: Sequence[Event], *, is_away: Callable[[int], bool], depth: int
) -> tuple[Event, ...]:
    """Adds a Fetch for each Unshard of a unit that rests in another tier,
    before the `depth` Enters that precede the Unshard.

    A Fetch is not put before a Reshard of the same unit, nor before the Unshard of the unit that
    was fetched before. So at most one unit is read from its tier while another is gathered.
    """
    fetched: list[Event] = []
    latest = 0  # the place after the Unshard of the unit that was fetched last
    for event in events:
        if not isinstance(event, Unshard) or not is_away(event.unit):
            fetched.append(event)
            continue
        at, passed = len(fetched), 0
        while at > latest and passed < depth:
            before = fetched[at - 1]
            if isinstance(before, Reshard) and before.unit == event.unit:
                break
            at -= 1
            passed += isinstance(before, Enter)
        fetched.insert(at, Fetch(event.unit))
        fetched.append(event)
        latest = len(fetched)
    return tuple(fetched)


def land_ahead(events: Sequence[Event], *, nbytes_of: Callable[[int], int]) -> tuple[Event, ...]:
    """Adds a Fetch for each Unshard of a unit that a tier is read into directly: such a unit has
    memory of `nbytes_of` bytes from its Fetch to its Reshard, others have 0.

    A Fetch is put before the Enter that precedes the Unshard, and as far ahead of that as the
    memory of all that are read or used fits into twice that of the largest. So the next unit is on
    its way while the last one is still waited for, and a disk that bounds the pass never waits. The
    order of fetches is that of uses.
    """
    room = 2 * max(
        (nbytes_of(event.unit) for event in events if isinstance(event, Unshard)), default=0
    )
    placed: list[Event] = []
    taken: list[int] = []  # bytes in memory before each of them
    now = latest = 0  # bytes in memory, and the place after the last Fetch
    for event in events:
        nbytes = nbytes_of(event.unit) if isinstance(event, Unshard | Reshard) else 0
        if nbytes and isinstance(event, Unshard):
            at, passed = len(placed), 0
            while at > latest:
                before = placed[at - 1]
                is_own = isinstance(before, Reshard) and before.unit == event.unit
                if is_own or (passed and taken[at - 1] + nbytes > room):
                    break
                at -= 1
                passed += isinstance(before, Enter)
            taken.insert(at, taken[at] if at < len(taken) else now)
            taken[at + 1 :] = [each + nbytes for each in taken[at + 1 :]]
            placed.insert(at, Fetch(event.unit))
            now, latest = now + nbytes, at + 1
        placed.append(event)
        taken.append(now)
        if isinstance(event, Reshard):
            now -= nbytes
    return tuple(placed)


def limit_reductions(events: Sequence[Event], *, limit: int) -> tuple[Event, ...]:
    """Adds a Settle for each Reduce: as late as at most `limit` reductions may
    be under way, or at the end."""
    assert limit > 0, "a reduction needs room for itself"
    bounded: list[Event] = []
    under_way: list[int] = []
    for event in events:
        if isinstance(event, Reduce):
            if len(under_way) == limit:
                bounded.append(Settle(under_way.pop(0)))
            under_way.append(event.unit)
        bounded.append(event)
    return (*bounded, *map(Settle, under_way))
