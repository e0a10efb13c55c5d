"""What one rank has noted of some steps, as it tells it to rank 0."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from zero_fn.profiling.clock import Collective, Taken
from zero_fn.profiling.spans import Span, spans_of, steps_of
from zero_fn.values.watching import Moment

__all__ = ["RankRecord", "record_of"]

_PHASE_BEFORE = {
    Moment.BACKWARD: "forward",
    Moment.OPTIMIZER: "backward",
    Moment.STEPPED: "optimizer",
}


@dataclass(slots=True)
class RankRecord:
    """Some steps of one rank. `more`: numbers, by name."""

    rank: int
    steps: list[list[Span]]
    more: dict[str, Any]

    @property
    def spans(self) -> list[Span]:
        """All spans, in order."""
        return [span for step in self.steps for span in step]

    @property
    def collectives(self) -> list[Collective]:
        """Those that the rank has issued or waited for in these steps, each once."""
        found = {
            id(span.collective): span.collective
            for span in self.spans
            if span.collective is not None
        }
        return list(found.values())

    def shift(self, offset_ns: int) -> None:
        """Tells times by a clock that is behind by so much."""
        for each in self.collectives:
            each.begin_ns -= offset_ns
            each.end_ns -= offset_ns if each.end_ns else 0
        for span in self.spans:
            span.begin_ns, span.end_ns = span.begin_ns - offset_ns, span.end_ns - offset_ns


def record_of(rank: int, taken: Taken, *, on_device: bool, first: int) -> RankRecord:
    """The record of the steps from the number `first` on.

    In `more`: their backwards, and whether they accumulate; the most bytes of memory in each phase,
    and the bytes that tiers moved in a step.
    """
    spans, steps = list(spans_of(taken.marks, on_device=on_device)), steps_of(taken.marks)[first:]
    more: dict[str, Any] = {"phases": _phases(taken, spans)}
    if steps:
        begin, end = steps[0][0], steps[-1][1]
        backwards = [mark.what for mark in taken.marks[begin:end] if mark.moment is Moment.BACKWARD]
        moved = Counter[str]()
        for at, tier, nbytes, is_read in taken.moved:
            moved[f"{'from' if is_read else 'to'} {tier}"] += nbytes if begin < at <= end else 0
        more["moved"] = {name: nbytes / len(steps) for name, nbytes in moved.items()}
        more |= {"backwards": len(backwards) / len(steps), "accumulated": all(backwards)}
    return RankRecord(rank, [spans[begin:end] for begin, end in steps], more)


def _phases(taken: Taken, spans: Sequence[Span]) -> dict[str, dict[str, int]]:
    found: dict[str, dict[str, int]] = {}

    def note(phase: str, what: str, nbytes: int) -> None:
        row = found.setdefault(phase, {})
        row[what] = max(row.get(what, 0), nbytes)

    for number, span in enumerate(spans):
        for mark in taken.marks[number : number + 2]:
            if span.phase and mark.resident_nbytes:
                note(span.phase, "process", mark.resident_nbytes)
    for mark in taken.marks:
        ended = [_PHASE_BEFORE[mark.moment]] if mark.moment in _PHASE_BEFORE else []
        for phase in [*ended, "at rest"] if mark.moment is Moment.STEPPED else ended:
            note(phase, "process", mark.resident_nbytes)
            if mark.allocated is not None:
                note(phase, "device", mark.allocated[0])
        if mark.allocated is not None:
            note("peak", "device", mark.allocated[1])
    return found
