"""The states of a whole parameter, and those of its pieces."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta

from zero_fn.errors import CheckpointError
from zero_fn.resting import local_of, on_spec
from zero_fn.streamed.chunk import Cut, name_of

__all__ = ["join", "pieces_of"]


def pieces_of(states: Mapping[str, Any], parameter: Tensor, cut: Cut) -> Iterator[tuple[str, Any]]:
    """The states of a piece, cut from those of its parameter."""
    local = local_of(parameter)
    for name, value in states.items():
        if not isinstance(value, Tensor):
            yield name, value
            continue
        own = local_of(value)
        if own.shape != local.shape or (name not in cut.fields and own.numel() <= 1):
            if name in cut.fields:
                raise CheckpointError(
                    f"The state {name!r} does not fit its parameter.",
                    parameter=f"{name_of(parameter)}, {list(local.shape)} of it on this rank",
                    state=list(own.shape),
                    fix="load states that were saved with this layout, or through torch.distributed.checkpoint",
                )
            yield name, own.clone()
            continue
        if not cut.piece.is_whole and own.stride() != local.stride():
            own = torch.empty_strided(local.shape, local.stride(), dtype=own.dtype, device=own.device).copy_(own)
        yield name, cut.of(own)


def join(states: dict[str, Any], name: str, value: Any, parameter: Tensor, cut: Cut) -> None:
    """Puts the state of a piece where it belongs in that of its parameter."""
    local = local_of(parameter)
    if not isinstance(value, Tensor):
        states[name] = value
    elif value.shape != cut.shape or (name not in cut.fields and local.numel() <= 1):
        states[name] = value.clone()
    else:
        if name not in states:
            stride = cut.stride if cut.piece.is_whole else local.stride()
            # Where it is stepped: on the host where the states of all parameters may not fit the device.
            whole = torch.empty_strided(local.shape, stride, dtype=value.dtype, device=value.device)
            states[name] = on_spec(whole, _spec(parameter, value.dtype)) if isinstance(parameter, DTensor) else whole
        cut.of(local_of(states[name])).copy_(value)


def _spec(parameter: DTensor, dtype: torch.dtype) -> Any:
    spec = parameter._spec
    if dtype == parameter.dtype:
        return spec
    assert spec.tensor_meta is not None
    return DTensorSpec(
        spec.mesh, spec.placements, tensor_meta=TensorMeta(spec.tensor_meta.shape, spec.tensor_meta.stride, dtype)
    )
