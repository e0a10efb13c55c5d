"""What the records of all ranks say of their collectives: who was waited for, how long, and what
the links carried."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import inf
from statistics import median

from zero_fn.profiling.clock import Collective
from zero_fn.profiling.record import RankRecord
from zero_fn.profiling.spans import Span

__all__ = [
    "CollectiveTimes",
    "carried_of",
    "collectives_of",
    "overlap_of",
    "wait_for_last",
]

Last = Mapping[str, tuple[int, int]]
"""By the group of a collective, the rank that began it last, and when."""


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

    @property
    def algorithm_bandwidth(self) -> float:
        """Bytes of the whole message by seconds."""
        return self.bus_bandwidth * self.ranks / (self.ranks - 1) if self.ranks > 1 else 0.0

    @property
    def bus_bandwidth(self) -> float:
        """Bytes that a rank sends by seconds: what its link carries."""
        return self.nbytes / self.count / self.seconds if self.seconds else 0.0


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
        for step in record.steps:
            step[:] = [part for span in step for part in _told_apart(span, record.rank, last)]
    return last


def _told_apart(span: Span, rank: int, last: Last) -> Sequence[Span]:
    if span.part != "communication" or span.collective is None:
        return (span,)
    slower, begin_ns = last.get(span.collective.group, (rank, 0))
    until_ns = min(span.end_ns, begin_ns)
    if slower == rank or until_ns <= span.begin_ns:
        return (span,)
    return (
        replace(span, end_ns=until_ns, part="waiting"),
        replace(span, begin_ns=until_ns),
    )


def collectives_of(
    records: Sequence[RankRecord], last: Last
) -> tuple[list[CollectiveTimes], dict[int, float]]:
    """The collectives of the steps, by name, the longest first; and by rank the seconds a step that
    it was waited for, the mean over the others."""
    count = sum(len(record.steps) for record in records)
    several: dict[tuple[str, str], list[Collective]] = defaultdict(list)
    # By what took them, and by the rank that was waited for, if one was.
    ns: dict[tuple[str, str], Counter[tuple[str, int]]] = defaultdict(Counter)
    for record in records:
        for each in record.collectives:
            several[each.name, each.axis].append(each)
        for span in record.spans:
            if (cause := span.collective) is not None:
                rank = last[cause.group][0] if span.part == "waiting" else -1
                ns[cause.name, cause.axis][span.part, rank] += span.ns
    rows, waited_for = [], Counter[int]()
    for key, all_ in several.items():
        took = [each.end_ns - _begin(each, last) for each in all_ if each.end_ns]
        waits = {rank: each for (part, rank), each in ns[key].items() if part == "waiting"}
        waited_for.update(waits)
        rows.append(
            CollectiveTimes(
                *key,
                ranks=all_[0].size,
                count=len(all_) / count,
                nbytes=sum(each.nbytes for each in all_) / count,
                seconds=max(0.0, median(took)) / 1e9 if took else 0.0,
                exposed_s=ns[key]["communication", -1] / count / 1e9,
                waited_s=sum(waits.values()) / count / 1e9,
                last_rank=max(waits, key=waits.__getitem__, default=-1),
            )
        )
    rows.sort(key=lambda row: -(row.exposed_s + row.waited_s))
    others = count - count / max(1, len(records))  # steps of the other ranks
    return rows, {rank: waited / 1e9 / others for rank, waited in waited_for.items()}


def carried_of(records: Sequence[RankRecord], last: Last) -> dict[str, float]:
    """By axis, the bytes that a rank sends by the seconds in which a collective of the axis is
    under way: from when the last rank has begun it.

    The least of all ranks.
    """
    found: dict[str, float] = {}
    for record in records:
        for axis in {each.axis: None for each in record.collectives}:
            own = [each for each in record.collectives if each.axis == axis and each.end_ns]
            nbytes = sum(each.nbytes for each in own)
            busy_ns = _union((_begin(each, last), each.end_ns) for each in own)
            if nbytes and busy_ns:
                found[axis] = min(nbytes / busy_ns * 1e9, found.get(axis, inf))
    return found


def overlap_of(record: RankRecord) -> float | None:
    """The part of the time with a collective under way in which this rank computes, as Holistic
    Trace Analysis defines it: the overlap of communication with computation, by all of
    communication.

    None without collectives.
    """
    begin, end = record.steps[0][0].begin_ns, record.steps[-1][-1].end_ns
    moving = [
        (max(each.begin_ns, begin), min(each.end_ns, end))
        for each in record.collectives
        if each.end_ns
    ]
    computing = [
        (span.begin_ns, span.end_ns)
        for span in record.spans
        if span.part in ("compute", "optimizer") and span.idle_ns < span.ns
    ]
    total = _union(moving)
    return (total + _union(computing) - _union(moving + computing)) / total if total else None


def _begin(each: Collective, last: Last) -> int:
    """When the last rank began it."""
    return last.get(each.group, (0, each.begin_ns))[1]


def _union(ranges: Iterable[tuple[int, int]]) -> int:
    """How long any of these ranges lasts, each moment once."""
    total, reached = 0, -(2**63)
    for begin, end in sorted(ranges):
        total += max(0, end - max(begin, reached))
        reached = max(reached, end)
    return total
