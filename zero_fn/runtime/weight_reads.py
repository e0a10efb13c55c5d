"""Weights of one unit that the forward of another reads under their names: `self.lm_head.weight`.

A loss in chunks multiplies by the weight of a head that is a unit of its own; a decoder looks up
the table of its encoder. Nobody calls the module that holds the weight, so no hook tells of it. But
`module.weight` ends in `module._parameters["weight"]`, unless a gathered tensor hides it. So
`_parameters` of a transformed module is a `Parameters`, which enters the unit then.

[Note: how long it stays whole] The unit is left when the call ends whose forward has read the
weight, or when its own module is called. So a loss in any number of chunks gathers it once. Every
rank reads it or none does, as every rank calls the same units. Backward gathers it where the
schedule says, whether or not this rank has used it: one rank may have no chunk at all.
"""

from __future__ import annotations

import copy
import sys
import weakref
from threading import get_ident
from typing import Any

import torch
from torch import nn

from zero_fn.runtime.autograd_node import gather
from zero_fn.runtime.call_context import called_outside, has_context, in_compute_dtype, require_run
from zero_fn.runtime.call_hooks import ENTRY_POINTS
from zero_fn.runtime.ending import current_graph_task
from zero_fn.runtime.run import Run, run_of
from zero_fn.runtime.slot import Slot
from zero_fn.runtime.uncompiled import uncompiled
from zero_fn.runtime.unit import ReadUse, Unit
from zero_fn.values import watching
from zero_fn.values.watching import Moment

__all__ = ["Parameters", "end_reads", "finish_reads", "leave_read"]


class Parameters(dict[str, nn.Parameter | None]):
    """The parameters of a module at which units are entered."""

    __slots__ = ("_module",)

    def __init__(self, parameters: dict[str, nn.Parameter | None], module: nn.Module) -> None:
        super().__init__(parameters)
        self._module = weakref.ref(module)

    def __getitem__(self, name: str) -> nn.Parameter | None:
        """Compiled with the forwards that ask for a bias, and get None."""
        registered = self.get(name)
        if registered is None:
            return super().__getitem__(name)
        found: nn.Parameter = _as_read(self._module(), name, registered)
        return found

    def __deepcopy__(self, memo: dict[int, Any]) -> dict[str, nn.Parameter | None]:
        twin = copy.deepcopy(dict(self), memo)
        module = memo.get(id(self._module()))
        return twin if module is None else Parameters(twin, module)

    def __reduce__(self) -> tuple[type, tuple[dict[str, nn.Parameter | None]]]:
        return dict, (dict(self),)


@uncompiled
def _as_read(module: nn.Module | None, name: str, registered: nn.Parameter) -> Any:
    """What `module.name` is: whole inside a forward that may read it,
    else the registered parameter.

    `functional_call` and others take what is registered out of `_parameters`
    and put it back: they get that.
    """
    found = _place_of(module, name) if "__getattr__" in sys._getframe(2).f_code.co_name else None
    if found is None:
        return registered
    unit, slot = found
    run = run_of(unit)
    if unit.visible.leaves is not None:
        return in_compute_dtype(slot, registered) if run.calls.forward else registered
    if current_graph_task() != -1:
        entry: Any = unit.visible.last_entry()
        was_read = entry is not None and entry.unit is not unit
        was_read = was_read or any(use.is_read for use in run.graphs.uses_of(unit.index))
        if was_read and unit.visible.in_backward is None:
            run.need_in_backward(unit, recomputes=True)
    elif run.forward is not None and run.calls.thread == get_ident() and not unit.running:
        _enter(unit, run)
    assert module is not None, "a place was found"
    return module.__dict__.get(name, registered)


def _place_of(module: nn.Module | None, name: str) -> tuple[Unit, Slot] | None:
    """The unit and the parameter of an attribute of a module, if a pass of the unit is open."""
    for entry in module.__dict__.get(ENTRY_POINTS, ()) if module is not None else ():
        unit: Unit = entry.unit
        if run_of(unit).calls.forward or run_of(unit).is_backward_open:
            for slot in unit.slots:
                if any(
                    place._module() is module and place.attribute == name for place in slot.places
                ):
                    return unit, slot
    return None


def _enter(unit: Unit, run: Run) -> None:
    """Lets modules see the whole parameters of a unit until the call that runs has ended."""
    forward = run.forward
    assert forward is not None
    reader = forward.innermost()
    if has_context():
        require_run(unit.name, unit.modules()[0])
    for watch in watching.watchers:
        watch.note(Moment.ENTER, unit.name)
    # A weight may be read without gradients first, and be multiplied with later.
    with torch.set_grad_enabled(forward.grad or torch.is_grad_enabled()):
        use = called_outside(run.enter, unit, reader.entry, "read", reader)
        assert isinstance(use, ReadUse)
        use.tensors = called_outside(gather, use)
    unit.read = use
    run.calls.reads.append(use)
    unit.visible.show(use.tensors)


def finish_reads(run: Run, entry: object) -> None:
    """Refuses changes of the weights that the forward at an entry point has read.

    Raises:
        PlacementError: One was changed in place.
    """
    for use in run.calls.reads:
        if use.entry is entry:
            use.unit.visible.require_unchanged(use.unit.name, use.tensors)


def end_reads(run: Run, entry: object, *, failed: bool) -> None:
    """Leaves the units whose weights the forward at an entry point has read."""
    if run.calls.reads and run.calls.reads[-1].entry is entry:
        try:
            leave_read(run.calls.reads[-1], failed=failed)
        finally:
            end_reads(run, entry, failed=failed)


def leave_read(use: ReadUse, *, failed: bool) -> None:
    """Leaves a unit whose weights were read."""
    unit = use.unit
    run = run_of(unit)
    run.calls.reads.remove(use)
    unit.read = None
    use.has_graph = use.node is not None or use.reader.has_graph
    unit.visible.hide()
    use.tensors.clear()  # memory that somebody holds a part of is not used again
    called_outside(run.leave, use, failed=failed)
    for watch in watching.watchers:
        watch.note(Moment.LEAVE, unit.name)
