"""Gathered parameters that tensor parallelism has placed:
in a forward they are DTensors on their model axes again.

The local tensor is the view of the gathered buffer, so nothing is copied. The gradient comes back
as a DTensor, possibly with other placements (that of a norm under sequence parallelism has
`Partial` ones). It is brought to the placements of the parameter, by a collective of torch: the
only one on the model axes here.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._dtensor_spec import DTensorSpec

from zero_fn.runtime.slot import Slot
from zero_fn.values.dtensors import on_spec

__all__ = ["arrived", "local_gradient", "placed"]


def placed(slots: Sequence[Slot], tensors: Sequence[Tensor]) -> list[Tensor]:
    """Gathered parameters as the forward sees them: DTensors on their
    model axes, if they have any."""
    if torch.is_inference_mode_enabled():
        with torch.inference_mode(False), torch.no_grad():  # tensors of inference count no changes
            return placed(slots, tensors)
    place: Any = _OnModelAxes.apply
    return [
        tensor if slot.model is None else place(tensor, slot.model_spec)
        for slot, tensor in zip(slots, tensors, strict=True)
    ]


def arrived(grad: Tensor | None) -> Tensor | None:
    """A local gradient once its bytes are there: a collective of torch may return
    it while they are under way."""
    return grad.wait() if isinstance(grad, AsyncCollectiveTensor) else grad


def local_gradient(grad: DTensor, spec: DTensorSpec) -> Tensor | None:
    """This rank's part of a gradient, with the placements of `spec`."""
    if grad.placements != spec.placements:
        grad = grad.redistribute(placements=spec.placements)
    return arrived(grad.to_local())


class _OnModelAxes(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, local: Tensor, spec: DTensorSpec) -> Tensor:
        ctx.spec = spec
        return on_spec(local.detach(), spec)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, None]:
        assert isinstance(grad, DTensor), "the gradient of a placed parameter is a DTensor"
        return local_gradient(grad, ctx.spec), None
