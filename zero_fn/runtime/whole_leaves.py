"""Blocks in which the parameters of a unit are whole, plain leaves: gathered once, and registered
in place of the resting ones.

In a block that trains (`accumulate(unshard=True)`) their gradients are reduced once, too. Whatever
autograd does with the leaves of a plain module works on them: many forwards before the first
backward of a pipeline, weight gradients that zero-bubble schedules take with `torch.autograd.grad`,
`.grad` that is divided in place. While the block lasts, whole parameters and whole gradients take
the memory that they take under data parallelism without ZeRO.

A parameter that computes in another dtype stays a leaf in the dtype at rest, and each forward casts
it. So gradients are summed in the dtype at rest, whoever sums them. Once backward has reached the
outputs of a forward, modules see the casts of that forward until the backward ends: a checkpoint
inside the unit computes with them again.
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

from zero_fn.errors import PlacementError
from zero_fn.runtime.call_context import in_compute_dtype
from zero_fn.runtime.on_model_axes import local_gradient
from zero_fn.runtime.slot import Slot
from zero_fn.runtime.uncompiled import uncompiled
from zero_fn.runtime.unit import Unit
from zero_fn.values.dtensors import on_spec

__all__ = [
    "begin_whole",
    "end_whole",
    "local_gradients",
    "register_resting",
    "see_leaves",
    "show_in_backward",
]


def begin_whole(units: Sequence[Unit]) -> None:
    """Registers whole parameters in place of the resting ones: plain,
    or on the model axes where they were placed.

    Communicates: one all-gather for each unit, all issued before the first is waited for.
    """
    gathering = [unit.memory.issue_wholes() for unit in units]
    for unit, (wholes, pending) in zip(units, gathering, strict=True):
        pending.wait()
        unit.visible.leaves = [
            _registered(slot, whole) for slot, whole in zip(unit.slots, wholes, strict=True)
        ]


def _registered(slot: Slot, whole: Tensor) -> nn.Parameter:
    value = whole.data  # its version counts changes from here on
    value = value if slot.model is None else on_spec(value, slot.model)
    parameter = nn.Parameter(value, requires_grad=slot.parameter.requires_grad)
    slot.register(parameter)
    return parameter


def end_whole(unit: Unit) -> list[nn.Parameter]:
    """Registers the resting parameters again. Returns the leaves."""
    _hide(unit)
    leaves, unit.visible.leaves = unit.visible.leaves or [], None
    register_resting(unit)
    return leaves


def register_resting(unit: Unit) -> None:
    """Registers the resting parameters again."""
    for slot in unit.slots:
        slot.register(slot.parameter)


def local_gradients(unit: Unit, leaves: Sequence[Tensor]) -> list[Tensor | None]:
    """The gradients of leaves on this rank, whole on its data axes."""
    found: list[Tensor | None] = []
    for slot, leaf in zip(unit.slots, leaves, strict=True):
        grad = leaf.grad
        if isinstance(grad, DTensor):
            assert slot.model is not None
            grad = local_gradient(grad, slot.model)
        found.append(grad)
    return found


def see_leaves(unit: Unit) -> list[Tensor]:
    """The leaves as a forward sees them, in the compute dtype; or the tensors that
    `functional_call` has put in their place."""
    assert unit.visible.leaves is not None
    if torch.is_inference_mode_enabled():
        with torch.inference_mode(False), torch.no_grad():  # tensors of inference count no changes
            return see_leaves(unit)
    found = []
    for slot in unit.slots:
        value, *others = (place.registered for place in slot.places)
        if any(other is not value for other in others):
            raise PlacementError(
                f"{slot.fqn!r} is tied, and its places were given different tensors.",
                parameter=slot,
                fix="functional_call(model, values, args) with one name of the tie, "
                "and tie_weights=True",
            )
        assert value is not None
        found.append(in_compute_dtype(slot, value))
    return found


def show_in_backward(unit: Unit, tensors: list[Tensor], outputs: Iterable[Tensor]) -> None:
    """Once backward has reached an output of a forward of the unit,
    lets modules see the tensors that the forward saw."""
    assert unit.visible.leaves is not None
    if all(map(is_, tensors, unit.visible.leaves)):
        return
    hook = partial(_show_until_the_end, unit, tensors)
    for output in outputs:
        if output.requires_grad:
            output.register_hook(hook)  # type: ignore[no-untyped-call]


@uncompiled
def _show_until_the_end(unit: Unit, tensors: list[Tensor], _grad: Tensor) -> None:
    if unit.visible.leaves is not None and unit.visible.in_backward is None:
        unit.visible.show_in_backward(tensors, unit)

        def end() -> None:
            leave()

        # If the backward raises, `end` is dropped, and this finalizer runs.
        leave = weakref.finalize(end, _hide, unit)
        Variable._execution_engine.queue_callback(end)


def _hide(unit: Unit) -> None:
    if (seen := unit.visible.in_backward) is not None and seen.entry is unit:
        unit.leave_backward()
