"""A resting shard used as if it were the whole tensor gets our error, with the fix, in place of torch's.

torch refuses operations on a DTensor and a plain tensor with a message about DTensors. Where the DTensor lies on an axis
that a transform used, the mistake is known: a weight was read outside the forward of its unit. The one place that touches
torch's DTensor dispatcher; `tests/test_torch_assumptions.py` checks that it is still the place.
"""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from zero_fn.errors import ShardedAccessError
from zero_fn.mesh import Axis

__all__ = ["explain_access"]

_meshes: weakref.WeakSet[DeviceMesh] = weakref.WeakSet()


def explain_access(axis: Axis) -> None:
    """From now on, mixing a DTensor on this axis with a plain tensor raises `ShardedAccessError`."""
    _meshes.add(axis.mesh)
    dispatcher: Any = DTensor._op_dispatcher
    name = next(
        (n for n in ("_try_replicate_spec_for_scalar_tensor", "try_replicate_spec_for_scalar_tensor") if hasattr(dispatcher, n)),
        None,
    )
    if name is None or getattr(getattr(dispatcher, name), "explains_access", False):
        return
    original = getattr(dispatcher, name)

    def explained(op_call: torch._ops.OpOverload, tensor_arg: Tensor, compute_mesh: DeviceMesh) -> Any:
        try:
            return original(op_call, tensor_arg, compute_mesh)
        except RuntimeError as error:
            if compute_mesh not in _meshes:
                raise
            raise ShardedAccessError(
                "A resting parameter was used outside the forward of its unit, where this rank holds only its shard.",
                used_by=op_call,
                with_plain=f"{str(tensor_arg.dtype).removeprefix('torch.')}{list(tensor_arg.shape)}",
                axis=str(compute_mesh.mesh_dim_names or compute_mesh),
                fix="with zf.unsharded(module): ...   # whole parameters inside; or use the weight inside forward",
            ) from error

    explained.explains_access = True  # type: ignore[attr-defined]
    setattr(dispatcher, name, explained)
