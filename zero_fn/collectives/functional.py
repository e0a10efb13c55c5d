"""Collectives as operations that a compiler can trace: they return new tensors, and may be moved, left out or run twice.

They are torch's functional collectives, for graphs that hold whole steps (`torch.compile(model, fullgraph=True)`). Sums are
made as the transport of the backend makes them: in the order of the ranks on gloo, by the backend elsewhere, so that a
compiled module gives what it gives uncompiled. The bytes are the same too; `traffic` does not see them, because a graph runs
no line of this package.

One tensor a call: of a grouped collective the compiler drops the waits for results that nobody reads, and torch then keeps
their works for ever (2.13).
"""

from __future__ import annotations

import torch
from torch import Tensor

from zero_fn.mesh import Axis

__all__ = ["all_gathered", "reduce_scattered"]


def all_gathered(piece: Tensor, axis: Axis) -> Tensor:
    """The pieces of all ranks back to back: flat, `n * numel` elements from `numel`, which is the same on every rank."""
    if axis.size == 1:
        return piece
    ops = torch.ops._c10d_functional
    sent = piece.view(torch.uint8) if _is_gloo(axis) else piece
    whole: Tensor = ops.wait_tensor(ops.all_gather_into_tensor(sent, axis.size, axis.group.group_name))
    return whole.view(piece.dtype)


def reduce_scattered(addend: Tensor, sum_dtype: torch.dtype, axis: Axis) -> Tensor:
    """The mean over ranks of this rank's piece: flat, `numel` elements from `n` pieces back to back.

    Args:
        addend: This rank's addend. It travels in its own dtype.
        sum_dtype: Dtype of the sum and of the result.
        axis: The ranks.
    """
    n = axis.size
    if n == 1:
        return addend.to(sum_dtype)
    ops, group = torch.ops._c10d_functional, axis.group.group_name
    if not _is_gloo(axis):
        mine: Tensor = ops.wait_tensor(ops.reduce_scatter_tensor(addend.to(sum_dtype), "sum", n, group))
        return mine / n
    sent = addend.view(torch.uint8)
    nbytes = [sent.numel() // n] * n
    received: Tensor = ops.wait_tensor(ops.all_to_all_single(sent, nbytes, nbytes, group))
    parts = received.view(addend.dtype).view(n, -1).to(sum_dtype).unbind()
    total = parts[0]
    for part in parts[1:]:
        total = total + part
    return total / n


def _is_gloo(axis: Axis) -> bool:
    """There tensors travel as bytes, because it knows few dtypes, and sums are made here."""
    return axis.backend == "gloo"
