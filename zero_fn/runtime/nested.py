"""Units that a backward inside another one has run through.

[Note: nested backward] A reentrant checkpoint runs a backward inside the backward. Its uses are not in the schedule:
they gather on demand, and a unit is reduced as soon as none of its nodes is left. The outer backward settles them. The
backward around it may still recompute other checkpoints of the unit, and hooks there read parameters before a module is
called: the unit is resharded when the backward that needed it goes on.
"""

from __future__ import annotations

from zero_fn.runtime.ending import current_graph_task
from zero_fn.runtime.unit import Unit

__all__ = ["Nested"]


class Nested:
    """Units that nested backwards of one transformed module have run through.

    Attributes:
        left: Those that are still gathered.
    """

    def __init__(self) -> None:
        self.left: list[Unit] = []

    def leave(self, unit: Unit) -> None:
        """Reshards a unit, now or when the backward that needed it goes on."""
        if unit.shown.backward_entry is not None and current_graph_task() > unit.shown.needed_in:
            self.left.append(unit)
            unit.shown.is_left = True
        else:
            unit.reshard()

    def reshard(self) -> None:
        """Reshards those whose nested backward has ended."""
        now = current_graph_task()  # tasks inside others have larger numbers
        for unit in self.left:
            if unit.shown.is_left and now <= unit.shown.needed_in:
                unit.reshard()
        self.left = [unit for unit in self.left if unit.shown.is_left]
