"""From reductions to `.grad`: which resting parameters get a gradient, on every rank alike."""

from __future__ import annotations

from operator import gt

from zero_fn.runtime.gradients import Reduction, settle_gradients
from zero_fn.runtime.unit import Unit
from zero_fn.tiers.offloaded_state import OffloadedState
from zero_fn.transport.agree import Unions

__all__ = ["Settling"]


class Settling:
    """Hands reduced gradients to the resting parameters of one transformed module."""

    def __init__(self, bits: Unions, offloaded: OffloadedState) -> None:
        self._bits = bits
        self._offloaded = offloaded
        # Units that are reduced, with gradients that ranks must agree on.
        self._undecided: list[tuple[Unit, Reduction]] = []

    def settle(self, unit: Unit, reduction: Reduction) -> None:
        """Waits for a reduction, and settles the sharded gradients that this rank contributed to:
        these surely exist."""
        reduction.wait()
        self._undecided.append((unit, reduction))
        settle_gradients(
            unit.slots, unit.memory.groups, reduction.take(reduction.local_at_once), self._offloaded
        )

    def decide(self) -> None:
        """Settles the others: replicated gradients, and those that only other ranks contributed to.

        A collective.
        """
        undecided, self._undecided = self._undecided, []
        local = [bit for _, reduction in undecided for bit in reduction.has_local]
        if not undecided:
            return
        union = self._bits.any(local, "which parameters have gradients")
        works = [reduction.regather() for _, reduction in undecided]
        for work in works:  # all, before a hook of the user may raise
            if work is not None:
                work.wait()
        end = 0
        for unit, reduction in undecided:
            start, end = end, end + len(unit.slots)
            # Gradients that some rank has, and that are not at rest yet.
            late = [*map(gt, union[start:end], reduction.local_at_once)]
            if True in late:
                settle_gradients(
                    unit.slots, unit.memory.groups, reduction.take(late), self._offloaded
                )

    def drop(self) -> None:
        """Forgets the reductions that are not settled, after a backward that raised."""
        self._undecided = []
