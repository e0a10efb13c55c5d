"""What the records of all ranks say together: the parts of each step, units, collectives,
and the ranks that are slow."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

from zero_fn.profiling.clock import Collective
from zero_fn.profiling.record import RankRecord
from zero_fn.profiling.spans import PARTS, Span

__all__ = [
    "CollectiveTimes",
    "Findings",
    "Slow",
    "StepTimes",
    "UnitTimes",
    "carried_of",
    "collectives_of",
    "overlap_of",
    "slow_of",
    "steps_of_ranks",
    "units_of_ranks",
    "wait_for_last",
]

_SLOWER = 0.02
"""A rank is called slow if it takes longer than the others by this part of a step at least."""


class Findings:
    """What a profile has found: the attributes of `zero_fn.profiling.profile.Profile`."""

    def __init__(self) -> None:
        self.steps: list[StepTimes] = []
        self.units: list[UnitTimes] = []
        self.collectives: list[CollectiveTimes] = []
        self.slow: list[Slow] = []
        self.overlap: list[float | None] = []
        self.memory: dict[str, dict[str, int]] = {}
        self.numbers: dict[str, Any] = {}

    @property
    def slowest(self) -> Slow | None:
        """The first of `slow`."""
        return self.slow[0] if self.slow else None


@dataclass(frozen=True, slots=True)
class StepTimes:
    """One step of one rank. `parts`: seconds by name; together they are `seconds`."""

    rank: int
    number: int
    seconds: float
    parts: dict[str, float]


@dataclass(frozen=True, slots=True)
class UnitTimes:
    """Computation in one phase of a unit: seconds a step by rank, the lower quartile of the steps.

    `idle`: of them.
    """

    unit: str
    phase: str
    seconds: list[float]
    idle: list[float]


@dataclass(frozen=True, slots=True)
class CollectiveTimes:
    """One collective of a step, such as the gather of a unit, over all ranks.

    Attributes:
        name: What it moves, in words.
        axis: The name of the data axis; ranks: how many it has.
        count: How often in a step.
        nbytes: Bytes that a rank sends in a step, the mean over ranks.
        seconds: From when the last rank began to when it was complete, the median; where it was
            complete before anybody waited, at most.
        exposed_s: Seconds a step, the mean over ranks, in which a rank waited for it,
            but for those below.
        waited_s: Seconds a step, the mean over ranks, in which a rank waited for a slower one.
        last_rank: The rank that others waited for longest; -1 if nobody waited.
        slowest_peer: The rank whose messages took longest on the way; -1 where that is not known.
    """

    name: str
    axis: str
    ranks: int
    count: float
    nbytes: float
    seconds: float
    exposed_s: float
    waited_s: float
    last_rank: int
    slowest_peer: int

    @property
    def algorithm_bandwidth(self) -> float:
        """Bytes of the whole message by seconds."""
        return self.bus_bandwidth * self.ranks / (self.ranks - 1) if self.ranks > 1 else 0.0

    @property
    def bus_bandwidth(self) -> float:
        """Bytes that a rank sends by seconds: what its link carries."""
        return self.nbytes / self.count / self.seconds if self.seconds and self.count else 0.0


@dataclass(frozen=True, slots=True)
class Slow:
    """A part of the step that takes longer on one rank than on the others.

    A rank that is slow in several has several.

    Attributes:
        rank: Its number.
        seconds: How much longer a step takes there than on the median of the others; of each the
            lower quartile of the steps, which is what it takes when nothing comes between.
        part: The part of the step.
        unit, phase: The unit where that is, in which phase; "" for what is in none, or in many.
        waited_s: Seconds a step that the others waited for the rank,
            the mean over these; for all that it is slow in.
    """

    rank: int
    seconds: float
    part: str
    unit: str
    phase: str
    waited_s: float

    def __str__(self) -> str:
        where = f"{self.part} in {self.phase} of {self.unit}" if self.unit else self.part
        return (
            f"rank {self.rank} is slow: {self.seconds * 1e3:.1f} ms a step longer than the others "
            f"({where}); they waited {self.waited_s * 1e3:.1f} ms for it"
        )


def wait_for_last(records: Sequence[RankRecord]) -> dict[str, tuple[int, int]]:
    """For each collective, the rank that began it last, and when.

    What the others waited until then becomes `waiting`.
    """
    last: dict[str, tuple[int, int]] = {}
    for record in records:
        for each in record.collectives:
            if each.group and each.begin_ns > last.get(each.group, (0, -1))[1]:
                last[each.group] = record.rank, each.begin_ns
    for record in records:
        for number, step in enumerate(record.steps):
            record.steps[number] = [
                part for span in step for part in _told_apart(span, record, last)
            ]
    return last


def _told_apart(span: Span, record: RankRecord, last: dict[str, tuple[int, int]]) -> Iterable[Span]:
    if span.part == "communication" and span.collective is not None:
        rank, begin_ns = last.get(span.collective.group, (record.rank, 0))
        end = min(span.end_ns, begin_ns)
        if rank != record.rank and end > span.begin_ns:
            rest = (span.phase, span.unit, span.collective)
            return Span(span.begin_ns, end, "waiting", *rest), Span(
                end, span.end_ns, "communication", *rest
            )
    return (span,)


def steps_of_ranks(records: Sequence[RankRecord]) -> list[StepTimes]:
    """All steps of all ranks."""
    found = []
    for record in records:
        for number, spans in enumerate(record.steps):
            parts = dict.fromkeys(PARTS, 0)
            for span in spans:
                parts[span.part] += span.ns - span.idle_ns
                parts["idle"] += span.idle_ns
            seconds = (spans[-1].end_ns - spans[0].begin_ns) / 1e9
            found.append(
                StepTimes(
                    record.rank, number, seconds, {part: ns / 1e9 for part, ns in parts.items()}
                )
            )
    return found


def units_of_ranks(records: Sequence[RankRecord]) -> list[UnitTimes]:
    """Computation of each unit, in the order in which forwards begin; forward first."""
    found: dict[tuple[str, str], list[list[list[float]]]] = {}
    for place, record in enumerate(records):
        for number, spans in enumerate(record.steps):
            for span in spans:
                if span.part == "compute" and span.unit:
                    rows = found.setdefault(
                        (span.phase, span.unit),
                        [[[0.0] * len(each.steps) for each in records] for _ in range(2)],
                    )
                    for row, ns in zip(rows, (span.ns, span.idle_ns), strict=True):
                        row[place][number] += ns / 1e9
    units = [
        UnitTimes(unit, phase, *([_usual(times) for times in row] for row in rows))
        for (phase, unit), rows in found.items()
    ]
    return sorted(units, key=lambda row: row.phase == "backward")


def carried_of(records: Sequence[RankRecord], last: dict[str, tuple[int, int]]) -> dict[str, float]:
    """By axis, the bytes that a rank sends by the seconds in which a collective of the axis is
    under way: from when the last rank has begun it.

    The least of all ranks.
    """
    found: dict[str, float] = {}
    for record in records:
        for axis in dict.fromkeys(each.axis for each in record.collectives):
            own = [each for each in record.collectives if each.axis == axis and each.end_ns]
            busy = _merged(
                (last.get(each.group, (0, each.begin_ns))[1], each.end_ns) for each in own
            )
            if busy and (nbytes := sum(each.nbytes for each in own)):
                rate = nbytes / sum(end - begin for begin, end in busy) * 1e9
                found[axis] = min(rate, found.get(axis, rate))
    return found


def collectives_of(
    records: Sequence[RankRecord], last: dict[str, tuple[int, int]]
) -> list[CollectiveTimes]:
    """The collectives of the steps, by name; the longest first."""
    count = sum(len(record.steps) for record in records)
    several: dict[tuple[str, str], list[Collective]] = defaultdict(list)  # by name and axis
    waits: dict[tuple[str, str], Counter[str]] = defaultdict(Counter)  # nanoseconds
    for_whom: dict[tuple[str, str], Counter[int]] = defaultdict(Counter)
    peers: dict[tuple[str, str], Counter[int]] = defaultdict(Counter)
    for record in records:
        for each in record.collectives:
            several[each.name, each.axis].append(each)
            if each.slowest_peer >= 0:
                peers[each.name, each.axis][each.slowest_peer] += each.peer_ns
        for span in record.spans:
            if (cause := span.collective) is not None:
                waits[cause.name, cause.axis][span.part] += span.ns
                if span.part == "waiting":
                    for_whom[cause.name, cause.axis][last[cause.group][0]] += span.ns
    rows = []
    for key, all_ in several.items():
        took = [
            each.end_ns - last.get(each.group, (0, each.begin_ns))[1]
            for each in all_
            if each.end_ns
        ]
        rows.append(
            CollectiveTimes(
                *key,
                all_[0].size,
                len(all_) / count,
                sum(each.nbytes for each in all_) / count,
                max(0.0, median(took)) / 1e9 if took else 0.0,
                waits[key]["communication"] / count / 1e9,
                waits[key]["waiting"] / count / 1e9,
                _most(for_whom[key]),
                _most(peers[key]),
            )
        )
    return sorted(rows, key=lambda row: -(row.exposed_s + row.waited_s))


def _most(found: Counter[int]) -> int:
    return max(found, key=found.__getitem__, default=-1)


def slow_of(
    records: Sequence[RankRecord],
    steps: Sequence[StepTimes],
    units: Sequence[UnitTimes],
    last: dict[str, tuple[int, int]],
) -> list[Slow]:
    """Where ranks take longer than the others beside collectives,
    by a fiftieth of a step at least; the longest first.

    What is slow is not weighed against what is fast: where ranks meet several times in a step, each
    slow unit makes the others wait, even if these are slower in another.
    """
    if len(records) < 2:
        return []
    least = _SLOWER * median(step.seconds for step in steps)
    own = {
        record.rank: _own([step for step in steps if step.rank == record.rank])
        for record in records
    }
    waits = _waits(records, last)
    found = []
    for rank in own:
        for part in own[rank]:
            excess = _beyond({each: parts[part] for each, parts in own.items()}, rank)
            for longer, unit, phase in _by_unit(units, part, list(own), rank):
                if longer < max(least, excess / 2):  # the rank is slow in many units, or in none
                    break
                found.append(Slow(rank, longer, part, unit, phase, waits.get(rank, 0.0)))
                excess -= longer
            if excess >= least:
                found.append(Slow(rank, excess, part, "", "", waits.get(rank, 0.0)))
    return sorted(found, key=lambda each: -each.seconds)


def _by_unit(
    units: Sequence[UnitTimes], part: str, ranks: list[int], rank: int
) -> list[tuple[float, str, str]]:
    """How much longer a rank takes in each phase of each unit; the longest first."""
    found = []
    for row in units if part in ("compute", "idle") else ():
        times = (
            row.idle
            if part == "idle"
            else [a - b for a, b in zip(row.seconds, row.idle, strict=True)]
        )
        found.append((_beyond(dict(zip(ranks, times, strict=True)), rank), row.unit, row.phase))
    return sorted(found, reverse=True)


def _waits(records: Sequence[RankRecord], last: dict[str, tuple[int, int]]) -> dict[int, float]:
    """Seconds a step that each rank was waited for, the mean over the others."""
    found: dict[int, float] = defaultdict(float)
    for record in records:
        for span in record.spans:
            if span.part == "waiting" and span.collective is not None:
                found[last[span.collective.group][0]] += span.ns / 1e9 / len(record.steps)
    return {rank: seconds / (len(records) - 1) for rank, seconds in found.items()}


def _usual(times: Iterable[float]) -> float:
    """The lower quartile: what a step takes when nothing comes between."""
    ordered = sorted(times)
    return ordered[len(ordered) // 4] if ordered else 0.0


def _own(steps: Sequence[StepTimes]) -> dict[str, float]:
    names = [part for part in PARTS if part not in ("communication", "waiting")]
    return {part: _usual(step.parts[part] for step in steps) for part in names}


def _beyond(times: dict[int, float], rank: int) -> float:
    """How much longer one rank takes than the median of the others."""
    return times[rank] - median(time for other, time in times.items() if other != rank)


def overlap_of(record: RankRecord) -> float | None:
    """The part of the time with a collective under way in which this rank computes, as Holistic
    Trace Analysis defines it: the overlap of communication with computation, by all of
    communication.

    None without collectives.
    """
    begin, end = record.steps[0][0].begin_ns, record.steps[-1][-1].end_ns
    moving = _merged((each.begin_ns, each.end_ns) for each in record.collectives if each.end_ns)
    moving = [(max(a, begin), min(b, end)) for a, b in moving if b > begin and a < end]
    total = sum(b - a for a, b in moving)
    if not total:
        return None
    computing = _merged(
        (s.begin_ns, s.end_ns)
        for s in record.spans
        if s.part in ("compute", "optimizer") and s.idle_ns < s.ns
    )
    shared, at = 0, 0
    for a, b in moving:
        while at < len(computing) and computing[at][1] <= a:
            at += 1
        for c, d in computing[at:]:
            if c >= b:
                break
            shared += max(0, min(b, d) - max(a, c))
    return shared / total


def _merged(ranges: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
    """Ranges without those that meet others: each moment once."""
    merged: list[tuple[int, int]] = []
    for begin, end in sorted(ranges):
        if merged and begin <= merged[-1][1]:
            merged[-1] = merged[-1][0], max(merged[-1][1], end)
        elif end > begin:
            merged.append((begin, end))
    return merged
