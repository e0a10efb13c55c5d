"""A block in which the parameters of a unit are whole, plain leaves: gathered once, reduced once.

Whatever autograd does with the leaves of a plain module works on them: the many forwards before the first backward of a
pipeline, the weight gradients that zero-bubble schedules take with `torch.autograd.grad`, `.grad` that is divided in place.
The price is that of data parallelism without ZeRO for as long as the block lasts: whole parameters and whole gradients.

A parameter that computes in another dtype stays a leaf in the dtype at rest and is cast in each forward, so that
gradients are summed in the dtype at rest, whoever sums them. Once backward has reached the outputs of a forward, modules see
the casts of that forward until it ends: a checkpoint inside the unit computes with them again.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Sequence
from functools import partial
from operator import is_

import torch
from torch import Tensor, nn
from torch.autograd import Variable
from torch.distributed.tensor import DTensor

from zero_fn.resting import on_spec
from zero_fn.runtime.on_model_axes import local_gradient
from zero_fn.runtime.slot import Slot
from zero_fn.runtime.uncompiled import uncompiled
from zero_fn.runtime.unit import Unit

__all__ = [
    "begin_whole_step",
    "cast_leaves",
    "end_whole_step",
    "register_resting",
    "register_wholes",
    "show_in_backward",
]


def register_wholes(unit: Unit, wholes: Sequence[Tensor]) -> list[nn.Parameter]:
    """Registers whole values in place of the resting parameters: plain, or on the model axes where they were placed."""
    parameters = []
    for slot, whole in zip(unit.slots, wholes, strict=True):
        value = whole.data  # its version counts changes from here on
        value = value if slot.model is None else on_spec(value, slot.model)
        parameter = nn.Parameter(value, requires_grad=slot.parameter.requires_grad)
        slot.register(parameter)
        parameters.append(parameter)
    return parameters


def register_resting(unit: Unit) -> None:
    """Registers the resting parameters again."""
    for slot in unit.slots:
        slot.register(slot.parameter)


def begin_whole_step(units: list[Unit]) -> None:
    """Registers whole parameters in place of the resting ones.

    Communicates: one all-gather for each unit, all issued before the first is waited for.
    """
    gathering = [unit.at_rest.issue_whole() for unit in units]
    for unit, (wholes, pending) in zip(units, gathering, strict=True):
        if pending is not None:
            pending.wait()
        unit.shown.leaves = register_wholes(unit, wholes)


def end_whole_step(unit: Unit) -> list[Tensor | None]:
    """Registers the resting parameters again, as changed in the leaves. Returns the gradients of this rank, whole."""
    _hide(unit)
    leaves, unit.shown.leaves = unit.shown.leaves or [], None
    register_resting(unit)
    changed = {slot: leaf for slot, leaf in zip(unit.slots, leaves, strict=True) if leaf._version}
    if changed:  # they had version 0 when they were registered
        unit.at_rest.scatter(changed)
    return [_local_gradient(slot, leaf.grad) for slot, leaf in zip(unit.slots, leaves, strict=True)]


def cast_leaves(unit: Unit) -> list[Tensor]:
    """The leaves as a forward sees them: in the compute dtype."""
    assert unit.shown.leaves is not None
    if torch.is_inference_mode_enabled():
        with torch.inference_mode(False), torch.no_grad():  # tensors of inference count no changes
            return cast_leaves(unit)
    return [
        leaf if leaf.dtype == slot.kind.compute_dtype else leaf.to(slot.kind.compute_dtype)
        for slot, leaf in zip(unit.slots, unit.shown.leaves, strict=True)
    ]


def show_in_backward(unit: Unit, tensors: list[Tensor], outputs: Iterable[Tensor]) -> None:
    """Lets modules see what a forward of the unit saw, once backward has reached one of its outputs."""
    assert unit.shown.leaves is not None
    if all(map(is_, tensors, unit.shown.leaves)):
        return
    hook = partial(_show_until_the_end, unit, tensors)
    for output in outputs:
        if output.requires_grad:
            output.register_hook(hook)  # type: ignore[no-untyped-call]


@uncompiled
def _show_until_the_end(unit: Unit, tensors: list[Tensor], _grad: Tensor) -> None:
    if unit.shown.leaves is not None and unit.shown.backward_entry is None:
        unit.shown.show_in_backward(tensors, unit)

        def end() -> None:
            leave()

        leave = weakref.finalize(end, _hide, unit)  # a backward that raises drops what it was to call
        Variable._execution_engine.queue_callback(end)


def _hide(unit: Unit) -> None:
    if unit.shown.backward_entry is unit:
        unit.leave_backward()


def _local_gradient(slot: Slot, grad: Tensor | None) -> Tensor | None:
    if not isinstance(grad, DTensor):
        return grad
    assert slot.model is not None
    return local_gradient(grad, slot.model)
