"""What the steps since the last report add up to."""

from __future__ import annotations

from collections import Counter, defaultdict
from time import monotonic
from typing import Any

from zero_fn.profiling.clock import Taken
from zero_fn.profiling.spans import spans_of
from zero_fn.transport.traffic import PAYLOAD
from zero_fn.values.watching import Moment

__all__ = ["Tally"]

_BY_KIND = {"all-gather": "gather", "reduce-scatter": "reduce", "all-to-all": "reduce"}
_BY_PHASE = {"forward": "forward", "backward": "backward", "optimizer": "optimizer_step"}


class Tally:
    """Seconds of each step since the last `report`, and sums since the run began."""

    def __init__(self) -> None:
        self.seconds: defaultdict[str, list[float]] = defaultdict(list)
        self.beside: list[float] = []  # of each step, seconds beside collectives
        self.totals = Counter[str]()
        self.peaks = Counter[str]()  # bytes
        self.done = Counter[str]()  # tokens and samples
        self._since = monotonic()  # the time of the last `report`
        self._before = Counter[str]()  # the totals at the last `report`

    def add(self, taken: Taken, *, on_device: bool) -> float:
        """Adds a step; returns how long it took."""
        spans = list(spans_of(taken.marks, on_device=on_device))
        parts, phases = Counter[str](), Counter[str]()  # the optimizer is one of both
        for span in spans:
            parts[span.part] += span.ns
            phases[span.phase] += span.ns
        length = spans[-1].end_ns - spans[0].begin_ns
        self.seconds["step"].append(length / 1e9)
        self.seconds["waiting"].append(parts["communication"] / 1e9)
        self.beside.append((length - parts["communication"]) / 1e9)
        for phase, name in _BY_PHASE.items():
            self.seconds[name] += [phases[phase] / 1e9] if phases[phase] else []
        for part, name in (("data", "data"), ("copies", "tier_wait")):
            self.seconds[name] += [parts[part] / 1e9] if parts[part] else []
        self._add_bytes(taken)
        return length / 1e9

    def _add_bytes(self, taken: Taken) -> None:
        for mark in taken.marks:
            if mark.resident_nbytes:
                self.peaks["host"] = max(self.peaks["host"], mark.resident_nbytes)
            if mark.allocated is not None:
                self.peaks["device"] = max(self.peaks["device"], mark.allocated[1])
            each = mark.collective
            if each is not None and each.kind in PAYLOAD:
                if mark.moment is Moment.ISSUED:
                    self.totals[f'sent_bytes_total{{axis="{each.axis}"}}'] += each.nbytes
                elif mark.moment is Moment.WAITED:
                    self.seconds[_BY_KIND[each.kind]].append((each.end_ns - each.begin_ns) / 1e9)
        for _, tier, nbytes, is_read in taken.moved:
            self.totals[f'tier_{"read" if is_read else "written"}_bytes_total{{tier="{tier}"}}'] += nbytes

    @property
    def age_s(self) -> float:
        """Seconds since the last `report`."""
        return monotonic() - self._since

    def report(self) -> dict[str, Any]:
        """All of it by the names of numbers, without `zero_fn_`; then it begins anew, but for the sums."""
        found: dict[str, Any] = {f"{name}_seconds": list(each) for name, each in self.seconds.items() if each}
        found |= self.totals | {f'step_peak_memory_bytes{{tier="{tier}"}}': n for tier, n in self.peaks.items() if n}
        for name, total in self.totals.items():
            if name.startswith("tier_"):
                found[name.replace("_bytes_total", "_bytes_per_second")] = (total - self._before[name]) / self.age_s
        self._since = monotonic()
        self._before = Counter(self.totals)
        for each in (self.seconds, self.beside, self.peaks, self.done):
            each.clear()
        return found
