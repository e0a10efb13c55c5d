"""The registered parameter: a standard DTensor over memory that we own.

The one file that builds DTensors from parts and reads their local tensors, because the public ways
(`DTensor.from_local`, `to_local`) take 10 times as long and record autograd. `tests/test_torch_assumptions.py`
checks what is relied on here.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta

from zero_fn.mesh import Axis

__all__ = [
    "is_dense",
    "local_of",
    "moved",
    "nothing",
    "on_spec",
    "resting_parameter",
    "resting_spec",
    "resting_tensor",
    "set_local",
    "spec_on",
]


def resting_spec(
    axis: Axis, dim: int | None, shape: Sequence[int], stride: Sequence[int], dtype: torch.dtype
) -> DTensorSpec:
    """How a tensor lies on the axis: `Shard(dim)`, or `Replicate` where `dim` is None."""
    placement: Placement = Replicate() if dim is None else Shard(dim)
    return DTensorSpec(axis.mesh, (placement,), tensor_meta=TensorMeta(torch.Size(shape), tuple(stride), dtype))


def spec_on(model: DTensorSpec, shape: Sequence[int], stride: Sequence[int], dtype: torch.dtype) -> DTensorSpec:
    """The same placements for a tensor of this shape, these strides and this dtype."""
    return DTensorSpec(model.mesh, model.placements, tensor_meta=TensorMeta(torch.Size(shape), tuple(stride), dtype))


def resting_tensor(local: Tensor, spec: DTensorSpec) -> DTensor:
    """A DTensor whose local tensor is `local`, without a copy."""
    # A DTensor takes over the storage offset of its local tensor and then passes for a tensor with a storage of its own,
    # which deepcopy fails on (2.13). So one that has an offset is made over a tensor at offset 0 and moved.
    if not local.storage_offset():
        return on_spec(local, spec)
    return moved(local, spec, nothing(local.dtype, local.device))


def moved(local: Tensor, spec: DTensorSpec, empty: Tensor) -> DTensor:
    """The same for a tensor at any offset; `empty` is `nothing` of its dtype and device, looked up by the caller."""
    tensor = DTensor.__new__(DTensor, empty, spec, requires_grad=False)
    tensor._local_tensor = local
    return tensor


def on_spec(local: Tensor, spec: DTensorSpec) -> DTensor:
    """A DTensor over a view of memory, for one use."""
    # Not `DTensor(...)`, whose `__init__` does nothing but enter and leave the compiler's frame evaluation: twice the cost.
    return DTensor.__new__(DTensor, local, spec, requires_grad=False)


@cache
def nothing(dtype: torch.dtype, device: torch.device) -> Tensor:
    """A tensor without elements, for `moved`."""
    with torch.inference_mode(False):
        return torch.empty(0, dtype=dtype, device=device)


def resting_parameter(local: Tensor, spec: DTensorSpec | None, *, requires_grad: bool) -> nn.Parameter:
    """The parameter to register: a DTensor over `local`, or, on no axis (spec None), `local` itself."""
    if spec is None:
        return nn.Parameter(local, requires_grad=requires_grad)
    # Not `nn.Parameter(...)`, which detaches: DTensor then works out the placements of a detach for every new shape (1 ms).
    parameter: nn.Parameter = moved(local, spec, local.new_empty(0))  # type: ignore[assignment]
    parameter._is_param = True  # what makes a tensor of another class a parameter
    parameter.requires_grad_(requires_grad)
    return parameter


def local_of(tensor: Tensor) -> Tensor:
    """The memory of this rank behind a resting parameter or gradient, outside autograd."""
    return tensor._local_tensor if isinstance(tensor, DTensor) else tensor.detach()


def set_local(parameter: nn.Parameter, local: Tensor) -> None:
    """Moves a resting parameter onto other memory; optimizers keep the same parameter object."""
    if isinstance(parameter, DTensor):
        parameter._local_tensor = local
    else:
        parameter.data = local


def is_dense(tensor: Tensor) -> bool:
    """Whether its elements are one range of memory without gaps or overlaps."""
    if tensor.is_contiguous():
        return True
    expected = 1
    for stride, size in sorted((s, n) for s, n in zip(tensor.stride(), tensor.shape, strict=True) if n != 1):
        if stride != expected:
            return False
        expected *= size
    return expected == tensor.numel()
