"""One transformed module while it runs: its forwards and its backwards."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from threading import get_ident
from typing import Any

from zero_fn.runtime.backwards import Backwards
from zero_fn.runtime.blocks import UserBlock
from zero_fn.runtime.ending import current_graph_task
from zero_fn.runtime.forwards import Door, Forwards, in_two_threads
from zero_fn.runtime.statistics import Statistics
from zero_fn.runtime.transformed import Transformed
from zero_fn.runtime.uncompiled import uncompiled
from zero_fn.runtime.unit import Unit
from zero_fn.runtime.use import UnitUse
from zero_fn.runtime.whole_step import end_whole
from zero_fn.transport.line import Line
from zero_fn.values.assignment import Assignment

__all__ = ["Run", "run_of"]


class Run:
    """The running state of one transformed module, shared by its units.

    Attributes:
        module: The units, transport and tiers of the module.
        forwards: The forwards of the module.
        backwards: The backwards of the module.
        transport: Collectives over the data axes.
        away: The storage of parameters and gradients in other tiers.
        need_in_backward, gradients_arrived: Methods of the backwards, which units call.
    """

    def __init__(self, transport: Line, assignment: Assignment) -> None:
        self.module = Transformed(transport, assignment)
        statistics = Statistics(transport, are_local=assignment.buffers == "local")
        self.forwards = Forwards(self.module, statistics)
        self.backwards = Backwards(self.module, self.forwards)
        self.transport, self.away = transport, self.module.away
        self.need_in_backward: Callable[..., None] = self.backwards.need_in_backward
        self.gradients_arrived: Callable[..., None] = self.backwards.gradients_arrived

    def __deepcopy__(self, memo: dict[int, Any]) -> Run:
        memo[id(self)] = twin = Run(self.transport, self.module.assignment)
        twin.module.depth, twin.module.lenders = self.module.depth, self.module.lenders
        twin.module.units = [_no_unit] * len(self.module.units)
        return twin

    # -- for units --------------------------------------------------------------------------------------------------

    def adopt(self, unit: Unit) -> None:
        """Registers a unit: a new one, or the copy of the one with its index."""
        units: list[Callable[[], Unit | None]] = self.module.units
        if unit.index == len(units):
            units.append(_no_unit)
        units[unit.index] = weakref.ref(unit)

    # -- for calls of modules ---------------------------------------------------------------------------------------

    @uncompiled
    def enter(self, unit: Unit, entry: Door) -> UnitUse:
        """Begins a forward of a unit at `entry`. On return the gathered parameters may be read."""
        if current_graph_task() != -1:
            return self.backwards.enter_recomputation(unit, entry)
        if self.forwards.current is None:
            if self.backwards.is_open:
                self._recover_backward()
            self.forwards.begin(unit, entry)
        return self.forwards.enter(unit, entry)

    # -- for verbs and optimizers -----------------------------------------------------------------------------------

    def prepare(self) -> None:
        """To be called before parameters are gathered outside a forward. Does what is done before a forward."""
        self._recover_backward()
        self.module.caller = get_ident()
        self.forwards.prepare()

    def recover(self) -> None:
        """Puts the module at rest if its last pass raised. Verbs call this first. Ranks that raised alike stay in step."""
        self.forwards.abandon()
        self.leave_blocks()
        backward = self.backwards.current
        if backward is None or not backward.ending.is_to_come:
            self.backwards.recover()

    def note_loaded(self) -> None:
        """Parameters were loaded: the next forward gathers them anew and compares them over ranks."""
        self.recover()
        self.forwards.note_loaded()

    def note_optimizer_step(self) -> None:
        """Forgets the graphs of earlier forwards: they can have no backward after an optimizer step."""
        self.forwards.abandon()
        self.backwards.updates += 1
        if self.backwards.current is None and self.forwards.current is None:
            self.module.graphs.forget()

    # -- for blocks in which local gradients are summed over several backwards, and reduced once at the end -------------

    @property
    def is_accumulating(self) -> bool:
        """Whether an `accumulate` block is open."""
        if self.module.blocks:
            self.leave_blocks()
        return self.module.accumulating > 0

    def leave_blocks(self) -> None:
        """Closes what blocks have left open whose end was interrupted. [Note: interrupted blocks] (blocks.py)"""
        module = self.module
        still = [block for block in module.blocks if block.is_open]
        if len(still) == len(module.blocks):
            return
        accumulating = sum(block.accumulates for block in still)
        whole = {unit for block in module.blocks if block not in still for unit in block.units}
        for unit in module.live_units():
            if unit in whole:
                end_whole(unit)
            if not accumulating:
                unit.gradients.take()
            unit.mark_stale()
        self.backwards.settling.drop()
        module.control.finish_unread()
        module.blocks, module.accumulating = still, accumulating

    def begin_accumulation(self, block: UserBlock) -> None:
        """A block begins, which may be inside another."""
        if not self.module.accumulating:
            self.recover()  # what a backward before left must not be taken for a part of this sum
            self.forwards.is_fresh = True
        self.module.blocks.append(block)
        self.module.accumulating += 1

    def end_accumulation(self, block: UserBlock, *, failed: bool) -> None:
        """Ends an `accumulate` block. The outermost one reduces the sums, or drops them after an exception. A collective."""
        module = self.module
        module.accumulating -= 1
        if module.accumulating:
            module.blocks.remove(block)
            return
        is_reduced = False
        try:
            if not failed:
                self._reduce()  # hooks of the user run inside
                is_reduced = True
        finally:
            if not is_reduced:
                self.backwards.recover()
                self.backwards.settling.drop()
                module.control.finish_unread()
                for unit in module.live_units():
                    unit.gradients.take()
            for unit in module.live_units():
                unit.mark_stale()
        module.blocks.remove(block)

    def _reduce(self) -> None:
        """Reduces and settles all local gradients."""
        module, units, settling = self.module, self.module.live_units(), self.backwards.settling
        if not units:
            return
        for unit in units:
            unit.gradients.unmark()
        local = [grad is not None for unit in units for grad in unit.gradients.local]
        union = iter(module.control.any(local, "which gradients were accumulated"))
        for unit in units:
            present = [next(union) for _ in unit.slots]
            if any(present):
                settling.settle(unit, unit.gradients.reduce(exact=True, present=present))
        settling.decide()
        module.control.finish_unread()
        module.away.finish_gradients(unit.groups for unit in units)

    def _recover_backward(self) -> None:
        """Before a forward: recovers from a backward that raised.

        Raises:
            StateError: Another thread runs it.
        """
        backward = self.backwards.current
        if backward is not None and backward.ending.is_elsewhere:
            raise in_two_threads()
        self.backwards.recover()


def run_of(unit: Unit) -> Run:
    """What runs a unit."""
    assert isinstance(unit.run, Run)
    return unit.run


def _no_unit() -> Unit | None:
    """Stands, in a copy of part of a model, for a unit that was not copied."""
    return None
