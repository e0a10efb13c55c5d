"""A unit: parameters that are gathered, freed and reduced together (the field's FSDP wrap group).

What a rank holds for each parameter, by home, for `numel` elements over `n` ranks:

    home       at rest                    in flight                  gradient after backward
    NOTHING    whole                      the same memory            whole
    OPTIMIZER  a view of the kept buffer  kept buffer, whole         a view of a whole buffer
    GRADS      a view of the kept buffer  kept buffer, whole         a shard
    PARAMS     a shard                    whole, freed between uses  a shard

Where the compute dtype differs from the dtype at rest, the shard (or the whole, for NOTHING) rests
in a buffer of its own and the kept buffer has the compute dtype. Parameters that rest in another
tier are gathered into a buffer that is freed between uses, at every stage: keeping it would keep
the parameters in memory.
"""

from __future__ import annotations

import copy
import weakref
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from zero_fn.runtime import moved_memory
from zero_fn.runtime.call_context import is_swapped, partly_swapped
from zero_fn.runtime.call_hooks import put_hooks_inside
from zero_fn.runtime.gather import Gather
from zero_fn.runtime.gradients import Gradients
from zero_fn.runtime.memory import Memory
from zero_fn.runtime.slot import Slot
from zero_fn.runtime.visible_parameters import VisibleParameters
from zero_fn.tiers.offloaded_state import OffloadedState
from zero_fn.transport.line import Line
from zero_fn.values.schedule import Use

__all__ = ["ReadUse", "Unit", "UnitRun", "UnitUse", "unit_of", "will_execute"]


will_execute = torch._C._will_engine_execute_node


class UnitRun(Protocol):
    """What a unit, and its uses, ask of the object that runs the transformed module (run.py)."""

    transport: Line
    offloaded: OffloadedState

    def adopt(self, unit: Unit) -> None:
        """Registers a unit."""

    def need_in_backward(self, unit: Unit, use: UnitUse | None = None) -> None:
        """Gathers the parameters of a unit for the running backward."""

    def gradients_arrived(self, use: UnitUse, grads: Sequence[Tensor | None] | None) -> None:
        """Takes the gradients of one use."""


class Unit:
    """The parameters of one anchor module over one or two axes."""

    def __init__(self, name: str, index: int, run: UnitRun) -> None:
        self.name = name  # that of the anchor, "" at the root
        self.index = index  # its number in schedules, the same on every rank
        self.run = run
        # Counts optimizer steps: a gradient computed with older parameters is refused.
        self.generation = 0
        # How many of its forwards are running: more than one when a module calls itself.
        self.running = 0
        # The use by which a forward of another unit reads its weights now. (weight_reads.py)
        self.read: ReadUse | None = None
        self.anchor: Callable[[], nn.Module | None] = _no_anchor  # weakly
        # Modules below the anchor whose hooks of ours are taken out while the unit runs,
        # weakly. (call_hooks.py)
        self.inner: list[weakref.ref[nn.Module]] = []

    def hold(self, slots: Sequence[Slot]) -> None:
        """Gives the unit its parameters, which have no memory yet.

        To be called before anything else.
        """
        run, self.slots = self.run, slots  # in registration order
        # Whether any gathered parameter is a DTensor, as it lies on model
        # axes (tensor parallelism), too.
        self.has_model_axes = any(slot.model is not None for slot in slots)
        self.memory = Memory(str(self), slots, run.transport, run.offloaded, self)
        self.gather = Gather(self.memory)
        self.visible = VisibleParameters(slots)
        self.gradients = Gradients(slots, run.transport, str(self))
        for slot in slots:
            slot.owner = weakref.ref(self)
        run.adopt(self)

    def __deepcopy__(self, memo: dict[int, Any]) -> Unit:
        # A copy of a parameter has no gradient: torch says so, and forgets it for DTensors.
        for slot in self.slots:
            grad, slot.parameter.grad = slot.parameter.grad, None
            copy.deepcopy(slot.parameter, memo).grad = None
            slot.parameter.grad = grad
        # The copied modules may still be under construction:
        # the twin finds its parameters at its first `follow_moved`.
        memo[id(self)] = twin = Unit(self.name, self.index, copy.deepcopy(self.run, memo))
        twin.hold([slot.twin(memo) for slot in self.slots])
        twin.memory.is_moved_out = self.memory.is_moved_out
        return twin

    # -- at rest -----------------------------------------------------------------------------------

    def follow_moved(self) -> None:
        """Follows parameters that `.to`, `to_empty`, `deepcopy`, `.data =` or
        `load_state_dict(assign=True)` moved elsewhere.

        Raises:
            StateError: The states of the model are offloaded, or `functional_call` has put
                other tensors in their place.
            PlacementError: A parameter was replaced by one that is not sharded as the unit is.
        """
        if self.visible.leaves is not None or moved_memory.is_current(self.memory):
            return
        moved_memory.require_in_memory(self.memory, self.name)
        if is_swapped(self.visible, self.name):
            raise partly_swapped(self.name)
        self.reshard()
        self.gather.forget()
        moved_memory.follow(self.memory)
        self.gradients.forget_layout()
        self.memory.moving = None

    def vacate(self) -> None:
        """Drops the memory of the parameters, whose values were moved elsewhere."""
        self.memory.vacate()
        self.gather.forget()

    # -- gathered ----------------------------------------------------------------------------------

    def unshard(self) -> None:
        """Issues the all-gather; `await_gathered` waits for it.

        Does nothing if it was issued already.
        """
        gather = self.gather
        if self.memory.is_moved:
            self.follow_moved()
        if gather.level < gather.top:
            gather.begin(self)

    def await_gathered(self) -> None:
        """Waits for the all-gather that `unshard` issued.

        Raises:
            StorageError: On every rank, if the tier of resting parameters failed on any.
                The unit is at rest then.
        """
        gather = self.gather
        if gather.pending is not None:
            gather.wait()
        if gather.failure is not None:
            failure = gather.failure
            self.reshard()
            raise failure

    def require_gathered(self) -> None:
        """Gathers the parameters and waits for them, unless they are there.

        Raises as `await_gathered` does.
        """
        gather = self.gather
        if gather.level < gather.top or gather.pending is not None or gather.failure is not None:
            self.unshard()
            self.await_gathered()

    def reshard(self) -> None:
        """Frees the gathered parameters; kept buffers stay but count as out of date."""
        if self.visible.in_backward is not None:
            self.leave_backward()
        if self.memory.away or self.gather.level == self.gather.top:
            self.gather.free()

    def mark_stale(self) -> None:
        """Marks everything that was gathered as out of date:
        the resting parameters may have changed."""
        self.reshard()
        self.gather.outdate()

    def start_over(self) -> None:
        """Puts the unit at rest, whatever an interrupted pass has done to it.
        [Note: interrupted passes] (call.py)"""
        self.running = 0
        self.read = None
        put_hooks_inside(self.inner)
        self.visible.start_over()
        self.gather.drop()

    def buffer_for_backward(self, group: int) -> Tensor:
        """The gathered buffer that a packed tensor lies in, gathered again if it was freed."""
        is_seen = self.running or self.visible.in_backward is not None
        gather = self.gather
        if gather.level < gather.top or gather.pending is not None or not is_seen:
            self.run.need_in_backward(self)
        assert gather.whole is not None and gather.pending is None, f"{self} is at rest"
        return gather.whole.buffers[group]

    def leave_backward(self) -> None:
        """Hides the gathered parameters that backward has shown to modules,
        and refuses changes to them."""
        if (seen := self.visible.in_backward) is not None:
            self.visible.leave_backward()
            if self.gather.level == self.gather.top and self.visible.leaves is None:
                self.visible.require_unchanged(self.name, seen.tensors)

    # -- what it is --------------------------------------------------------------------------------

    @property
    def is_in_use(self) -> bool:
        """Whether a forward of the unit runs, a block of the user has its parameters whole,
        or gradients wait."""
        return self.running > 0 or self.visible.leaves is not None or self.gradients.has_pending()

    def modules(self) -> list[nn.Module]:
        """The modules that hold its parameters, each once."""
        found = {id(place.module): place.module for slot in self.slots for place in slot.places}
        return list(found.values())

    @property
    def is_gone(self) -> bool:
        """Whether the modules of the parameters were taken out of the model,
        and nobody holds them."""
        if not self.slots or not self.slots[0].places[0].is_gone:  # each forward asks
            return False
        return all(place.is_gone for slot in self.slots for place in slot.places)

    def __str__(self) -> str:
        return f"unit {self.name or 'root'}"


class UnitUse:
    """One forward of a unit."""

    __slots__ = (
        "__weakref__",
        "entry",
        "generation",
        "has_arrived",
        "has_graph",
        "key",
        "node",
        "reads",
        "unit",
    )
    is_read = False

    def __init__(self, unit: Unit, number: int, entry: object = None) -> None:
        self.unit = unit
        self.generation = unit.generation  # that of the parameters which were read
        self.key = Use(unit.index, number)  # in the schedule; -1 if it is in none
        self.entry = entry  # whose module was called
        # The autograd node, weakly: None if nothing needs gradients, dead once the graph is gone.
        self.node: weakref.ref[Any] | None = None
        self.has_graph = False  # whether a backward may pass through it
        self.reads: tuple[ReadUse, ...]  # of other units by its forward, if any; not set else
        # Whether the running backward has computed all its gradients,
        # or has passed it if it has none to compute.
        self.has_arrived = False

    @property
    def will_run(self) -> bool:
        """Whether the running backward will compute its gradients, as far as this rank can tell."""
        if self.node is None:
            return self.has_graph and not self.has_arrived
        node = self.node()
        return node is not None and bool(will_execute(node))

    @property
    def may_run_later(self) -> bool:
        """Whether a later backward may pass through it, although the
        running one retains no graph."""
        if self.node is None:
            return self.has_graph and not self.has_arrived
        node = self.node()
        return node is not None and not will_execute(node)

    @property
    def is_passed_only(self) -> bool:
        """Whether a backward may pass through it without computing a gradient of
        its parameters on this rank.

        They are frozen, or this rank used only parameters of its modules that are
        tied to those of other units.
        """
        if self.has_arrived or not self.has_graph:
            return False
        return self.node is None or self.node() is None

    @property
    def is_awaited(self) -> bool:
        """Whether its graph is alive and its gradients have not arrived."""
        return not self.has_arrived and self.node is not None and self.node() is not None


class ReadUse(UnitUse):
    """A use of a unit by another: the forward of `reader` reads its
    weights by name. (weight_reads.py)"""

    __slots__ = ("reader", "tensors")
    is_read = True

    def __init__(self, unit: Unit, number: int, reader: UnitUse) -> None:
        super().__init__(unit, number, reader.entry)
        self.reader = weakref.proxy(reader)
        self.tensors: list[Tensor] = []  # the whole parameters, as modules see them
        # The reader's graph holds this use, which may have no node of its own.
        reader.reads = (*getattr(reader, "reads", ()), self)


def unit_of(slot: Slot | None) -> Unit | None:
    """The unit of a parameter; None if it is gone, or if there is no parameter."""
    owner = slot.owner() if slot is not None else None
    return owner if isinstance(owner, Unit) else None


def _no_anchor() -> nn.Module | None:
    """The anchor of a unit that was copied without it."""
    return None
