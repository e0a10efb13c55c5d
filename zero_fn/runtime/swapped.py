"""Calls of a module under torch.func.

`grad`, `vmap` and `jvp` wrap tensors, and know no saved-tensor hooks. Inside them nothing is packed, and parameters are
gathered outside the wrappers. A unit in all of whose places `functional_call` has put whole tensors is left to them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import ParamSpec, TypeVar

import torch
from torch import Tensor, nn
from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack
from torch.distributed.tensor import DTensor

from zero_fn.errors import StateError
from zero_fn.runtime.slot import Slot

__all__ = ["called_outside", "in_compute_dtype", "is_swapped", "is_transforming", "partly_swapped"]

P = ParamSpec("P")
R = TypeVar("R")

_peek = torch._C._functorch.peek_interpreter_stack


def is_transforming() -> bool:
    """Whether this runs inside a transform of torch.func, such as `grad` or `vmap`."""
    return _peek() is not None


def called_outside(function: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
    """Calls a function outside the transforms of torch.func."""
    if _peek() is None:
        return function(*args, **kwargs)
    with temporarily_clear_interpreter_stack():
        return function(*args, **kwargs)


def is_swapped(slots: Sequence[Slot], unit: str) -> bool:
    """Whether whole tensors stand in for all parameters of a unit at rest.

    Raises:
        StateError: They stand in for some only, or one of them rests in parts on several ranks.
    """
    are_swapped = are_at_rest = False
    for slot in slots:
        for place in slot.places:
            module = place._module()
            if module is None or place.attribute not in module._parameters:
                continue
            if (value := module._parameters[place.attribute]) is slot.parameter:
                are_at_rest = True
            elif value is not None and not isinstance(value, nn.Parameter):
                are_swapped, are_at_rest = True, are_at_rest or _is_resting(value, slot)
    if are_swapped and are_at_rest:
        raise partly_swapped(unit)
    return are_swapped


def partly_swapped(unit: str) -> StateError:
    """The error for a model that would run on its own parameters and on others at once."""
    return StateError(
        "functional_call was given resting tensors, or tensors for some of the parameters.",
        unit=unit or "root",
        why="parameters at rest are gathered, whole tensors are taken as they are, and one forward does one of the two",
        fix="with zf.unsharded(model): functional_call(model, values, x), where parameters() are whole. Gradients of values "
        "are those of this rank",
    )


def in_compute_dtype(slot: Slot, value: Tensor) -> Tensor:
    """A whole value as a forward computes with it: one in the dtype at rest is cast."""
    return value.to(slot.kind.compute_dtype) if value.dtype == slot.dtype else value


def _is_resting(value: Tensor, slot: Slot) -> bool:
    """Whether a value is a DTensor, and not one on the model axes of the parameter, which a forward takes as it is."""
    while torch._C._functorch.is_functorch_wrapped_tensor(value):
        value = torch._C._functorch.get_unwrapped(value)
    return isinstance(value, DTensor) and (slot.model is None or value.device_mesh != slot.model.mesh)
