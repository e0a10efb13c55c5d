"""Operations in place that look at a whole tensor: `p[rows] = 0`, `p.grad.masked_fill_(mask, 0)`, `p.copy_(values)`.

DTensor has no rules for most of them, and refuses plain tensors beside its own (2.13). Here, on tensors of the meshes that
transforms were given, each rank does them on the whole tensor, and keeps its part. Plain tensors among the operands are
compared over ranks: had each its own rows or mask, each shard would be edited in another way.
"""

from __future__ import annotations

from hashlib import blake2b
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_leaves, tree_map

from zero_fn.errors import PlacementError
from zero_fn.resting import detached, local_of, part_of
from zero_fn.runtime.dtensor_operations import Otherwise, around
from zero_fn.runtime.everywhere import same_along
from zero_fn.runtime.whole_views import is_editable

__all__ = ["edit_wholes"]

_aten = torch.ops.aten
_BY_INDEX = (
    _aten.index_put_.default,
    _aten.index_fill_.int_Scalar,
    _aten.index_fill_.int_Tensor,
    _aten.index_copy_.default,
    _aten.index_add_.default,
    _aten.masked_fill_.Scalar,
    _aten.masked_fill_.Tensor,
    _aten.scatter_.value,
    _aten.scatter_.src,
    _aten.scatter_add_.default,
)
_BY_FORM = (_aten.tril_.default, _aten.triu_.default, _aten.renorm_.default)


def edit_wholes() -> None:
    """From now on such operations work on tensors of our meshes. Does nothing the second time."""
    around(_edited, *_BY_INDEX, *_BY_FORM)
    around(_copied, _aten.copy_.default)
    around(_transposed, _aten.t_.default)


def _edited(edit: Otherwise, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    tensor, *others = args
    if not is_editable(tensor):
        return edit(*args, **kwargs)
    _require_same(tensor, (others, kwargs), edit.operation)
    with torch.no_grad():
        whole = detached(tensor).full_tensor()
        given, named = tree_map(
            lambda leaf: detached(leaf).full_tensor() if isinstance(leaf, DTensor) else leaf, (others, kwargs)
        )
        edit.operation(whole, *given, **named)
        local_of(tensor).copy_(part_of(whole, tensor))
    return tensor


def _copied(copy: Otherwise, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    tensor, values, *_ = args
    if isinstance(values, DTensor) or not is_editable(tensor):
        return copy(*args, **kwargs)
    _require_same(tensor, values, _aten.copy_.default)
    local_of(tensor).copy_(part_of(values.expand(tensor.shape), tensor))
    return tensor


def _transposed(transpose: Otherwise, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    (tensor,) = args
    if is_editable(tensor):
        raise PlacementError(
            "A tensor in shards cannot be transposed in place.",
            tensor=list(tensor.shape),
            why="nn.init.orthogonal_ does that to a matrix with more columns than rows",
            fix="initialise before the transform, or inside `with zf.unsharded(model, writeback=True):`",
        )
    return transpose(*args, **kwargs)


def _require_same(tensor: DTensor, operands: Any, operation: Any) -> None:
    """Compares the plain tensors among the operands over ranks.

    Communicates 16 bytes to each peer along each axis of the mesh, and waits.

    Raises:
        DisagreementError: A plain tensor among the operands differs between ranks, or a rank does something else.
    """
    rows = [
        f"{str(leaf.dtype).removeprefix('torch.')}{list(leaf.shape)}, content {_content(leaf)}"
        for leaf in tree_leaves(operands)
        if isinstance(leaf, Tensor) and not isinstance(leaf, DTensor)
    ]
    name = operation._schema.name.removeprefix("aten::")
    same_along(tensor.device_mesh, rows, f"operands of {name}", fix="give every rank the same indices, mask and values")


def _content(tensor: Tensor) -> str:
    plain = tensor.detach().cpu().contiguous()
    return blake2b(plain.flatten().view(torch.uint8).numpy().data, digest_size=8).hexdigest()
