"""Tensors that stand in for parameters during one forward: those that `torch.func.functional_call` registers.

Whole plain tensors are used as they are, and their gradients are those of this rank. Resting tensors (such as
`parameter - lr * grad`) are refused.

[Note: torch.func sees whole tensors] `grad` and `vmap` of torch.func wrap tensors, and know no saved-tensor hooks. Inside
them nothing is packed, and parameters are gathered outside the wrappers.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, ParamSpec, TypeVar

import torch
from torch import Tensor, nn
from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack
from torch.distributed.tensor import DTensor

from zero_fn.errors import PlacementError, StateError
from zero_fn.runtime.slot import Slot

__all__ = ["called_outside", "in_compute_dtype", "is_transforming", "outside_transforms", "swapped_values"]

P = ParamSpec("P")
R = TypeVar("R")

_NOTHING = nullcontext()
_peek = torch._C._functorch.peek_interpreter_stack


def is_transforming() -> bool:
    """Whether this runs inside a transform of torch.func, such as `grad` or `vmap`."""
    return _peek() is not None


def outside_transforms() -> AbstractContextManager[Any]:
    """A context outside the transforms of torch.func."""
    return temporarily_clear_interpreter_stack() if is_transforming() else _NOTHING


def called_outside(function: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
    """Calls a function outside the transforms of torch.func."""
    if _peek() is None:
        return function(*args, **kwargs)
    with outside_transforms():
        return function(*args, **kwargs)


def swapped_values(slots: Sequence[Slot]) -> dict[int, Tensor]:
    """The tensors that are registered in place of parameters, by the number of the slot.

    Raises:
        StateError: A tensor rests in parts on several ranks.
        PlacementError: The places of a tied parameter hold several tensors, or a tensor has another shape.
    """
    found: dict[int, Tensor] = {}
    for i, slot in enumerate(slots):
        values: list[Tensor | None] = [place.registered for place in slot.places]
        swapped = [value for value in values if value is not None and not isinstance(value, nn.Parameter)]
        if not swapped:
            continue
        if any(value is not swapped[0] for value in values):
            raise PlacementError(
                f"{slot.fqn!r} is tied, and its places were given different tensors.",
                parameter=slot,
                fix="functional_call(model, values, args) with one name of the tie, and tie_weights=True",
            )
        if tuple(swapped[0].shape) != slot.full_shape:
            raise PlacementError(
                f"{slot.fqn!r} was replaced by a tensor of another shape.",
                expected=slot,
                got=f"{type(swapped[0]).__name__} of {list(swapped[0].shape)}",
                fix="functional_call(model, values, args) with whole tensors",
            )
        if _is_resting(swapped[0], slot):
            raise StateError(
                f"functional_call was given a resting tensor in place of {slot.fqn!r}.",
                parameter=slot,
                why="a forward computes with whole tensors, and this rank holds a part",
                fix="values = {name: p.full_tensor().detach().requires_grad_() for name, p in model.named_parameters()}; or "
                "read whole parameters in `with zf.unsharded(model):`. Their gradients are not averaged over ranks",
            )
        found[i] = swapped[0]
    return found


def in_compute_dtype(slot: Slot, value: Tensor) -> Tensor:
    """A whole value as a forward computes with it: one in the dtype at rest is cast."""
    return value.to(slot.kind.compute_dtype) if value.dtype == slot.dtype else value


def _is_resting(value: Tensor, slot: Slot) -> bool:
    """Whether a value is a DTensor, and not one on the model axes of the parameter, which a forward takes as it is."""
    while torch._C._functorch.is_functorch_wrapped_tensor(value):
        value = torch._C._functorch.get_unwrapped(value)
    return isinstance(value, DTensor) and (slot.model is None or value.device_mesh != slot.model.mesh)
