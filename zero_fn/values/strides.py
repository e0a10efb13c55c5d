"""How the elements of a tensor lie in memory."""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["as_flat", "dense_stride", "flat_in", "in_strides", "is_dense"]


def dense_stride(tensor: Tensor) -> tuple[int, ...]:
    """The strides of a tensor if it is dense; else those of its shape row by row."""
    if is_dense(tensor):
        return tensor.stride()
    return torch.empty(tensor.shape, device="meta").stride()


def as_flat(tensor: Tensor) -> Tensor:
    """The elements of a dense tensor in the order of memory, as a view."""
    return tensor.as_strided((tensor.numel(),), (1,))


def in_strides(tensor: Tensor, stride: tuple[int, ...]) -> Tensor:
    """A tensor with these strides: itself, or a copy if it lies otherwise."""
    if tensor.stride() == stride:
        return tensor
    own = torch.empty_strided(tensor.shape, stride, dtype=tensor.dtype, device=tensor.device)
    return own.copy_(tensor)


def flat_in(tensor: Tensor, stride: tuple[int, ...]) -> Tensor:
    """The elements in the order of these strides, which leave no gaps: a view,
    or a copy of a tensor that lies otherwise."""
    return as_flat(in_strides(tensor, stride))


def is_dense(tensor: Tensor) -> bool:
    """Whether the elements of a tensor are one range of memory without gaps or overlaps."""
    if tensor.is_contiguous():
        return True
    expected = 1
    dims = zip(tensor.stride(), tensor.shape, strict=True)
    for stride, size in sorted((s, n) for s, n in dims if n != 1):
        if stride != expected:
            return False
        expected *= size
    return expected == tensor.numel()
