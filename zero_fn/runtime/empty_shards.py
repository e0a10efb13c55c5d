"""The largest element of an empty shard: there is none, so the largest of the whole tensor is that of the others.

Where a parameter has fewer rows than there are ranks, some ranks hold nothing of it. torch refuses an empty tensor where a
reduction has no neutral element (2.13): `clip_grad_norm_(..., norm_type=inf)`, `p.abs().max()`, `p.amax(0)` raised on those
ranks while the others waited for them. Here such operations see one neutral row more on every rank of such a tensor. The
place of the largest element, `p.argmax()`, is looked for in the whole tensor. Installed by the first transform.
"""

from __future__ import annotations

from collections.abc import Iterable
from math import inf, prod
from typing import Any

import torch
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard
from torch.utils._pytree import tree_map

from zero_fn.resting import detached, local_of
from zero_fn.runtime.dtensor_operations import Otherwise, around, is_ours
from zero_fn.runtime.mixed_norms import refuse_mixed_norms

__all__ = ["pass_over_empty_shards"]

_aten = torch.ops.aten
_NORMS = (_aten._foreach_norm.Scalar, _aten.linalg_vector_norm.default)
_GREATEST = (_aten.amax.default, _aten.max.default)
_LEAST = (_aten.amin.default, _aten.min.default)
_PLACES = (_aten.argmax.default, _aten.argmin.default)


def pass_over_empty_shards() -> None:
    """Lets norms and extremes of tensors of our meshes pass over empty shards. Does nothing the second time."""
    around(_norm, *_NORMS)
    around(_extreme, *_GREATEST, *_LEAST)
    around(_place, *_PLACES)


def _norm(norm: Otherwise, args: tuple[Any, ...], kwargs: dict[str, Any]) -> object:
    tensors, *others = args
    if isinstance(tensors, list | tuple):
        refuse_mixed_norms(tensors)
    p = others[0] if others else kwargs.get("ord", 2)
    if p < 0 or p == inf:
        neutral = 0.0 if p > 0 else inf
        dims = others[1] if len(others) > 1 else kwargs.get("dim")
        tensors = tree_map(lambda tensor: _with_one_more(tensor, neutral, dims), tensors)
    return norm(tensors, *others, **kwargs)


def _extreme(find: Otherwise, args: tuple[Any, ...], kwargs: dict[str, Any]) -> object:
    tensor, *others = args
    bounds = _bounds(tensor.dtype)
    neutral = bounds[0] if find.operation in _GREATEST else bounds[1]
    return find(_with_one_more(tensor, neutral, others[0] if others else kwargs.get("dim")), *others, **kwargs)


def _place(find: Otherwise, args: tuple[Any, ...], kwargs: dict[str, Any]) -> object:
    tensor, *others = args
    if is_ours(tensor):
        strided = {placement.dim for placement in tensor.placements if isinstance(placement, _StridedShard)}
        tensor = _whole_along(tensor, _dims_cut(tensor) | strided)  # of strided shards torch would look in even ones
    return find(tensor, *others, **kwargs)


def _bounds(dtype: torch.dtype) -> tuple[float, float]:
    if dtype == torch.bool:
        return False, True
    if dtype.is_floating_point:
        return -inf, inf
    return torch.iinfo(dtype).min, torch.iinfo(dtype).max


def _with_one_more(tensor: object, value: float, dims: Iterable[int] | None) -> object:
    """The tensor with `value` once more at the end of each shard, along what is reduced and may be empty on a rank."""
    if not is_ours(tensor):
        return tensor
    reduced = {dim % tensor.ndim for dim in dims or range(tensor.ndim)} if tensor.ndim else set()
    cut = _dims_cut(tensor) & reduced
    if not cut:
        return tensor
    if any(placement.is_partial() for placement in tensor.placements):
        return _whole_along(tensor, cut)  # the parts are added up first, and so would the rows be
    longer = local_of(tensor)
    for dim in cut:
        row = longer.new_full([1 if i == dim else n for i, n in enumerate(longer.shape)], value)
        longer = torch.cat([longer, row], dim)
    return DTensor(longer, tensor._spec, requires_grad=False)  # type: ignore[no-untyped-call]


def _whole_along(tensor: DTensor, dims: set[int]) -> DTensor:
    """The tensor, in full along some of the dims that are cut."""
    placements = [Replicate() if getattr(p, "dim", None) in dims else p for p in tensor.placements]
    return detached(tensor).redistribute(placements=placements) if dims else tensor


def _dims_cut(tensor: DTensor) -> set[int]:
    """Of which dims a shard may be empty: the same on every rank."""
    if not tensor.numel():
        return set()
    cuts = [
        (p.dim, tensor.device_mesh.size(axis))
        for axis, p in enumerate(tensor.placements)
        if isinstance(p, Shard | _StridedShard)
    ]
    shards = prod(n for _, n in cuts)
    # `torch.chunk` leaves a chunk out only of fewer rows than this.
    return {dim for dim, _ in cuts if tensor.shape[dim] < shards * shards}
