"""What `clip_grad_norm_` does to gradients in another tier raises on every rank if a disk fails on one.

The norm is reduced over ranks by collectives of torch, in which ranks whose disk is well would wait for the one that has
raised, up to the deadline of their group; and after gradients were scaled on some ranks only, no step may follow. So both
operations end with a byte per rank, where any of their tensors rests in a tier. They are installed by the first transform
that puts gradients there.

Other reads of such tensors have no such place. `full_tensor()` and `redistribute()` read inside a collective of torch, which
only its own deadline ends; operations on single tensors need not be called on every rank, so no rank can wait there.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cache
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

from zero_fn.errors import StorageError
from zero_fn.resting import local_of
from zero_fn.runtime.dtensor_operations import around
from zero_fn.runtime.everywhere import tell
from zero_fn.runtime.tier_tensor import TierTensor
from zero_fn.runtime.unit import Unit

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
    for operation, what in _OPERATIONS.items():
        around(operation, _told(what))


@cache  # the same function for the same words: `around` takes each once
def _told(what: str) -> Callable[..., object]:
    def act(operation: Callable[..., object], args: tuple[Any, ...], kwargs: dict[str, Any]) -> object:
        unit = next(_owners(args[0]), None)
        if unit is None:
            return operation(*args, **kwargs)
        failure: StorageError | None = None
        result: object = None
        try:
            result = operation(*args, **kwargs)
        except StorageError as error:
            failure = error
        found = tell(unit.transport, unit.step.assignment.axes, failure, what).failure(failure)
        if found is not None:
            raise found
        return result

    return act


def _owners(tensors: object) -> Iterator[Unit]:
    """The units of those of the tensors that rest in a tier."""
    for tensor in tree_leaves(tensors):
        local = local_of(tensor) if isinstance(tensor, torch.Tensor) else None
        owner = local.record.owner() if isinstance(local, TierTensor) else None
        if owner is not None:
            yield owner
