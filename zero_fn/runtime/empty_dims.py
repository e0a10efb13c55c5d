"""No dims are all dims: `p.sum(dim=())`, `p.amax(keepdim=True)`, and the backward of `p.norm(torch.inf)` and `p.amax()`.

torch takes an empty list of dims for all of them. DTensor takes it for none (2.13): it raises that an index is out of
range, or gives the sum of this rank's shard for that of the whole, and gradients that are NaN where another rank holds
the largest element. Here, on tensors of the meshes that transforms were given, the dims are written out.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch

from zero_fn.runtime.dtensor_operations import Otherwise, around, is_ours

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
    around(_reduced, *_REDUCTIONS)
    around(_smallest_and_largest, _aten.aminmax.default)


def _reduced(reduce: Otherwise, args: tuple[Any, ...], kwargs: dict[str, Any]) -> object:
    at, defaults = _dims_and_defaults(reduce.operation)
    given = [*args, *defaults[len(args) :]]
    if given[at] == [] and is_ours(args[0]):
        given[at] = list(range(args[0].ndim))
    return reduce(*given, **kwargs)


@cache  # reading a schema takes longer than the rest
def _dims_and_defaults(operation: Any) -> tuple[int, tuple[Any, ...]]:
    """Where the dims stand, and the defaults of the arguments up to there."""
    at = _REDUCTIONS[operation]
    return at, tuple(argument.default_value for argument in operation._schema.arguments[: at + 1])


def _smallest_and_largest(compute: Otherwise, args: tuple[Any, ...], kwargs: dict[str, Any]) -> object:
    (tensor,) = args
    if kwargs.get("dim") is None and kwargs.get("keepdim") and is_ours(tensor):
        return tuple(reduce(tensor, list(range(tensor.ndim)), True) for reduce in (_aten.amin, _aten.amax))
    return compute(tensor, **kwargs)
