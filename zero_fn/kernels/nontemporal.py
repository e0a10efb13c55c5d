"""Copies and means whose results this core does not read soon. They are written past the caches, by non-temporal stores.

A normal store reads the line of the cache first, so a copy moves three bytes over the memory bus for each byte of its result;
a non-temporal store moves two. Collectives write megabytes, which a peer reads, or a unit's computation after the rest of the
unit has come: by then the bytes would have left the cache anyway. And a mean takes one pass over its parts, where torch takes
one for each part and one to divide.

On one core of a Xeon with AVX-512, pieces of 2 MB out of 50: copies 10.3 GB/s in place of 5.8, means of two 5.3 in place of
2.6, of four 3.4 in place of 1.5 (bytes of the result).

Without a compiler torch computes the same, to the bit. So it does on other devices, and if it has several threads, which then
share the work (ranks that share a host have one thread each: torchrun sets `OMP_NUM_THREADS=1`).
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterable, Sequence
from functools import cache

import torch
from torch import Tensor

from zero_fn.kernels.compiler import library
from zero_fn.kernels.written import was_written

__all__ = ["copy", "mean"]

_LEAST_NBYTES = 1 << 16
"""Smaller results are written through the cache. Training was as fast with 16 KiB, and slower from 256 KiB on."""

_DTYPES_IN_C = (torch.float32, torch.bfloat16)


def copy(into: Sequence[Tensor], sources: Sequence[Tensor]) -> None:
    """Copies each source into the tensor of the same number, as `torch._foreach_copy_` does."""
    small: tuple[list[Tensor], list[Tensor]] = ([], [])
    for place, source in zip(into, sources, strict=True):
        functions = _functions_for(place, (source,))
        if functions is not None and source.dtype == place.dtype and source.shape == place.shape:
            _copy_in_c(functions, place, source)
        else:
            small[0].append(place)
            small[1].append(source)
    if len(small[0]) == 1:
        small[0][0].copy_(small[1][0])
    elif small[0]:
        torch._foreach_copy_(*small)


def mean(into: Tensor, parts: Sequence[Tensor], sum_dtype: torch.dtype) -> None:
    """Adds up two or more parts in their order and writes the mean into `into`, which may be one of them. The parts have its
    shape, and any strides and dtypes. The sum, and the mean until it is rounded to the dtype of `into`, have `sum_dtype`."""
    dtype = parts[0].dtype
    functions = _functions_for(into, parts)
    if (
        functions is not None
        and sum_dtype == torch.float32
        and into.dtype in _DTYPES_IN_C
        and dtype in _DTYPES_IN_C
        and all(part.dtype == dtype for part in parts)
    ):
        _mean_in_c(functions, into, parts)
    elif into.dtype == sum_dtype:
        _mean_by_torch(into, parts)
    else:
        total = torch.empty_like(into, dtype=sum_dtype)
        _mean_by_torch(total, parts)
        into.copy_(total)


def _functions_for(into: Tensor, sources: Iterable[Tensor]) -> ctypes.CDLL | None:
    """The kernels, if these tensors are large enough and lie in memory as the kernels need it; else None."""
    if (
        into.numel() * into.element_size() < _LEAST_NBYTES
        or not _lies_flat(into)
        or not all(_lies_flat(source) for source in sources)
        or torch.get_num_threads() != 1
    ):
        return None
    return library().functions


def _lies_flat(tensor: Tensor) -> bool:
    """Whether the bytes in memory are the elements in order, not to be conjugated or negated when they are read."""
    is_real_memory = type(tensor) is Tensor and tensor.is_cpu  # not a simulated tensor
    return is_real_memory and tensor.is_contiguous() and not tensor.is_conj() and not tensor.is_neg()


def _copy_in_c(functions: ctypes.CDLL, into: Tensor, source: Tensor) -> None:
    functions.zero_fn_copy(
        ctypes.c_void_p(into.data_ptr()),
        ctypes.c_void_p(source.data_ptr()),
        ctypes.c_int64(into.numel() * into.element_size()),
    )
    was_written(into)


def _mean_in_c(functions: ctypes.CDLL, into: Tensor, parts: Sequence[Tensor]) -> None:
    functions.zero_fn_mean(
        ctypes.c_void_p(into.data_ptr()),
        _addresses(len(parts))(*[part.data_ptr() for part in parts]),
        ctypes.c_int64(len(parts)),
        ctypes.c_int32(parts[0].dtype == torch.bfloat16),
        ctypes.c_int32(into.dtype == torch.bfloat16),
        ctypes.c_int64(into.numel()),
    )
    was_written(into)


@cache  # Python would make the type anew for each call
def _addresses(count: int) -> type[ctypes.Array[ctypes.c_void_p]]:
    return ctypes.c_void_p * count


def _mean_by_torch(into: Tensor, parts: Sequence[Tensor]) -> None:
    at = next((number for number, part in enumerate(parts) if part.data_ptr() == into.data_ptr()), 0)
    # The parts before `into` are added up first and then to it: the same bits, for addition commutes.
    before = [sum(parts[1:at], parts[0].to(into.dtype))] if at else []
    first, *others = parts[at], *before, *parts[at + 1 :]
    if first.data_ptr() != into.data_ptr():
        if first.dtype == into.dtype:
            torch.add(first, others.pop(0), out=into)
        else:
            into.copy_(first)
    for other in others:
        into.add_(other)
    into.div_(len(parts))
