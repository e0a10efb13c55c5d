"""What one rank has noted of some steps, as it tells it to rank 0."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist

from zero_fn.profiling.clock import Collective, Mark, Taken
from zero_fn.profiling.spans import Span, spans_of, steps_of
from zero_fn.values.watching import Moment

__all__ = ["RankRecord", "record_of"]

_PHASES = {
    Moment.BACKWARD: ("forward", "backward"),
    Moment.ARRIVED: ("backward",),
    Moment.OPTIMIZER: ("backward", "optimizer"),
    Moment.STEPPED: ("optimizer", "at rest", "forward"),
}
"""Phases of which a moment is the begin, the end or the middle."""


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
        found = [span.collective for span in self.spans if span.collective is not None]
        return list({id(each): each for each in found}.values())

    def shift(self, offset_ns: int) -> None:
        """Tells times by a clock that is behind by so much."""
        for each in self.collectives:
            each.begin_ns -= offset_ns
            each.end_ns -= offset_ns if each.end_ns else 0
        for span in self.spans:
            span.begin_ns, span.end_ns = span.begin_ns - offset_ns, span.end_ns - offset_ns


def record_of(taken: Taken, *, on_device: bool, first: int) -> RankRecord:
    """The record of the steps from the number `first` on.

    In `more`: their backwards, and whether they accumulate; the most bytes of memory in each phase,
    and the bytes that tiers moved in a step.
    """
    spans, steps = list(spans_of(taken.marks, on_device=on_device)), steps_of(taken.marks)[first:]
    more: dict[str, Any] = {"phases": _most_memory(taken.marks)}
    if steps:
        begin, end = steps[0][0], steps[-1][1]
        backwards = [mark.what for mark in taken.marks[begin:end] if mark.moment is Moment.BACKWARD]
        moved = Counter[str]()
        for at, tier, nbytes, is_read in taken.moved:
            moved[f"{'from' if is_read else 'to'} {tier}"] += nbytes if begin < at <= end else 0
        more["moved"] = {name: nbytes / len(steps) for name, nbytes in moved.items()}
        more |= {"backwards": len(backwards) / len(steps), "accumulated": all(backwards)}
    rank = dist.get_rank() if dist.is_initialized() else 0
    return RankRecord(rank, [spans[begin:end] for begin, end in steps], more)


def _most_memory(marks: Sequence[Mark]) -> dict[str, Counter[str]]:
    """The most bytes in each phase, of the process and in use on the device."""
    found: defaultdict[str, Counter[str]] = defaultdict(Counter)
    for mark in marks:
        in_use, peak = mark.allocated or (0, 0)
        for phase in _PHASES.get(mark.moment, ()):
            found[phase] |= Counter(process=mark.resident_nbytes, device=in_use)
        found["peak"] |= Counter(device=peak)
    return {phase: row for phase, row in found.items() if row}
