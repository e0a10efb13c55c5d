"""What `clip_grad_norm_` does to gradients in another tier raises on every rank if a disk fails on one.

The norm is reduced over ranks by collectives of torch, in which ranks whose disk is well would wait for the one that has
raised, up to the deadline of their group; and after gradients were scaled on some ranks only, no step may follow. So both
operations end with a byte per rank along each axis of the mesh, where any of their tensors rests in a tier. They are
installed by the first transform that puts gradients there.

Other operations on single tensors need not be called on every rank, so no rank can wait there; those that move a tensor
between ranks are in `tier_redistribution`.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_leaves

from zero_fn.resting import local_of
from zero_fn.runtime.dtensor_operations import Otherwise, around
from zero_fn.runtime.everywhere import done_along
from zero_fn.runtime.tier_tensor import TierTensor

__all__ = ["agree_on_norms"]

_aten = torch.ops.aten
_OPERATIONS = {
    _aten._foreach_norm.Scalar: "The norm of gradients",
    _aten.linalg_vector_norm.default: "The norm of a gradient",
    _aten._foreach_mul_.Tensor: "Scaling gradients",
    _aten._foreach_mul_.Scalar: "Scaling gradients",
    _aten.mul_.Tensor: "Scaling a gradient",
}


def agree_on_norms() -> None:
    """Lets norms of tensors in a tier, and their scaling, agree over ranks. Does nothing the second time."""
    around(_agreed, *_OPERATIONS)


def _agreed(act: Otherwise, args: tuple[Any, ...], kwargs: dict[str, Any]) -> object:
    mesh = _mesh_of(args[0])
    if mesh is None:
        return act(*args, **kwargs)
    return done_along(mesh, range(mesh.ndim), lambda: act(*args, **kwargs), _OPERATIONS[act.operation])


def _mesh_of(tensors: object) -> DeviceMesh | None:
    """The mesh of those of the tensors that rest in a tier; None if none does."""
    for tensor in tree_leaves(tensors):
        if isinstance(tensor, DTensor) and isinstance(local_of(tensor), TierTensor):
            return tensor.device_mesh
    return None
