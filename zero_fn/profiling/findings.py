"""What a profile has found in the records of all ranks."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from statistics import median
from typing import Any

from zero_fn.profiling.collectives import (
    CollectiveTimes,
    carried_of,
    collectives_of,
    overlap_of,
    wait_for_last,
)
from zero_fn.profiling.record import RankRecord
from zero_fn.profiling.slow_ranks import Slow, slow_of
from zero_fn.profiling.steps import steps_of_ranks, units_of_ranks

__all__ = ["Findings"]


class Findings:
    """The attributes of `zero_fn.profiling.profile.Profile`; empty without records."""

    def __init__(self, records: Sequence[RankRecord] = ()) -> None:
        more = [record.more for record in records]
        phases = dict.fromkeys(phase for row in more for phase in row["phases"])
        self.overlap = [overlap_of(record) for record in records]  # with the waits for slower ranks
        last = wait_for_last(records)
        self.steps = steps_of_ranks(records)
        self.units = units_of_ranks(records)
        self.collectives, waits = collectives_of(records, last)
        self.slow = slow_of(self.steps, self.units, waits)
        self.memory = {
            phase: _most(row["phases"].get(phase, {}) for row in more) for phase in phases
        }
        self.numbers: dict[str, Any] = {}
        if records:
            self.numbers = {
                "ranks": len(records),
                "steps": len(records[0].steps),
                "carried": carried_of(records, last),
                **_bytes(more, self.collectives),
                **_rates(more, median(step.seconds for step in self.steps)),
            }

    @property
    def slowest(self) -> Slow | None:
        """The first of `slow`."""
        return self.slow[0] if self.slow else None


def _bytes(
    more: Sequence[Mapping[str, Any]], collectives: Sequence[CollectiveTimes]
) -> dict[str, Any]:
    """What was sent, moved and held, beside what `plan` says of it; and how long that was seen."""
    names = ("sent", "moved", "held")
    found: dict[str, Any] = {name: _most(row[name] for row in more) for name in names}
    found["exposed"] = {
        axis: sum(each.exposed_s for each in collectives if each.axis == axis)
        for axis in found["sent"]
    }
    plans = [row["planned"] for row in more]
    found["planned"] = None
    if all(plans):
        found["planned"] = {name: _most(plan[name] for plan in plans) for name in names}
        found["planned"]["peak"] = max(plan["peak"] for plan in plans)
    return found


def _rates(more: Sequence[Mapping[str, Any]], seconds: float) -> dict[str, float]:
    """What is done in a second, of a step that takes so many."""
    found = {"seconds": seconds}
    if all(row["tokens"] for row in more):
        found["tokens_per_second"] = sum(row["tokens"] for row in more) / seconds
    if all("operations" in row for row in more):
        counts = zip(*(row["operations"] for row in more), strict=True)
        total, of_model, peak = (sum(each) / len(more) for each in counts)
        found |= {
            "flops": total,
            "model_flops": of_model,
            "peak_flops_per_second": peak,
            "utilisation": of_model / seconds / peak,
            "hardware_utilisation": total / seconds / peak,
        }
    return found


def _most(rows: Iterable[Mapping[str, float]]) -> dict[str, float]:
    """The largest of all ranks, by name."""
    found: dict[str, float] = {}
    for row in rows:
        found |= {name: max(value, found.get(name, 0.0)) for name, value in row.items()}
    return found
