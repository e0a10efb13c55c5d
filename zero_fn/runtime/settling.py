"""Makes reduced gradients the `.grad` of resting parameters: at once, or after ranks have agreed on which gradients exist."""

from __future__ import annotations

from operator import gt

from zero_fn.runtime.away import Away
from zero_fn.runtime.control import Control
from zero_fn.runtime.gradients import Reduction
from zero_fn.runtime.unit import Unit

__all__ = ["Settling"]


class Settling:
    """Settles the reductions of one transformed module, and keeps those with gradients that ranks must agree on first."""

    def __init__(self, away: Away, control: Control) -> None:
        self._away, self._control = away, control
        self._undecided: list[tuple[Unit, Reduction]] = []

    def settle(self, unit: Unit, reduction: Reduction) -> None:
        """Waits for a reduction, and settles the sharded gradients that this rank contributed to: these surely exist."""
        reduction.wait()
        self._undecided.append((unit, reduction))
        at_once = reduction.local_at_once()
        self._away.add_gradients(unit.slots, reduction.resting(at_once))
        self._away.put_gradients(unit.groups)
        if at_once.count(True) == reduction.trained_count:
            reduction.release()

    def decide(self) -> None:
        """Settles the others: replicated gradients, and those that only other ranks contributed to. A collective."""
        undecided, self._undecided = self._undecided, []
        local = [bit for _, reduction in undecided for bit in reduction.has_local]
        if not undecided:
            return
        union = self._control.any(local, "which parameters have gradients")
        for _, reduction in undecided:
            reduction.regather()
        for _, reduction in undecided:
            reduction.wait_regathered()  # all, before a hook of the user may raise
        end = 0
        for unit, reduction in undecided:
            start, end = end, end + len(unit.slots)
            if reduction.is_released:
                continue
            late = [
                *map(gt, union[start:end], reduction.local_at_once())
            ]  # some rank has one, and it is not at rest yet
            self._away.add_gradients(unit.slots, reduction.resting(late))
            self._away.put_gradients(unit.groups)

    def drop(self) -> None:
        """Forgets the reductions that are not settled, after a backward that raised."""
        self._undecided = []
