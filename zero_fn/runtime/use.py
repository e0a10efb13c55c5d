"""One forward of a unit, and what its backward needs to know of it."""

from __future__ import annotations

import weakref
from typing import Any

import torch

from zero_fn.runtime.unit import Unit
from zero_fn.values.schedule import Use

__all__ = ["UnitUse", "will_execute"]

will_execute = torch._C._will_engine_execute_node


class UnitUse:
    """One forward of a unit.

    Attributes:
        unit: The unit.
        key: Its name in the schedule; numbered -1 if it is in none.
        generation: The generation of the unit when its parameters were read.
        node: The autograd node, weakly: None if nothing needs gradients, dead once the graph is gone.
        has_graph: Whether a backward may pass through this use.
        has_arrived: Whether the running backward has computed all its gradients, or has passed it if it has none to compute.
        began_at: The entry whose module was called.
    """

    __slots__ = ("__weakref__", "began_at", "generation", "has_arrived", "has_graph", "key", "node", "unit")

    def __init__(self, unit: Unit, number: int, began_at: object = None) -> None:
        self.unit, self.key, self.began_at = unit, Use(unit.index, number), began_at
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
        """Whether a later backward may pass through it, although the running one retains no graph."""
        if self.node is None:
            return self.has_graph and not self.has_arrived
        node = self.node()
        return node is not None and not will_execute(node)

    @property
    def is_passed_only(self) -> bool:
        """Whether a backward may pass through it without computing a gradient of its parameters on this rank.

        They are frozen, or this rank used only parameters of its modules that are tied to those of other units.
        """
        if self.has_arrived or not self.has_graph:
            return False
        return self.node is None or self.node() is None

    @property
    def is_awaited(self) -> bool:
        """Whether its graph is alive and its gradients have not arrived."""
        return not self.has_arrived and self.node is not None and self.node() is not None
