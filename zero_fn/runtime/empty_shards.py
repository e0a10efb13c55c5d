"""The largest element of an empty shard: there is none, so the maximum norm of it is 0, where torch raises.

Where a parameter has fewer rows than there are ranks, some ranks hold nothing of it. torch's norms refuse an empty tensor
if p is infinite (2.13), so `clip_grad_norm_(..., norm_type=inf)` raised on those ranks while the others waited for them.
Here both operations see one zero more on every rank of such a parameter. They are installed by the first transform.
"""

from __future__ import annotations

from collections.abc import Callable
from math import inf, prod
from typing import Any

import torch
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.placement_types import _StridedShard
from torch.utils._pytree import tree_map

from zero_fn.runtime.dtensor_operations import around
from zero_fn.runtime.mixed_norms import refuse_mixed_norms

__all__ = ["give_empty_shards_a_norm"]

_NORMS = (torch.ops.aten._foreach_norm.Scalar, torch.ops.aten.linalg_vector_norm.default)


def give_empty_shards_a_norm() -> None:
    """Lets norms with infinite p pass over empty shards. Does nothing the second time."""
    for norm in _NORMS:
        around(norm, _norm)


def _norm(norm: Callable[..., object], args: tuple[Any, ...], kwargs: dict[str, Any]) -> object:
    tensors, *others = args
    if isinstance(tensors, list | tuple):
        refuse_mixed_norms(tensors)
    p = others[0] if others else kwargs.get("ord", 2)
    if abs(p) == inf:
        neutral = 0.0 if p > 0 else inf
        tensors = tree_map(lambda tensor: _with_one_more(tensor, neutral), tensors)
    return norm(tensors, *others, **kwargs)


def _with_one_more(tensor: object, value: float) -> object:
    """The tensor with `value` after the elements of each shard, if a shard may be empty: the same on every rank."""
    if not isinstance(tensor, DTensor) or not tensor.numel():
        return tensor
    mesh = tensor.device_mesh
    cuts = [
        (p.dim, mesh.size(axis)) for axis, p in enumerate(tensor.placements) if isinstance(p, Shard | _StridedShard)
    ]
    shards = prod(n for _, n in cuts)
    # `torch.chunk` leaves a chunk out only of fewer rows than this.
    if not any(tensor.shape[dim] < shards * shards for dim, _ in cuts):
        return tensor
    local = tensor._local_tensor.reshape(-1)
    longer = torch.cat([local, local.new_full((1,), value)])
    return DTensor(longer, tensor._spec, requires_grad=False)  # type: ignore[no-untyped-call]
