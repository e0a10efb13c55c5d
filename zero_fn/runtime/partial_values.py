"""The value of a sum over shards is that of all shards: `p.grad.norm().item()`, `if p.isnan().any():`.

A reduction of a DTensor in shards is a DTensor that each rank holds a part of; torch's operations on it bring the parts
together when they must. Reading it as a number does not (2.13): `item()`, `float()` and `if` silently give this rank's
part, so ranks log other norms, and take other branches. Here such a number is read from the reduced tensor, on tensors of
the meshes that transforms were given. That makes it a collective: before, all ranks meet, so that a rank which reads
alone gets an error in place of a silence.

[Note: parts that are no terms] Norms along a dim that is cut, and `any`, are parts too, but not of a sum. DTensor goes on
with them as if they were (2.13): `p.norm(dim=0).sum()` added up norms of shards. These are brought together at once. And
torch 2.11 divides by the part of a sum: `x / p.sum()` was a sum of quotients.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed.tensor import DTensor, Replicate
from torch.torch_version import TorchVersion

from zero_fn.resting import detached
from zero_fn.runtime.dtensor_operations import Otherwise, around, is_ours
from zero_fn.runtime.everywhere import done_along

__all__ = ["read_values_whole"]

_aten = torch.ops.aten


def read_values_whole() -> None:
    """From now on numbers are read from tensors of our meshes whole. Does nothing the second time."""
    around(_read, _aten._local_scalar_dense.default)
    around(_brought_together, _aten.linalg_vector_norm.default, _aten.any.default, _aten.any.dim, _aten.any.dims)
    if TorchVersion(torch.__version__) < "2.12":
        around(_divided, _aten.div.Tensor)


def _read(read: Otherwise, args: tuple[Any, ...], kwargs: dict[str, Any]) -> object:
    (tensor,) = args
    if is_ours(tensor):
        partial = [dim for dim, placement in enumerate(tensor.placements) if placement.is_partial()]
        if partial:
            done_along(tensor.device_mesh, partial, lambda: None, "Reading the value of a sum over shards")
            tensor = detached(tensor).full_tensor()
    return read(tensor, **kwargs)


def _brought_together(reduce: Otherwise, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """[Note: parts that are no terms]"""
    found = reduce(*args, **kwargs)
    if not is_ours(found):
        return found
    if found.is_floating_point() and not found.ndim:
        return found  # a norm of everything: `clip_grad_norm_` goes on with it, and rightly
    return _whole(found)


def _divided(divide: Otherwise, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    dividend, divisor = args
    return divide(dividend, _whole(detached(divisor)) if is_ours(divisor) else divisor, **kwargs)


def _whole(tensor: DTensor) -> DTensor:
    placements = [Replicate() if placement.is_partial() else placement for placement in tensor.placements]
    return tensor if tuple(placements) == tensor.placements else tensor.redistribute(placements=placements)
