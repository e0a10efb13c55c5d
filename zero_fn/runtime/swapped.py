"""Tensors in place of parameters for one forward: what `torch.func.functional_call` registers.

Whole plain tensors are used as they are, and gradients with respect to them are those of this rank. Resting tensors
(DTensors placed as the parameter, such as `parameter - lr * grad`) are gathered, and gradients with respect to them are
the mean over ranks, resting.

[Note: torch.func sees whole tensors] `grad` and `vmap` of torch.func wrap tensors, and know no saved-tensor hooks. Inside
them nothing is packed, parameters are gathered outside the wrappers, and resting tensors are refused.
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
from zero_fn.links import Links
from zero_fn.resting import local_of
from zero_fn.runtime.gradients import GradientMemory, Reduction
from zero_fn.runtime.on_model_axes import placed
from zero_fn.runtime.slot import Slot

__all__ = ["called_outside", "is_transforming", "outside_transforms", "swapped_values", "whole_value"]

P = ParamSpec("P")
R = TypeVar("R")

_NOTHING = nullcontext()
_peek = torch._C._functorch.peek_interpreter_stack


def is_transforming() -> bool:
    """Whether this runs inside `torch.func.grad`, `vmap` and their like."""
    return _peek() is not None


def outside_transforms() -> AbstractContextManager[Any]:
    """A context outside the transforms of torch.func, if this runs inside one."""
    return temporarily_clear_interpreter_stack() if is_transforming() else _NOTHING


def called_outside(function: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
    """Calls a function outside the transforms of torch.func."""
    if _peek() is None:
        return function(*args, **kwargs)
    with outside_transforms():
        return function(*args, **kwargs)


def swapped_values(slots: Sequence[Slot]) -> dict[int, Tensor]:
    """By slot, the tensors registered in place of parameters: of the shape of the whole, and no Parameters.

    Raises:
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
                fix="functional_call(model, values, args) with whole tensors, or resting ones placed as the parameter",
            )
        found[i] = swapped[0]
    return found


def whole_value(transport: Links, slot: Slot, value: Tensor) -> Tensor:
    """A swapped tensor as the forward sees it: whole, in the compute dtype."""
    if isinstance(value, DTensor) and slot.model is not None and value.device_mesh == slot.model.mesh:
        pass  # a whole one on its model axes, as the forward takes it
    elif isinstance(value, DTensor):
        assert slot.spec is not None, f"{slot.fqn} rests on no axis"
        if value.placements != slot.spec.placements:
            value = value.redistribute(placements=slot.spec.placements)
        value = _Whole.apply(transport, slot, value)  # type: ignore[no-untyped-call]
        (value,) = placed([slot], [value])
    elif is_transforming() and isinstance(_unwrapped(value), DTensor):
        raise StateError(
            "torch.func was given a resting parameter: its transforms take whole tensors.",
            parameter=slot,
            fix="values = {name: p.full_tensor().detach() for name, p in model.named_parameters()}, or torch.autograd.grad",
        )
    return value.to(slot.kind.compute_dtype) if value.dtype == slot.dtype else value


def _unwrapped(tensor: Tensor) -> Tensor:
    while torch._C._functorch.is_functorch_wrapped_tensor(tensor):
        tensor = torch._C._functorch.get_unwrapped(tensor)
    return tensor


class _Whole(torch.autograd.Function):
    """A resting tensor to the whole one. Its transpose is the mean over ranks, and that of the mean is this gather."""

    @staticmethod
    def forward(ctx: Any, transport: Links, slot: Slot, value: Tensor) -> Tensor:
        ctx.transport, ctx.slot = transport, slot
        local = local_of(value)
        if slot.path.layout is None:
            return local.clone()
        flat = torch.empty(slot.path.layout.padded_numel, dtype=local.dtype, device=local.device)
        flat.narrow(0, slot.path.start, slot.path.local_numel).copy_(local.permute(slot.path.layout.order).reshape(-1))
        transport.all_gather([slot.path.segment(flat)], f"{slot.fqn!r} for functional_call").wait()
        return slot.path.whole_view(flat)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[None, None, Tensor]:
        return None, None, _Mean.apply(ctx.transport, ctx.slot, grad)  # type: ignore[no-untyped-call]


class _Mean(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, transport: Links, slot: Slot, grad: Tensor) -> Tensor:
        ctx.transport, ctx.slot = transport, slot
        reduction = Reduction([slot], GradientMemory([slot]), [grad], transport, "a swapped tensor", exact=True)
        reduction.wait()
        reduction.regather()
        reduction.wait_regathered()
        resting = reduction.resting(slot)
        assert resting is not None
        return resting

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[None, None, Tensor]:
        return None, None, _Whole.apply(ctx.transport, ctx.slot, grad)  # type: ignore[no-untyped-call]
