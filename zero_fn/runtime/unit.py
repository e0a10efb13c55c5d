"""A unit: parameters that are gathered, freed and reduced together (the field's FSDP wrap group).

What a rank holds for each parameter, by home, for `numel` elements over `n` ranks:

    home       at rest                       in flight                     gradient after backward
    NOTHING    whole                         the same memory               whole
    OPTIMIZER  a view of the kept buffer     kept buffer, whole            a view of a whole gradient buffer
    GRADS      a view of the kept buffer     kept buffer, whole            a shard
    PARAMS     a shard                       whole, freed between uses     a shard

Where the compute dtype differs from the dtype at rest, the shard (or the whole, for NOTHING) rests in a buffer of its
own and the kept buffer has the compute dtype. What rests in another tier is gathered into a buffer that is freed between
uses, at every stage: keeping it would keep the parameters in memory.
"""

from __future__ import annotations

import copy
import weakref
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from torch import Tensor, nn

from zero_fn.runtime.at_rest import AtRest
from zero_fn.runtime.away import Away
from zero_fn.runtime.gradients import Gradients
from zero_fn.runtime.in_flight import InFlight, Phase
from zero_fn.runtime.shown import Shown
from zero_fn.runtime.slot import Slot
from zero_fn.runtime.swapped import swapped_values
from zero_fn.transport.links import Links

__all__ = ["Runs", "Unit", "unit_of"]


class Runs(Protocol):
    """What runs the units of one transformed module. (run.py)

    Attributes:
        transport: What units send and receive through.
        away: What of them rests in other tiers.
        need_in_backward: Called with a unit, and with its use if that is known: backward needs its gathered parameters.
        gradients_arrived: Called with a use and its gradients, once all are there; without them if autograd keeps them.
    """

    transport: Links
    away: Away
    need_in_backward: Callable[..., None]
    gradients_arrived: Callable[..., None]

    def adopt(self, unit: Unit) -> None:
        """A unit is there, new or as a copy of the one with its index."""


class Unit:
    """The parameters of one anchor module over one or two axes.

    Attributes:
        name: Name of the anchor module in the transformed module; "" is the root.
        index: Its number in the step, the same on every rank.
        run: What runs it.
        slots: Its parameters, in registration order.
        at_rest: The resting memory of the parameters.
        groups: The parameters by kind, and the buffers they have.
        in_flight: The gathered parameters.
        shown: What modules see under their names.
        gradients: Local sums that are not reduced yet.
        generation: Counts optimizer steps: a gradient computed with older parameters is refused.
        running: Forwards of the unit that are running (more than one when a module calls itself).
        has_model_axes: Whether any of its parameters is a DTensor in flight.
        anchor: The anchor module, weakly.
        inner: Modules below the anchor whose hooks are taken out while the unit runs.
    """

    def __init__(self, name: str, index: int, run: Runs) -> None:
        self.name, self.index, self.run = name, index, run
        self.generation = self.running = 0
        self.anchor: Callable[[], nn.Module | None] = _no_anchor
        self.inner: list[weakref.ref[nn.Module]] = []

    def hold(self, slots: Sequence[Slot]) -> None:
        """Gives it its parameters, which have no memory yet. Before anything else."""
        run, self.slots = self.run, slots
        self.has_model_axes = any(slot.model is not None for slot in slots)
        self.at_rest = AtRest(str(self), slots, run.transport, run.away, self)
        self.groups = self.at_rest.groups
        self.shown, self.gradients = Shown(slots), Gradients(slots, run.transport, str(self))
        for slot in slots:
            slot.owner = weakref.ref(self)
        self.note_moved()
        run.adopt(self)

    def __deepcopy__(self, memo: dict[int, Any]) -> Unit:
        for slot in self.slots:  # a copy of a parameter has no gradient: torch says so, and forgets it for DTensors
            grad, slot.parameter.grad = slot.parameter.grad, None
            copy.deepcopy(slot.parameter, memo).grad = None
            slot.parameter.grad = grad
        # The copied modules may still be under construction: the twin finds its parameters at its first `follow_moved`.
        memo[id(self)] = twin = Unit(self.name, self.index, copy.deepcopy(self.run, memo))
        twin.hold([slot.twin(memo) for slot in self.slots])
        twin.at_rest.is_evicted = self.at_rest.is_evicted
        return twin

    # -- at rest ----------------------------------------------------------------------------------------------------

    def note_moved(self) -> None:
        """Parameters rest in other memory: what was made for that of before is dropped."""
        self.in_flight = InFlight(str(self), self.slots, self.groups, self.run.transport)
        self.gradients.forget_layout()

    def follow_moved(self) -> None:
        """Follows parameters that `.to`, `to_empty`, `deepcopy` or `load_state_dict(assign=True)` moved elsewhere.

        Raises:
            StateError: The parameters are evicted.
            PlacementError: A parameter was replaced by one that is not sharded as the unit is, or its `.data` was assigned.
        """
        shown = self.shown
        shown.swapped = {}
        if shown.leaves is not None or self.at_rest.is_current:
            return
        self.at_rest.require_in_memory(self.name)
        shown.swapped = swapped_values(self.slots)
        if shown.swapped and all(i in shown.swapped or slot.is_current() for i, slot in enumerate(self.slots)):
            return
        self.reshard()
        self.at_rest.follow_moved()
        self.note_moved()

    # -- gathered ---------------------------------------------------------------------------------------------------

    def unshard(self) -> None:
        """Issues the all-gather; `await_gathered` makes its result readable. Does nothing if it was issued, or if other
        tensors stand under all names."""
        shown = self.shown
        if self.in_flight.phase is Phase.AT_REST and not (shown.swapped and shown.is_replaced):
            self.in_flight.begin(self)

    def await_gathered(self) -> None:
        """Waits for the all-gather that `unshard` issued.

        Raises:
            StorageError: The tier of resting parameters failed, on this rank or another: on every rank. The unit is at rest.
        """
        in_flight = self.in_flight
        if in_flight.phase is Phase.GATHERING:
            in_flight.finish()
        if in_flight.failure is not None:
            failure = in_flight.failure
            self.reshard()
            raise failure

    def reshard(self) -> None:
        """Frees the gathered parameters; kept buffers stay but count as out of date."""
        if self.shown.backward_entry is not None:
            self.leave_backward()
        if self.in_flight.phase is not Phase.AT_REST or self.groups.is_away:
            self.in_flight.free()

    def mark_stale(self) -> None:
        """The resting parameters may have changed: whatever was gathered of them counts as out of date."""
        self.reshard()
        for group in self.groups.members:
            group.is_inner_current = False

    def buffer_for_backward(self, group: int) -> Tensor:
        """The gathered buffer that a packed tensor lies in, gathered again if it was freed."""
        if self.in_flight.phase is not Phase.GATHERED or self.shown.backward_entry is None:
            self.run.need_in_backward(self)  # backward has come, or this is the first it sees
        memory = self.in_flight.memory
        assert memory is not None and self.in_flight.phase is Phase.GATHERED, f"{self} is at rest"
        return memory.buffers[group]

    def leave_backward(self) -> None:
        """Modules no longer see what backward has shown them, which nobody may have changed."""
        if self.shown.backward_entry is not None:
            tensors = self.shown.leave_backward()
            if self.in_flight.phase is Phase.GATHERED and self.shown.leaves is None:
                self.shown.require_unchanged(self.name, tensors)

    # -- what it is -------------------------------------------------------------------------------------------------

    @property
    def is_in_use(self) -> bool:
        """Whether a forward of the unit runs, a block of the user has its parameters whole, or gradients wait."""
        return self.running > 0 or self.shown.leaves is not None or self.gradients.has_pending()

    def __str__(self) -> str:
        return f"unit {self.name or 'root'}"


def unit_of(slot: Slot | None) -> Unit | None:
    """The unit of a parameter; None if it is gone, or if there is no parameter."""
    unit = slot.owner() if slot is not None else None
    assert unit is None or isinstance(unit, Unit)
    return unit


def _no_anchor() -> nn.Module | None:
    """The anchor of a unit that was copied without it."""
    return None
