"""One forward of a unit, and what its backward needs to know of it."""

from __future__ import annotations

import weakref
from typing import Any

import torch

from zero_fn.runtime.unit import Unit

__all__ = ["UnitUse", "UseInBackward", "will_execute"]

will_execute = torch._C._will_engine_execute_node


class UnitUse:
    """One forward of a unit.

    Attributes:
        unit: The unit.
        number: The `Use` of the schedule is `(unit.index, number)`.
        generation: The generation of the unit when its parameters were read.
        node: The autograd node, weakly: None if nothing needs gradients, dead once the graph is gone.
        has_graph: Whether a backward may pass through this use.
        has_arrived: Whether the running backward has computed all its gradients, or has come where there are none to compute.
        began_at: What began it: the entry whose module was called.
    """

    __slots__ = ("__weakref__", "began_at", "generation", "has_arrived", "has_graph", "node", "number", "unit")

    def __init__(self, unit: Unit, number: int, began_at: object = None) -> None:
        self.unit, self.number, self.began_at = unit, number, began_at
        self.generation = unit.generation
        self.node: weakref.ref[Any] | None = None
        self.has_graph = self.has_arrived = False

    @property
    def will_run(self) -> bool:
        """Whether the running backward will compute its gradients, as far as this rank can tell."""
        if self.node is None:
            return self.has_graph and not self.has_arrived
        node = self.node()
        return node is not None and bool(will_execute(node))

    @property
    def may_run_later(self) -> bool:
        """Whether a backward after the running one may pass through it, if no graph is retained."""
        if self.node is None:
            return self.has_graph and not self.has_arrived
        node = self.node()
        return node is not None and not will_execute(node)

    @property
    def is_passed_only(self) -> bool:
        """Whether a backward may pass through it on this rank and compute no gradient of its parameters there.

        They are frozen, or all that this rank used in their modules are tied to those of other units.
        """
        if self.has_arrived or not self.has_graph:
            return False
        return self.node is None or self.node() is None

    @property
    def is_awaited(self) -> bool:
        """Whether its graph is alive and has not arrived."""
        return not self.has_arrived and self.node is not None and self.node() is not None


class UseInBackward(UnitUse):
    """What recomputations inside a unit read its parameters for. It does not hold the unit, which holds it."""

    __slots__ = ("_unit",)

    def __init__(self, unit: Unit) -> None:
        self._unit = weakref.ref(unit)
        super().__init__(unit, -1)

    @property
    def unit(self) -> Unit:
        unit = self._unit()
        assert unit is not None, "backward is in a unit that is gone"
        return unit

    @unit.setter
    def unit(self, unit: Unit) -> None:
        """Held weakly already."""
