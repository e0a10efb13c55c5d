"""The gathered parameters of a unit: from the all-gather that brings them until they are freed.

[Note: a disk may fail on one rank] Resting parameters in another tier are fetched before each gather, copied into the
gathered buffer, and let go. If they are on a disk, every rank sends a byte before each gather that says whether its disk
failed, and all ranks raise the same error. Memory of the host does not fail, and the host waits for no answer. The byte comes
first because the host reads the answer: the communicator of an accelerator has one queue, so it would wait for the gather.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum, auto

from torch import Tensor

from zero_fn.runtime.gathered import Gathered
from zero_fn.runtime.group import Groups
from zero_fn.runtime.slot import Slot
from zero_fn.transport.agree import Outcome
from zero_fn.transport.line import Line, Work

__all__ = ["InFlight", "Phase"]


class Phase(Enum):
    """Where the gathered parameters of a unit are: AT_REST -> GATHERING -> GATHERED -> AT_REST, nothing else."""

    AT_REST = auto()
    GATHERING = auto()
    GATHERED = auto()


class InFlight:
    """The gathered parameters of a unit.

    Attributes:
        phase: Whether they are at rest, being gathered, or gathered.
        memory: The buffers of the gathered parameters; kept without memory for the next gather, unless somebody holds a part.
        failure: Known once the parameters are gathered: a tier could not be read on some rank (every rank has it then), or a
            tensor subclass raised in `fsdp_post_all_gather`.
    """

    def __init__(self, unit: str, slots: Sequence[Slot], groups: Groups, transport: Line) -> None:
        self.phase = Phase.AT_REST
        self.memory: Gathered | None = None
        self._unit, self._slots, self._groups = unit, slots, groups
        self._transport = transport
        self._what = f"parameters of {unit}"
        self._pending: Work | None = None
        self._told: Outcome | None = None  # whether the fetch went well on each rank
        self.failure: Exception | None = None

    def begin(self, unit: object) -> None:
        """Issues the all-gather; `finish` waits for it. `unit` gathers again when backward needs a freed buffer."""
        groups, transport = self._groups, self._transport
        if groups.is_away:
            self.failure = groups.arrive()
        for group in groups.members:
            if group.inner is not None and not group.is_inner_current:
                group.gather_inner(transport, self._unit)
        memory = self.memory
        if memory is None:
            self.memory = memory = Gathered(unit, self._slots, groups, transport)
        else:
            memory.renew()
        if groups.is_away and groups.may_fail:
            self._told = Outcome(transport, self.failure, f"Fetching {self._unit}")
        memory.fill_own(has_failed=self.failure is not None)
        if memory.plan is not None and memory.beside is None:
            self._pending = transport.all_gather(memory.plan, self._what)
        elif memory.plan is not None and memory.beside is not None:
            with memory.beside:  # it waits for the copies there; what computes waits for neither before `finish`
                self._pending = transport.all_gather(memory.plan, self._what)
        self.phase = Phase.GATHERING
        if groups.is_away:
            groups.let_go()

    def fetch(self) -> None:
        """Begins to read resting parameters from their tier, for the next gather."""
        if self.phase is Phase.AT_REST:
            for group in self._groups:
                group.fetch()

    def finish(self) -> None:
        """Waits for the all-gather that is under way."""
        if self._told is not None:
            self.failure = self._told.failed_on_any_rank()
            self._told = None
        if self._pending is not None:
            self._pending.wait()
            self._pending = None
        if self.memory is not None:
            self.memory.wait_for_own()
        if self.memory is not None and self.memory.travelling:
            try:
                self.memory.make_products()
            except Exception as error:  # in the user's tensor subclass; `Unit.await_gathered` raises it
                self.failure = self.failure or error
        self.phase = Phase.GATHERED

    def free(self) -> None:
        """Frees the gathered parameters; kept buffers stay but count as out of date."""
        if self._groups.is_away:
            self._groups.let_go()
        if self.phase is Phase.AT_REST:
            return
        if self.phase is Phase.GATHERING:
            self.finish()
        self.failure = None
        if self.memory is not None and not self.memory.free():
            self.memory = None
        self.phase = Phase.AT_REST

    def drop(self) -> None:
        """Drops the gathered parameters, and gives up a gather under way, wherever an interrupt has left it."""
        pending, told, self._pending, self._told = self._pending, self._told, None, None
        if told is not None:
            told.failed_on_any_rank()
        if pending is not None:
            pending.wait()  # the next message would be taken for it
        self._groups.let_go()
        self.phase, self.memory, self.failure = Phase.AT_REST, None, None

    def tensors(self) -> list[Tensor]:
        """The parameters as the forward sees them: new tensors, whole, in the compute dtype, without autograd history."""
        assert self.phase is Phase.GATHERED and self.memory is not None, f"{self._unit} is {self.phase}"
        return self.memory.tensors()
