"""The registered parameter: a standard DTensor over memory that we own.

The one file that builds DTensors from parts and reads their local tensors, because the public ways
(`DTensor.from_local`, `to_local`) take 10 times as long and record autograd.
`tests/test_torch_assumptions.py` checks what is relied on here.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta

__all__ = [
    "alone",
    "as_plain",
    "at_same_address",
    "cut_alike",
    "detached",
    "goes_through_dlpack",
    "local_of",
    "on_spec",
    "rest_gradient",
    "rested",
    "resting_parameter",
    "set_local",
    "spanned",
    "spec_on",
]

as_plain = torch._C.DisableTorchFunctionSubclass
"""A context in which reading `requires_grad`, `grad` and hooks of a DTensor takes a third of the
time: torch looks for no `__torch_function__` there.

No function of the user may run inside.
"""


def spec_on(
    model: DTensorSpec, shape: Sequence[int], stride: Sequence[int], dtype: torch.dtype
) -> DTensorSpec:
    """The spec of a tensor of this shape, strides and dtype, with the placements of `model`."""
    return DTensorSpec(
        model.mesh,
        model.placements,
        tensor_meta=TensorMeta(torch.Size(shape), tuple(stride), dtype),
    )


def alone(view: Tensor) -> Tensor:
    """A tensor on the memory of a view, with a storage of its own that begins
    and ends where the view does.

    A DTensor takes over the storage offset of its local tensor, and one that has an offset
    passes for a tensor with memory of its own: `copy.deepcopy` and `torch.save` look for its
    bytes and raise (2.13). And whoever pickles or copies a view takes all of its storage along,
    here those of a unit.
    """
    if type(view) is not Tensor:  # simulated, fake or in another tier: there is no storage to cut
        return view
    if view.is_meta:
        return torch.empty_strided(view.shape, view.stride(), dtype=view.dtype, device="meta")
    start, stop = view.storage_offset(), view.storage_offset() + spanned(view)
    own = torch.empty(0, dtype=view.dtype, device=view.device)
    storage = view.untyped_storage()[start * view.itemsize : stop * view.itemsize]
    return own.set_(storage, 0, view.shape, view.stride())


def spanned(tensor: Tensor) -> int:
    """Elements of memory from the first element of a tensor to its last, gaps included."""
    if not tensor.numel():
        return 0
    dims = zip(tensor.shape, tensor.stride(), strict=True)
    return sum((size - 1) * stride for size, stride in dims) + 1


def at_same_address(tensors: Iterable[Tensor]) -> Iterator[tuple[int, int]]:
    """Pairs of numbers of tensors that begin at the same address, the earlier one first.

    Empty tensors are left out.
    """
    first: dict[tuple[torch.device, int], int] = {}
    for number, tensor in enumerate(tensors):
        if tensor.numel():
            earlier = first.setdefault((tensor.device, tensor.data_ptr()), number)
            if earlier != number:
                yield earlier, number


def goes_through_dlpack(like: Tensor, shape: Sequence[int]) -> bool:
    """Whether DLPack, at half the cost, does for views of this shape on such memory what
    `alone` does: it knows the dtype and keeps all strides (some versions set those of dims of
    one element to 1)."""
    return type(like) is Tensor and like.dtype in _IN_DLPACK and all(size > 1 for size in shape)


_IN_DLPACK = frozenset((torch.float16, torch.bfloat16, torch.float32, torch.float64))
_to_dlpack, _from_dlpack = torch._C._to_dlpack, torch._C._from_dlpack


def rested(views: Iterable[tuple[Tensor, bool, DTensorSpec | None]]) -> list[Tensor]:
    """Gradients at rest on views of a buffer, each on a storage of its own:
    `on_spec(alone(view), spec)` on the hot path.

    Each comes with whether it `goes_through_dlpack`, and how it rests on
    the mesh (None: on no axis).
    """
    new = DTensor.__new__
    locals_ = [
        (_from_dlpack(_to_dlpack(view)) if is_quick else alone(view), spec)
        for view, is_quick, spec in views
    ]
    return [
        local if spec is None else new(DTensor, local, spec, requires_grad=False)
        for local, spec in locals_
    ]


def on_spec(local: Tensor, spec: DTensorSpec) -> DTensor:
    """A DTensor whose local tensor is `local`, without a copy."""
    # Not `DTensor(...)`, whose `__init__` does nothing but enter and leave the compiler's
    # frame evaluation: twice the cost.
    return DTensor.__new__(DTensor, local, spec, requires_grad=False)


def detached(tensor: DTensor) -> DTensor:
    """The same elements outside autograd, for a redistribution inside an operation: DTensor would
    detach a tensor that requires gradients in place there, which it does not support in 2.11."""
    return on_spec(local_of(tensor), tensor._spec)


def resting_parameter(
    local: Tensor, spec: DTensorSpec | None, *, requires_grad: bool
) -> nn.Parameter:
    """The parameter to register: a DTensor over `local`;
    if `spec` is None (no mesh axis), `local` itself."""
    if spec is None:
        return nn.Parameter(local, requires_grad=requires_grad)
    # Not `nn.Parameter(...)`, which detaches: DTensor then works out the placements of a
    # detach for every new shape (1 ms).
    parameter: nn.Parameter = on_spec(local, spec)  # type: ignore[assignment]
    # torch takes a tensor of another class with this flag for a parameter.
    parameter._is_param = True
    parameter.requires_grad_(requires_grad)
    return parameter


def cut_alike(whole: Tensor, like: DTensor) -> DTensor:
    """A whole tensor, cut as a resting one is. Communicates nothing."""
    return distribute_tensor(whole.detach(), like.device_mesh, like.placements, src_data_rank=None)


def rest_gradient(parameter: Tensor) -> None:
    """Cuts the gradient of a resting parameter as the parameter is: the gradient of a penalty on a
    row, `p[3].square()`, is whole, and so is a plain one that was assigned.

    Uses a collective of torch if the gradient is in parts that are to be summed.
    """
    grad = parameter.grad
    if not isinstance(parameter, DTensor) or grad is None:
        return
    if type(grad) is Tensor:
        parameter.grad = cut_alike(grad, parameter)
    elif (
        isinstance(grad, DTensor)
        and grad.placements != parameter.placements
        and grad.device_mesh == parameter.device_mesh
    ):
        with torch.no_grad():
            parameter.grad = grad.redistribute(placements=parameter.placements)


def local_of(tensor: Tensor) -> Tensor:
    """The memory of this rank behind a resting parameter or gradient, outside autograd."""
    return tensor._local_tensor if isinstance(tensor, DTensor) else tensor.detach()


def set_local(parameter: nn.Parameter, local: Tensor) -> None:
    """Moves a resting parameter onto other memory; optimizers keep the same parameter object."""
    if isinstance(parameter, DTensor):
        parameter._local_tensor = local
    else:
        parameter.data = local
