"""Random numbers of a tensor that rests in shards are those of the whole tensor, on the CPU.

Where a generator has an offset, as on CUDA, DTensor lets each shard draw from a range of its own. On the CPU it warns and
draws every shard from the state that all ranks share (2.13): a weight that `nn.init` fills after a transform then has the
same rows on each rank, and noise from `torch.randn_like` repeats itself. Here each rank draws the whole tensor and keeps its
part, so the numbers, and the state of the generator afterwards, are those of the module that was not transformed. The whole
tensor is in memory for that moment, and nothing is communicated. Installed by the first transform.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from zero_fn.resting import local_of, part_of, spec_on
from zero_fn.runtime.dtensor_operations import Otherwise, around

__all__ = ["draw_shards_from_wholes"]

_aten = torch.ops.aten
_IN_PLACE = (
    _aten.normal_.default,
    _aten.uniform_.default,
    _aten.bernoulli_.float,
    _aten.exponential_.default,
    _aten.log_normal_.default,
    _aten.cauchy_.default,
    _aten.geometric_.default,
    _aten.random_.default,
    _aten.random_.to,
    getattr(_aten.random_, "from"),
)
_ALIKE = (
    _aten.rand_like.default,
    _aten.randn_like.default,
    _aten.randint_like.default,
    _aten.randint_like.low_dtype,
)


def draw_shards_from_wholes() -> None:
    """Lets random numbers of shards be those of whole tensors. Does nothing the second time."""
    around(_filled, *_IN_PLACE)
    around(_made_alike, *_ALIKE)
    around(_decided, _aten.bernoulli.default)


def _filled(draw: Otherwise, args: tuple[Any, ...], kwargs: dict[str, Any]) -> object:
    tensor, *others = args
    if not _is_on_cpu(tensor):
        return draw(*args, **kwargs)
    whole = _whole_of(tensor)
    draw(whole, *others, **kwargs)
    local_of(tensor).copy_(part_of(whole, tensor))
    return tensor


def _made_alike(draw: Otherwise, args: tuple[Any, ...], kwargs: dict[str, Any]) -> object:
    tensor, *others = args
    if not _is_on_cpu(tensor):
        return draw(*args, **kwargs)
    return _part_of(draw(_whole_of(tensor), *others, **kwargs), tensor)


def _decided(draw: Otherwise, args: tuple[Any, ...], kwargs: dict[str, Any]) -> object:
    probabilities, *others = args
    if not _is_on_cpu(probabilities):
        return draw(*args, **kwargs)
    whole = _whole_of(probabilities).zero_()  # elsewhere any: each element takes as much from the generator
    part_of(whole, probabilities).copy_(local_of(probabilities))
    return _part_of(draw(whole, *others, **kwargs), probabilities)


def _part_of(whole: Tensor, tensor: DTensor) -> DTensor:
    """What this rank keeps of a new whole tensor, placed as another one."""
    own = part_of(whole, tensor).clone(memory_format=torch.preserve_format)
    return DTensor(own, spec_on(tensor._spec, whole.shape, whole.stride(), whole.dtype), requires_grad=False)  # type: ignore[no-untyped-call]


def _is_on_cpu(tensor: Tensor) -> bool:
    """Whether it is a DTensor with values of its own, no parts of a sum, in the memory of the CPU."""
    if not isinstance(tensor, DTensor) or any(placement.is_partial() for placement in tensor.placements):
        return False
    return bool(tensor.device_mesh.device_type == "cpu")


def _whole_of(tensor: DTensor) -> Tensor:
    """Room for the whole tensor, in the order of memory it has without a transform: that is the order of drawing."""
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype)
