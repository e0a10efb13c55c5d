"""`clip_grad_norm_` over a transformed model and a plain one together is refused before it clips anything.

torch takes the norms of all gradients, stacks them, and scales gradient by gradient. With `foreach` it raises at the norms.
Without, it takes a plain gradient for one that all ranks share, clips the DTensors, and raises at the first plain tensor. So
the stack is where it must stop at the latest. Installed by the first transform, in the table in which DTensor looks for
operations of its own.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterable
from types import FrameType
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.nn.utils import clip_grad

from zero_fn.errors import PlacementError
from zero_fn.runtime.dtensor_operations import Otherwise, around

__all__ = ["refuse_mixed_norms", "watch_stacks_of_norms"]

_STACK = torch.ops.aten.stack.default


def watch_stacks_of_norms() -> None:
    """Looks at what `clip_grad_norm_` stacks. Does nothing the second time."""
    around(_stack, _STACK)


def refuse_mixed_norms(tensors: Iterable[Tensor]) -> None:
    """For gradients, or their norms, of which one is a DTensor.

    Raises:
        PlacementError: Another one is a plain tensor.
    """
    if all(isinstance(tensor, DTensor) for tensor in tensors):
        return
    raise PlacementError(
        "Gradients of a transformed model and of a plain one cannot share a norm.",
        why="of a plain gradient nobody knows whether it is the same on every rank",
        fix="transform the other model too: zf.replicate(model, mesh['dp']); or combine the norms of each yourself and call "
        "clip_grads_with_norm_(parameters, max_norm, total) for each",
    )


def _stack(stack: Otherwise, args: tuple[Any, ...], kwargs: dict[str, Any]) -> object:
    tensors = args[0]
    if not all(isinstance(tensor, DTensor) for tensor in tensors) and _is_clipping(inspect.currentframe()):
        refuse_mixed_norms(tensors)
    return stack(*args, **kwargs)


def _is_clipping(frame: FrameType | None) -> bool:
    while frame is not None:
        if frame.f_code.co_name == "clip_grad_norm_" and frame.f_code.co_filename == clip_grad.__file__:
            return True
        frame = frame.f_back
    return False
