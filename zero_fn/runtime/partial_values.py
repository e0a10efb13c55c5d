"""The value of a sum over shards is that of all shards: `p.grad.norm().item()`, `if p.isnan().any():`.

A reduction of a DTensor in shards is a DTensor that each rank holds a part of; torch's operations on it bring the parts
together when they must. Reading it as a number does not (2.13): `item()`, `float()` and `if` silently give this rank's
part, so ranks log other norms, and take other branches. Here such a number is read from the reduced tensor, on tensors of
the meshes that transforms were given. That makes it a collective: before, all ranks meet, so that a rank which reads
alone gets an error in place of a silence.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from zero_fn.runtime.dtensor_operations import around
from zero_fn.runtime.everywhere import done_along

__all__ = ["read_values_whole"]

_meshes: set[DeviceMesh] = set()


def read_values_whole(mesh: DeviceMesh) -> None:
    """From now on numbers are read from tensors of this mesh whole."""
    _meshes.add(mesh)
    around(torch.ops.aten._local_scalar_dense.default, _read)


def _read(read: Callable[..., object], args: tuple[Any, ...], kwargs: dict[str, Any]) -> object:
    (tensor,) = args
    if isinstance(tensor, DTensor) and tensor.device_mesh in _meshes:
        partial = [dim for dim, placement in enumerate(tensor.placements) if placement.is_partial()]
        if partial:
            done_along(tensor.device_mesh, partial, lambda: None, "Reading the value of a sum over shards")
            tensor = tensor.full_tensor()
    return read(tensor, **kwargs)
