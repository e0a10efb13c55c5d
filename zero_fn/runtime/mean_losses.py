"""The mean of a loss between resting parameters is over all elements: `F.mse_loss(p, anchor)` keeps weights near others.

DTensor gives each rank the mean over its shard (2.13): where shards have as many elements the mean of those is right, but
each gradient is divided by the elements of a shard, not of the tensor, so it is larger by the number of shards. Here, on
tensors of the meshes that transforms were given, such a mean is the sum over the number of elements, forward and backward.
So is the mean of a strided shard (below tensor parallelism), which DTensor takes for an even one in 2.11.
"""

from __future__ import annotations

from math import prod
from typing import Any

import torch
from torch.distributed.tensor import Shard
from torch.distributed.tensor.placement_types import Placement

from zero_fn.runtime.dtensor_operations import Otherwise, around, is_ours

__all__ = ["take_means_over_wholes"]

_aten = torch.ops.aten
_MEAN, _SUM = 1, 2  # as the operations number them
_LOSSES = (
    _aten.mse_loss.default,
    _aten.smooth_l1_loss.default,
    _aten.huber_loss.default,
    _aten.soft_margin_loss.default,
    _aten.binary_cross_entropy.default,
    _aten.binary_cross_entropy_with_logits.default,
)
_BACKWARDS = (
    _aten.mse_loss_backward.default,
    _aten.smooth_l1_loss_backward.default,
    _aten.huber_loss_backward.default,
    _aten.soft_margin_loss_backward.default,
    _aten.binary_cross_entropy_backward.default,
)


def take_means_over_wholes() -> None:
    """From now on means of losses between tensors of our meshes are over all elements. Does nothing the second time."""
    around(_over_all, *_LOSSES, *_BACKWARDS)
    around(_mean, _aten.mean.default, _aten.mean.dim)


def _over_all(compute: Otherwise, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    is_backward = compute.operation in _BACKWARDS
    tensor, given = args[int(is_backward)], compute.named(args, kwargs)
    if not is_ours(tensor) or given["reduction"] != _MEAN:
        return compute(*args, **kwargs)
    given["reduction"] = _SUM
    if is_backward:
        given["grad_output"] = given["grad_output"] / tensor.numel()
        return compute(*given.values())
    return compute(*given.values()) / tensor.numel()


def _mean(mean: Otherwise, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    tensor, *rest = args
    if not is_ours(tensor) or not tensor.is_floating_point() or not any(map(_is_strided, tensor.placements)):
        return mean(*args, **kwargs)
    dims = rest[0] if rest and rest[0] else range(tensor.ndim)
    dtype = kwargs.get("dtype") or tensor.dtype
    total = tensor.sum(list(dims), *rest[1:], dtype=torch.promote_types(dtype, torch.float32))  # may overflow float16
    return (total / prod(tensor.shape[dim] for dim in dims)).to(dtype)


def _is_strided(placement: Placement) -> bool:
    return not (placement.is_replicate() or placement.is_partial() or type(placement) is Shard)
