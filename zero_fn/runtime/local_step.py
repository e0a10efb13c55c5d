"""Elementwise optimizers update resting shards as plain tensors.

A DTensor costs 14 to 200 us of dispatch per parameter and operation, for nothing: an elementwise update of a shard needs only
the shard. So the lists that a torch optimizer collects before its arithmetic (`_init_group`) are filled with the local
tensors of parameters, gradients and states. These are the same memory; `param_groups`, `state` and `state_dict()` keep
DTensors.
"""

from __future__ import annotations

import weakref
from typing import Any

from torch.distributed.tensor import DTensor
from torch.optim import (
    ASGD,
    Adadelta,
    Adagrad,
    Adam,
    Adamax,
    AdamW,
    NAdam,
    Optimizer,
    RAdam,
    RMSprop,
    Rprop,
)

from zero_fn.resting import local_of

__all__ = ["steps_locally"]

# SGD is missing: with momentum it writes its state under the parameters that it finds in the list.
_ELEMENTWISE = frozenset((Adam, AdamW, Adagrad, RMSprop, Adadelta, Adamax, NAdam, RAdam, ASGD, Rprop))


def steps_locally(optimizer: Optimizer) -> None:
    """From now on this optimizer steps on local tensors, if it is one of torch's elementwise ones. May be called again."""
    if type(optimizer) in _ELEMENTWISE and "_init_group" not in optimizer.__dict__:
        optimizer.__dict__["_init_group"] = _LocalGroups(optimizer)


class _LocalGroups:
    """Stands for `_init_group` of one optimizer."""

    __slots__ = ("_optimizer",)

    def __init__(self, optimizer: Any) -> None:
        self._optimizer = weakref.ref(optimizer)  # which holds this: without a cycle it is freed at once

    def __call__(self, group: dict[str, Any], parameters: list[Any], *lists: list[Any]) -> Any:
        optimizer: Any = self._optimizer()
        found = type(optimizer)._init_group(optimizer, group, parameters, *lists)
        rows = [parameters, *(tensors for tensors in lists if len(tensors) == len(parameters))]
        if not group["differentiable"] and all(map(_alike, zip(*rows, strict=True))):
            for tensors in rows:
                tensors[:] = [local_of(t) if isinstance(t, DTensor) else t for t in tensors]
        return found


def _alike(tensors: tuple[Any, ...]) -> bool:
    """Whether all that belongs to one parameter is cut as the parameter is."""
    parameter = tensors[0]
    if not isinstance(parameter, DTensor):
        return not any(isinstance(t, DTensor) for t in tensors)
    spec = parameter._spec
    return all(
        t._spec is spec or (t._spec.placements == spec.placements and t._spec.mesh is spec.mesh)
        for t in tensors
        if isinstance(t, DTensor)
    )
