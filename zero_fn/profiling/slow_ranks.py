"""The ranks that take longer than the others, and where."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median

from zero_fn.profiling.spans import PARTS
from zero_fn.profiling.steps import StepTimes, UnitTimes, lower_quartile

__all__ = ["Slow", "slow_of"]

_SLOWER = 0.02
"""A rank is called slow if it takes longer than the others by this part of a step at least."""


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


def slow_of(
    steps: Sequence[StepTimes], units: Sequence[UnitTimes], waits: Mapping[int, float]
) -> list[Slow]:
    """Where ranks take longer than the others beside collectives,
    by a fiftieth of a step at least; the longest first.

    `waits`: seconds a step that each rank was waited for. What is slow is not weighed against what
    is fast: where ranks meet several times in a step, each slow unit makes the others wait, even if
    these are slower in another.
    """
    own: dict[int, list[StepTimes]] = {}
    for step in steps:
        own.setdefault(step.rank, []).append(step)
    if len(own) < 2:
        return []
    least = _SLOWER * median(step.seconds for step in steps)
    found = []
    for part in (part for part in PARTS if part not in ("communication", "waiting")):
        times = [lower_quartile(step.parts[part] for step in each) for each in own.values()]
        inside = [(row.unit, row.phase, _times_in(row, part)) for row in units]
        for place, rank in enumerate(own):
            excess = _beyond(times, place)
            longer = [(_beyond(each, place), unit, phase) for unit, phase, each in inside if each]
            for seconds, unit, phase in sorted(longer, reverse=True):
                # Else the rank is slow in many units, or in none.
                if seconds >= max(least, excess / 2):
                    found.append(Slow(rank, seconds, part, unit, phase, waits.get(rank, 0.0)))
                    excess -= seconds
            if excess >= least:
                found.append(Slow(rank, excess, part, "", "", waits.get(rank, 0.0)))
    return sorted(found, key=lambda each: -each.seconds)


def _times_in(row: UnitTimes, part: str) -> list[float]:
    """Seconds of a part in a unit, by rank; nothing for parts that are not told by unit."""
    computed = [whole - idle for whole, idle in zip(row.seconds, row.idle, strict=True)]
    return {"compute": computed, "idle": row.idle}.get(part, [])


def _beyond(times: Sequence[float], place: int) -> float:
    """How much longer one rank takes than the median of the others."""
    return times[place] - median(time for other, time in enumerate(times) if other != place)
