"""A tensor in another tier that is moved between ranks raises on every rank if a disk fails on one.

`full_tensor()`, `redistribute()` and operations whose operands must first be moved meet in one function of DTensor, which
reads the local tensor somewhere between padding it and a collective; ranks whose disk is well would wait in that collective
for the one that has raised, up to the deadline of their group. So the tensor is read before, and a byte per rank says how
that went, along the axes that cut the tensor: along others every rank has what it needs, and one may be alone in asking.

[Note: the function] DTensor has no table for this one, as it has for operations. It is replaced in the two modules that call
it, by the first transform that puts parameters or gradients into a tier, and does there what it did before for all other
tensors.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.distributed.tensor import _dispatch, _redistribute
from torch.distributed.tensor._dtensor_spec import DTensorSpec

from zero_fn.runtime.everywhere import done_along
from zero_fn.runtime.tier_tensor import TierTensor, in_memory

__all__ = ["agree_on_redistribution"]

_stock = _redistribute.redistribute_local_tensor


def agree_on_redistribution() -> None:
    """Lets redistributions of tensors in a tier agree over ranks. Does nothing the second time. [Note: the function]"""
    _redistribute.redistribute_local_tensor = _redistributed
    _dispatch.redistribute_local_tensor = _redistributed  # type: ignore[attr-defined]


def _redistributed(local_tensor: Tensor, current_spec: DTensorSpec, target_spec: DTensorSpec, **options: Any) -> Tensor:
    if isinstance(local_tensor, TierTensor) and current_spec.placements != target_spec.placements:
        local_tensor = _read(local_tensor, current_spec)
    return _stock(local_tensor, current_spec, target_spec, **options)


def _read(tensor: TierTensor, spec: DTensorSpec) -> Tensor:
    """Its values in memory.

    Raises:
        StorageError: The disk failed, on this rank or another along the axes that cut the tensor.
    """
    cut = [dim for dim, placement in enumerate(spec.placements) if not placement.is_replicate()]
    return done_along(spec.mesh, cut, lambda: in_memory(tensor), "Reading a tensor to redistribute it")
