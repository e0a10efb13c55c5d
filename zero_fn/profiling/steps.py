"""What the records of all ranks say of their steps: the parts of each, and computation by unit."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from zero_fn.profiling.record import RankRecord
from zero_fn.profiling.spans import PARTS

__all__ = ["StepTimes", "UnitTimes", "lower_quartile", "steps_of_ranks", "units_of_ranks"]


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


def steps_of_ranks(records: Sequence[RankRecord]) -> list[StepTimes]:
    """All steps of all ranks."""
    found = []
    for record in records:
        for number, spans in enumerate(record.steps):
            ns = Counter(dict.fromkeys(PARTS, 0))
            for span in spans:
                ns[span.part] += span.ns - span.idle_ns
                ns["idle"] += span.idle_ns
            parts = {part: ns[part] / 1e9 for part in PARTS}
            seconds = (spans[-1].end_ns - spans[0].begin_ns) / 1e9
            found.append(StepTimes(record.rank, number, seconds, parts))
    return found


def units_of_ranks(records: Sequence[RankRecord]) -> list[UnitTimes]:
    """Computation of each unit, in the order in which forwards begin; forward first."""
    ns: dict[tuple[str, str], Counter[tuple[int, int]]] = defaultdict(Counter)
    idle: dict[tuple[str, str], Counter[tuple[int, int]]] = defaultdict(Counter)
    for place, record in enumerate(records):
        for number, spans in enumerate(record.steps):
            for span in spans:
                if span.part == "compute" and span.unit:
                    ns[span.phase, span.unit][place, number] += span.ns
                    idle[span.phase, span.unit][place, number] += span.idle_ns

    def by_rank(taken: Counter[tuple[int, int]]) -> list[float]:
        return [
            lower_quartile(taken[place, number] / 1e9 for number in range(len(record.steps)))
            for place, record in enumerate(records)
        ]

    units = [UnitTimes(key[1], key[0], by_rank(ns[key]), by_rank(idle[key])) for key in ns]
    return sorted(units, key=lambda row: row.phase == "backward")


def lower_quartile(times: Iterable[float]) -> float:
    """What a step takes when nothing comes between."""
    ordered = sorted(times)
    return ordered[len(ordered) // 4]
