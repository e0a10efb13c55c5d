"""Negative dims count from the end: `b.cumsum(-1)`, `torch.stack([p, q], dim=-1)`.

DTensor takes some of them for another dim than the one that is cut (cumulative operations in 2.13, `stack` in 2.11), and
gives the sums of this rank's shard. Here, on tensors of the meshes that transforms were given, they are counted first.
"""

from __future__ import annotations

from typing import Any

import torch

from zero_fn.runtime.dtensor_operations import Otherwise, around, is_ours

__all__ = ["count_dims_from_the_front"]

_aten = torch.ops.aten


def count_dims_from_the_front() -> None:
    """From now on negative dims of tensors of our meshes are those of torch. Does nothing the second time."""
    around(_cumulated, _aten.cumsum.default, _aten.cumprod.default, _aten.logcumsumexp.default)
    around(_stacked, _aten.stack.default)


def _cumulated(compute: Otherwise, args: tuple[Any, ...], kwargs: dict[str, Any]) -> object:
    tensor, dim = args
    return compute(tensor, dim % tensor.ndim if tensor.ndim and is_ours(tensor) else dim, **kwargs)


def _stacked(stack: Otherwise, args: tuple[Any, ...], kwargs: dict[str, Any]) -> object:
    tensors, *dims = args
    if dims and any(map(is_ours, tensors)):
        dims = [dims[0] % (tensors[0].ndim + 1)]
    return stack(tensors, *dims, **kwargs)
