"""The backwards of one transformed module: each follows a schedule that all ranks have agreed on.

[Note: every rank runs the same program] Which gradients exist may differ between ranks, so it
decides nothing by itself. A backward begins by or-ing over ranks which uses will run; the schedule
is built from that, and a rank whose graph misses a use takes part in its gather and contributes
zeros. Reductions are issued in the order of the schedule, not in the order of arrival.

[Note: recomputation in a unit] A checkpoint inside a unit runs parts of its forward again in
backward, possibly parts that read a parameter by its name. From the moment backward reaches the
unit until it is resharded, the names show gathered parameters again, through one autograd node of
their own; the modules inside step aside as they did in forward.

[Note: nested backward] A reentrant checkpoint runs a backward inside the backward. Its uses are not
in the schedule: they gather on demand, and a unit is reduced as soon as none of its nodes is left.
The outer backward settles them. The backward around it may still recompute other checkpoints of the
unit, and hooks there read parameters before a module is called: the unit is resharded when the
backward that needed it goes on.

[Note: backward inside a forward] A forward may back through a part of its graph before it goes on:
a loss in chunks, or forces as gradients of an energy. The uses of that forward are in no schedule
yet: they gather on demand, as those of a nested backward do. Units that run stay gathered, and
their modules see what the forward sees. Another backward may pass through the same uses.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence
from threading import Lock
from zlib import crc32

import torch
from torch import Tensor

from zero_fn.runtime.autograd_node import gather_again, returns_gradients
from zero_fn.runtime.ending import Ending, current_graph_task
from zero_fn.runtime.open_pass import OpenPass
from zero_fn.runtime.passes import REDUCTIONS_UNDER_WAY, BackwardPass, Script
from zero_fn.runtime.settling import Settling
from zero_fn.runtime.unit import Unit, UnitUse
from zero_fn.transport.line import Line
from zero_fn.values import watching
from zero_fn.values.assignment import Assignment
from zero_fn.values.schedule import Action, Reduce, Settle, Use
from zero_fn.values.watching import Moment

__all__ = ["Backward"]

_keeps_graph = torch._C._autograd._get_current_graph_task_keep_graph


class Backward(OpenPass):
    """The backwards of one transformed module, of which one at most is open."""

    def __init__(self, transport: Line, assignment: Assignment) -> None:
        super().__init__(transport, assignment)
        # For each unit, those around it that have parameters in it (ties).
        self.tied_around: dict[int, tuple[int, ...]] = {}
        self.updates = 0  # how many steps optimizers have made so far
        self.settling = Settling(self.bits, self.offloaded)
        self._script: Script | None = None  # the schedule of the last backward
        # Actions that are left of the backward that is open.
        self._actions: Iterator[Action | None] = iter(())
        self._nested = _Nested()
        self._recovering = Lock()  # [Note: threads of the engine] (ending.py)

    # -- what autograd needs and brings ------------------------------------------------------------

    def need_in_backward(
        self, unit: Unit, use: UnitUse | None = None, *, recomputes: bool = False
    ) -> None:
        """Backward, or a recomputation in it, needs the gathered parameters of a unit."""
        backward = self.opened()
        for watch in watching.watchers:
            watch.note(Moment.NEED, unit.name)
        if self._nested.left:
            self._nested.reshard()
        if backward is not None:
            key = backward.enter(
                unit.index, use.key if use is not None else None, recomputes=recomputes
            )
            if use is not None and use.is_passed_only:
                use.has_arrived = True  # no gradients will come that would tell
            use = use or (self.graphs.use(key) if key is not None else None)
            self._pump(backward)
        unit.require_gathered()
        visible = unit.visible
        entry = use.entry if use is not None else visible.last_entry()
        if (
            entry is not None
            and backward is not None
            and visible.in_backward is None
            and not unit.running
        ):
            visible.show_in_backward(gather_again(unit), entry)  # [Note: recomputation in a unit]

    def gradients_arrived(self, use: UnitUse, grads: Sequence[Tensor | None] | None) -> None:
        """All gradients of one use are there.

        `grads` is None if they are returned through autograd. (autograd_node.py)
        """
        backward = self.opened()
        if self._nested.left:
            self._nested.reshard()
        unit, key, accumulating = use.unit, use.key, self.accumulating
        for watch in watching.watchers:
            watch.arrived(unit.name, grads or ())
        scheduled = backward is not None and backward.has(key)
        if grads is not None and accumulating:
            unit.gradients.add_pending(grads)
        elif grads is not None:
            several = backward is None or not scheduled or unit.index in backward.script.repeated
            unit.gradients.add(grads, exact=several)
        if backward is None:
            return
        backward.gradients_arrived(key)
        use.has_arrived = True
        if not scheduled and grads is not None and not accumulating and not self._has_nodes(unit):
            self._nested.leave(unit)
            while len(backward.reductions) >= REDUCTIONS_UNDER_WAY:
                self.settling.settle(*backward.reductions.pop(0))
            backward.reductions.append((unit, unit.gradients.reduce(exact=True)))
        self._pump(backward)

    # -- recomputation -----------------------------------------------------------------------------

    def is_recomputing(self, unit: Unit, entry: object) -> bool:
        """Whether a checkpoint inside the unit runs the module of `entry` again;
        its parameters are shown then."""
        if current_graph_task() == -1:
            return False
        began, visible = self.graphs.uses_of(unit.index), unit.visible
        if any(use.entry is entry for use in began):
            return False  # the checkpoint is around the unit, which was entered here
        if visible.in_backward is None and any(use.is_awaited for use in began):
            # The recomputation is ahead of backward, which reached no output.
            self.need_in_backward(unit, recomputes=True)
        found = visible.in_backward is not None and visible.in_backward.entry is not entry
        if found:
            self._need_units_around(unit)
        return found

    def enter_recomputation(self, unit: Unit, entry: object, _method: str) -> UnitUse:
        """A checkpoint around the unit runs its forward inside backward."""
        backward = self.opened()
        assert backward is not None
        self.need_in_backward(unit, recomputes=True)
        self._need_units_around(unit)
        use = UnitUse(unit, -1, entry)
        backward.recomputed.append(use)
        unit.running += 1
        return use

    def _need_units_around(self, unit: Unit) -> None:
        """Gathers the units around one whose parameters its recomputed forward may read: ties."""
        for index in self.tied_around.get(unit.index, ()):
            around = self.units[index]()
            if around is not None and around.visible.in_backward is None and not around.running:
                self.need_in_backward(around, recomputes=True)

    # -- the schedule ------------------------------------------------------------------------------

    def opened(self) -> BackwardPass | None:
        """The running backward, which begins here if this is the first call from it;
        None outside backward."""
        if current_graph_task() == -1:
            return None  # a saved tensor was read outside backward
        if self.backward is not None and self.backward.ending.is_to_come:
            return self.backward
        self.abandon()
        self.recover_backward()
        for watch in watching.watchers:
            watch.note(Moment.BACKWARD, "accumulated" if self.accumulating else "")
        self.is_backward_open = True
        self.backward = self._begun()
        return self.backward

    def _begun(self) -> BackwardPass:
        graphs = self.graphs
        uses = graphs.entered()
        alive = [graphs.use(use) for use in uses]
        local = [use is not None and use.will_run for use in alive]
        later = (
            [False] * len(uses)
            if all(local)
            else [use is not None and use.may_run_later for use in alive]
        )
        # The count of optimizer steps is compared as well: a rank that left out a backward would
        # else take the next backward of the others for its own, and replicas of which one left out
        # a step would drift apart.
        units = crc32(array("L", [use.unit for use in uses]))
        passed = f"units {units:08x}, after {self.updates} steps of optimizers"
        what = "what the backward runs through"
        union = self.bits.any(local, what, check=passed, second=later)
        taking_part = {use for use, runs in zip(uses, union, strict=False) if runs}
        # If every use runs, no forward waits any longer, and the bits were not read.
        # [Note: forwards that wait] (passes.py)
        waiting = {use for use, waits in zip(uses, union[len(uses) :], strict=False) if waits}
        trace = [bracket for bracket in graphs.trace if bracket.use in taking_part]
        defers = not self.accumulating and not returns_gradients()
        run_through = {use.unit for use in taking_part} if defers else set()
        units_run = [unit for unit in self.live_units() if unit.index in run_through]
        reduced = frozenset([unit.index for unit in units_run if unit.gradients.are_wanted])
        if self._script is None or not self._script.serves(trace, reduced):
            self._script = Script(trace, reduced, ahead=self.ahead)
        awaited: set[Use] = set()
        passed_only: set[Use] = set()
        entered: set[Use] = set()
        for key, use, runs in zip(uses, alive, local, strict=True):
            if use is not None and use.is_read:
                entered.add(key)  # where it was read says nothing of where its values are used
            if use is not None and use.is_passed_only:
                passed_only.add(key)
            elif runs:
                awaited.add(key)
        backward = BackwardPass(
            self._script,
            Ending(
                self, self.calls.thread, Backward.finish, Backward.give_up, Backward.show_resting
            ),
            awaited=awaited,
            passed_only=passed_only,
            entered=entered,
            waiting=waiting,
            keeps_graph=_keeps_graph(),
        )
        self._actions = backward.actions()
        return backward

    def _pump(self, backward: BackwardPass) -> None:
        """Runs the events of the schedule up to the first that must wait for autograd."""
        for action in self._actions:  # after an exception: those that it has left
            if action is None:
                return
            kind = type(action)
            if kind is Settle:
                # Not after an error: it calls hooks of the user. And a reduction out
                # of order may have settled it.
                if backward.reductions and not backward.failed:
                    self.settling.settle(*backward.reductions.pop(0))
            elif kind is Reduce:
                unit = self.unit(action.unit)
                exact = unit.index in backward.script.repeated
                backward.reductions.append((unit, unit.gradients.reduce(exact=exact)))
            else:
                self.do(action)

    def _has_nodes(self, unit: Unit) -> bool:
        """Whether a graph through this unit is still alive and has not arrived."""
        recomputed = self.backward.recomputed if self.backward is not None else ()
        uses = (*self.graphs.uses_of(unit.index), *recomputed)
        # By number: `unit` may be a proxy (autograd_node.py).
        return any(use.key.unit == unit.index and use.is_awaited for use in uses)

    # -- ends and errors ---------------------------------------------------------------------------

    def finish(self, ending: Ending) -> None:
        """Called by the engine when the outermost backward has run all its nodes."""
        backward = self.backward
        if backward is None or backward.ending is not ending:
            return
        backward.closing = True
        self._pump(backward)
        for unit, reduction in backward.reductions:
            self.settling.settle(unit, reduction)
        if not self.accumulating:
            for unit in self.live_units():
                if not unit.gradients.is_empty:
                    self.settling.settle(unit, unit.gradients.reduce(exact=True))
            self.settling.decide()
        self.backward = None
        self.graphs.leave(backward)
        self.bits.finish_unread()
        self._nested.left = []
        if self.forward is not None:
            self.forward.go_on()
        for unit in self.live_units():
            if unit.running:
                continue  # [Note: backward inside a forward]
            if unit.memory.is_transient or not self.accumulating:
                unit.reshard()
            else:
                unit.leave_backward()
        if not self.accumulating:
            self.offloaded.finish_gradients()
        self.is_backward_open = False
        for watch in watching.watchers:
            watch.note(Moment.BACKWARD_END)

    def give_up(self, ending: Ending) -> None:
        """Called when the engine has dropped a backward.

        If it raised, names show resting parameters again, and collectives under way are waited for:
        if the model is dropped next, other models would take its messages for theirs.
        """
        if self.backward is not None and self.backward.ending is ending:
            self.recover_backward()

    def show_resting(self, ending: Ending) -> None:
        """Lets names show resting parameters again after a backward that raised,
        unless it was recovered meanwhile."""
        with self._recovering:
            if self.backward is not None and self.backward.ending is ending:
                for unit in self.live_units():
                    unit.visible.hide_from_backward()

    def recover_raised(self) -> None:
        """`recover_backward`, unless the backward that is open still runs."""
        if self.backward is None or not self.backward.ending.is_to_come:
            self.recover_backward()

    def recover_backward(self) -> None:
        """Clears up after a backward that raised.

        Ranks that raised in the same place stay in step.
        """
        if not self.is_backward_open:
            return
        backward = self.backward
        try:
            if backward is not None:
                backward.failed = True
                self._pump(backward)
        finally:
            with self._recovering:
                self.backward = None
            for _, reduction in backward.reductions if backward is not None else ():
                reduction.wait()
            self.settling.drop()
            self._nested.left = []
            self.bits.finish_unread()
            self.graphs.forget()
            for unit in self.live_units():
                if not self.accumulating:
                    unit.gradients.take()
            if not self.calls.forward:
                self.start_over()
            else:  # it ran inside a forward, which goes on
                if self.forward is not None:
                    self.forward.go_on()
                for unit in self.live_units():
                    if not unit.running:
                        unit.mark_stale()
            self.is_backward_open = False


class _Nested:
    """Units that nested backwards of one transformed module have run through.
    [Note: nested backward]"""

    def __init__(self) -> None:
        self.left: list[Unit] = []  # those that are still gathered

    def leave(self, unit: Unit) -> None:
        """Reshards a unit, now or when the backward that needed it goes on."""
        seen = unit.visible.in_backward
        if seen is not None and current_graph_task() > seen.task:
            self.left.append(unit)
            seen.is_left = True
        elif not unit.running:
            unit.reshard()

    def reshard(self) -> None:
        """Reshards the units whose nested backward has ended."""
        now = current_graph_task()  # tasks inside others have larger numbers
        left, self.left = self.left, []
        for unit in left:
            seen = unit.visible.in_backward
            if seen is None or not seen.is_left:
                continue
            if now <= seen.task:
                unit.reshard()
            else:
                self.left.append(unit)
