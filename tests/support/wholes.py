"""Whole values of many tensors in one exchange: a collective for each of them is what tests on real ranks would wait for."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple, overload

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor, Shard

from tests.support.reference import mean_in_rank_order

__all__ = ["Held", "from_all", "full", "fulls", "held", "means", "named_fulls", "wholes"]


class Held(NamedTuple):
    """What a rank holds of a tensor now: a copy.

    Attributes:
        values: The local values; None if there is no tensor.
        dim: The dim in which ranks have different parts; None if each has the whole, which may differ.
    """

    values: Tensor | None
    dim: int | None


def held(tensor: Tensor | None) -> Held:
    """A copy of what this rank holds, on the host."""
    if tensor is None:
        return Held(None, None)
    if not isinstance(tensor, DTensor):
        return Held(tensor.detach().clone().cpu(), None)
    (placement,) = tensor.placements
    with torch.no_grad():  # `detach` of a DTensor costs more than all the rest
        if placement.is_partial():
            return Held(tensor.full_tensor().clone().cpu(), None)
        return Held(tensor.to_local().clone().cpu(), placement.dim if isinstance(placement, Shard) else None)


def from_all(tensors: Sequence[Tensor | None]) -> list[list[Tensor | None]]:
    """The tensors of all ranks, by rank. All ranks call it; one exchange, of bytes: torch's own pickles cost much more."""
    packed = [
        None
        if t is None
        else (t.dtype, tuple(t.shape), bytes(t.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()))
        for t in tensors
    ]
    rows: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(rows, packed)
    return [[None if one is None else _unpacked(*one) for one in row] for row in rows]


def _unpacked(dtype: torch.dtype, shape: tuple[int, ...], values: bytes) -> Tensor:
    if not values:
        return torch.empty(shape, dtype=dtype)
    return torch.frombuffer(bytearray(values), dtype=torch.uint8).view(dtype).reshape(shape)


def wholes(parts: Sequence[Held]) -> list[Tensor | None]:
    """The whole of each tensor. All ranks call it; one exchange, of the parts that differ."""
    rows = (
        from_all([part.values for part in parts if part.dim is not None])
        if any(p.dim is not None for p in parts)
        else []
    )
    columns = iter(zip(*rows, strict=True))
    return [part.values if part.dim is None else torch.cat(next(columns), part.dim) for part in parts]


def fulls(tensors: Iterable[Tensor]) -> list[Tensor]:
    """Copies of whole tensors. All ranks call it; one exchange."""
    return [values for values in wholes([held(tensor) for tensor in tensors]) if values is not None]


def named_fulls(named: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The same by name: of `dict(model.named_parameters())`, of `model.state_dict()`."""
    return dict(zip(named, fulls(named.values()), strict=True))


@overload
def full(tensor: Tensor) -> Tensor: ...
@overload
def full(tensor: None) -> None: ...
def full(tensor: Tensor | None) -> Tensor | None:
    """A copy of the whole of one tensor, on any mesh. All ranks call it."""
    if isinstance(tensor, DTensor):
        return tensor.detach().full_tensor().clone()
    return None if tensor is None else tensor.detach().clone()


def means(grads: Sequence[Tensor | None], like: Sequence[Tensor]) -> list[Tensor | None]:
    """The mean over ranks of each gradient, added in the order of the ranks; a rank without one counts as zeros.

    Args:
        grads: Of this rank.
        like: The parameters: results have their strides, as autograd keeps them. None if no rank has a gradient.
    """
    found: list[Tensor | None] = []
    for column, parameter in zip(zip(*from_all(grads), strict=True), like, strict=True):
        present = [grad for grad in column if grad is not None]
        if not present:
            found.append(None)
            continue
        addends = [torch.zeros_like(present[0]) if grad is None else grad for grad in column]
        mean = mean_in_rank_order(addends, present[0].dtype)
        found.append(torch.empty_like(parameter, dtype=mean.dtype).copy_(mean))
    return found
