"""Reduced gradients become those of resting parameters: at once, or when all ranks have said who has one."""

from __future__ import annotations

from zero_fn.runtime.away import Away
from zero_fn.runtime.control import Control
from zero_fn.runtime.gradients import Reduction
from zero_fn.runtime.unit import Unit

__all__ = ["Settling"]


class Settling:
    """The reductions of one transformed module that are waited for, and those that had to wait for other ranks' word."""

    def __init__(self, away: Away, control: Control) -> None:
        self._away, self._control = away, control
        self._undecided: list[tuple[Unit, Reduction]] = []

    def settle(self, unit: Unit, reduction: Reduction) -> None:
        """Waits for a reduction. Sharded gradients that this rank contributed to are settled: there is one."""
        reduction.wait()
        self._undecided.append((unit, reduction))
        is_settled = True
        for slot, has_local in zip(unit.slots, reduction.has_local, strict=True):
            if has_local and slot.path.is_reduced_at_once:
                grad = reduction.resting(slot)
                assert grad is not None, f"{slot.fqn} has a gradient but requires none"
                self._away.add_gradient(slot, grad)
            elif not reduction.is_frozen(slot):
                is_settled = False
        self._away.put_gradients(unit.groups)
        if is_settled:
            reduction.release()

    def decide(self) -> None:
        """Settles what had to wait: replicated gradients, and those that only other ranks contributed to. A collective."""
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
            for slot, has_local, has_any in zip(unit.slots, reduction.has_local, union[start:end], strict=True):
                grad = reduction.resting(slot) if has_any and not (has_local and slot.path.is_reduced_at_once) else None
                if grad is not None:
                    self._away.add_gradient(slot, grad)
            self._away.put_gradients(unit.groups)

    def drop(self) -> None:
        """Forgets what waits: a backward raised."""
        self._undecided = []
