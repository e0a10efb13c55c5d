"""One transformed module while it runs.

It is one object in four files, each on top of the one before: what its passes share
(open_pass.py), its backwards (backward.py), its forwards (forward.py), and here what verbs and
optimizers ask of it.
"""

from __future__ import annotations

from threading import get_ident
from typing import Any

from zero_fn.runtime.blocks import UserBlock
from zero_fn.runtime.forward import Forward
from zero_fn.runtime.open_pass import no_unit
from zero_fn.runtime.unit import Unit
from zero_fn.runtime.whole_leaves import end_whole
from zero_fn.transport.line import Line
from zero_fn.values.assignment import Assignment

__all__ = ["Run", "run_of"]


class Run(Forward):
    """The running state of one transformed module, shared by its units,
    as verbs and optimizers see it."""

    def __init__(self, transport: Line, assignment: Assignment) -> None:
        super().__init__(transport, assignment)
        # Blocks that are open, or were interrupted while they closed.
        self.blocks: list[UserBlock] = []

    def __deepcopy__(self, memo: dict[int, Any]) -> Run:
        memo[id(self)] = twin = Run(self.transport, self.assignment)
        twin.depth, twin.tied_around = self.depth, self.tied_around
        twin.units = [no_unit] * len(self.units)
        return twin

    # -- calls -------------------------------------------------------------------------------------

    def begin_outermost(self) -> None:
        """To be called when the outermost call is on its stack."""
        self.calls.thread = get_ident()
        if self.blocks:
            self.leave_blocks()

    # -- for verbs and optimizers ------------------------------------------------------------------

    def recover(self) -> None:
        """Puts the module at rest if its last pass raised.

        Verbs call this first. Ranks that raised alike stay in step.
        """
        self.abandon()
        self.leave_blocks()
        self.recover_raised()

    def note_loaded(self) -> None:
        """Parameters were loaded: the next forward gathers them anew
        and compares them over ranks."""
        self.recover()
        self.has_agreed = False
        self.is_fresh = True

    def note_optimizer_step(self) -> None:
        """Forgets the graphs of earlier forwards: they can have no
        backward after an optimizer step."""
        self.abandon()
        self.updates += 1
        if self.backward is None and self.forward is None:
            self.graphs.forget()

    # -- for blocks of several backwards, whose gradients are reduced once at the end --------------

    @property
    def is_accumulating(self) -> bool:
        """Whether an `accumulate` block is open."""
        if self.blocks:
            self.leave_blocks()
        return self.accumulating > 0

    def leave_blocks(self) -> None:
        """Closes what blocks have left open whose end was interrupted.
        [Note: interrupted blocks] (blocks.py)"""
        still = [block for block in self.blocks if block.is_open]
        if len(still) == len(self.blocks):
            return
        accumulating = sum(block.accumulates for block in still)
        whole = {unit for block in self.blocks if block not in still for unit in block.units}
        for unit in self.live_units():
            if unit in whole:
                end_whole(unit)
        self._close(drops_sums=not accumulating)
        self.blocks = still
        self.accumulating = accumulating

    def _close(self, *, drops_sums: bool) -> None:
        for unit in self.live_units():
            if drops_sums:
                unit.gradients.take()
            unit.mark_stale()
        self.settling.drop()
        self.bits.finish_unread()

    def begin_accumulation(self, block: UserBlock) -> None:
        """A block begins, which may be inside another."""
        if not self.accumulating:
            self.recover()  # what a backward before left must not be taken for a part of this sum
            self.is_fresh = True
        self.blocks.append(block)
        self.accumulating += 1

    def end_accumulation(self, block: UserBlock, *, failed: bool) -> None:
        """Ends an `accumulate` block.

        The outermost one reduces the sums, or drops them after an exception. A collective.
        """
        self.accumulating -= 1
        if self.accumulating:
            self.blocks.remove(block)
            return
        is_reduced = False
        try:
            if not failed:
                self._reduce()  # hooks of the user run inside
                is_reduced = True
        finally:
            if not is_reduced:
                self.recover_backward()
            self._close(drops_sums=not is_reduced)
        self.blocks.remove(block)

    def _reduce(self) -> None:
        """Reduces and settles all local gradients."""
        units = self.live_units()
        if not units:
            return
        for unit in units:
            unit.gradients.unmark()
        local = [grad is not None for unit in units for grad in unit.gradients.local]
        union = iter(self.bits.any(local, "which gradients were accumulated"))
        for unit in units:
            present = [next(union) for _ in unit.slots]
            if any(present):
                self.settling.settle(unit, unit.gradients.reduce(exact=True, present=present))
        self.settling.decide()
        self.bits.finish_unread()
        self.offloaded.finish_gradients()


def run_of(unit: Unit) -> Run:
    """What runs a unit."""
    assert isinstance(unit.run, Run)
    return unit.run
