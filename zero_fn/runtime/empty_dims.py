"""No dims are all dims: `p.sum(dim=())`, `p.amax(keepdim=True)`, and the backward of `p.norm(torch.inf)` and `p.amax()`.

torch takes an empty list of dims for all of them. DTensor takes it for none (2.13): it raises that an index is out of
range, or gives the sum of this rank's shard for that of the whole, and gradients that are NaN where another rank holds
the largest element. Here, on tensors of the meshes that transforms were given, the dims are written out.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from zero_fn.runtime.dtensor_operations import Around, around, is_ours

__all__ = ["reduce_all_dims"]

_aten = torch.ops.aten
_REDUCTIONS = {
    _aten.sum.dim_IntList: 1,
    _aten.mean.dim: 1,
    _aten.amax.default: 1,
    _aten.amin.default: 1,
    _aten.var.correction: 1,
    _aten.std.correction: 1,
    _aten.nansum.default: 1,
    _aten.var_mean.correction: 1,
    _aten.std_mean.correction: 1,
    _aten.linalg_vector_norm.default: 2,
}
"""Where the dims stand among the arguments."""


def reduce_all_dims() -> None:
    """From now on reductions of tensors of our meshes over no dims are over all. Does nothing the second time."""
    for operation, act in _ACTS.items():
        around(operation, act)


def _with_dims(operation: Any, at: int) -> Around:
    arguments = operation._schema.arguments[: at + 1]

    def act(reduce: Callable[..., object], args: tuple[Any, ...], kwargs: dict[str, Any]) -> object:
        given = [*args, *(argument.default_value for argument in arguments[len(args) :])]
        if given[at] == [] and is_ours(args[0]):
            given[at] = list(range(args[0].ndim))
        return reduce(*given, **kwargs)

    return act


def _smallest_and_largest(compute: Callable[..., object], args: tuple[Any, ...], kwargs: dict[str, Any]) -> object:
    (tensor,) = args
    if kwargs.get("dim") is None and kwargs.get("keepdim") and is_ours(tensor):
        return tuple(reduce(tensor, list(range(tensor.ndim)), True) for reduce in (_aten.amin, _aten.amax))
    return compute(tensor, **kwargs)


_ACTS = {operation: _with_dims(operation, at) for operation, at in _REDUCTIONS.items()}
_ACTS[_aten.aminmax.default] = _smallest_and_largest
