"""Copies and means whose results this core does not read soon.

They are written past the caches, by non-temporal stores.

A normal store reads the line of the cache first, so a copy moves three bytes over the memory bus
for each byte of its result; a non-temporal store moves two. Collectives write megabytes, which a
peer reads, or a unit's computation after the rest of the unit has come: by then the bytes would
have left the cache anyway. And a mean takes one pass over its parts, where torch takes one for each
part and one to divide.

On one core of a Xeon with AVX-512, pieces of 2 MB out of 50: copies 10.3 GB/s in place of 5.8,
means of two 5.3 in place of 2.6, of four 3.4 in place of 1.5 (bytes of the result).

Without a compiler torch computes the same, to the bit. So it does on other devices, and if it has
several threads, which then share the work (ranks that share a host have one thread each: torchrun
sets `OMP_NUM_THREADS=1`).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from zero_fn.kernels.compiler import call_kernel, has_kernels

__all__ = ["copy", "mean"]

_LEAST_NBYTES = 1 << 16
"""Smaller results are written through the cache.

Training was as fast with 16 KiB, and slower from 256 KiB on.
"""

_DTYPES_IN_C = (torch.float32, torch.bfloat16)


def copy(into: Sequence[Tensor], sources: Sequence[Tensor]) -> None:
    """Copies each source into the tensor of the same number, as `torch._foreach_copy_` does."""
    small: tuple[list[Tensor], list[Tensor]] = ([], [])
    for place, source in zip(into, sources, strict=True):
        if (
            _is_for_kernels(place, source)
            and source.dtype == place.dtype
            and source.shape == place.shape
        ):
            _copy_in_c(place, source)
        else:
            small[0].append(place)
            small[1].append(source)
    if len(small[0]) == 1:
        small[0][0].copy_(small[1][0])
    elif small[0]:
        torch._foreach_copy_(*small)


def mean(into: Tensor, parts: Sequence[Tensor], sum_dtype: torch.dtype) -> None:
    """Adds up two or more parts in their order and writes the mean into `into`,
    which may be one of them.

    The parts have its shape, and any strides and dtypes. The sum, and the mean until it is rounded
    to the dtype of `into`, have `sum_dtype`.
    """
    dtype = parts[0].dtype
    if (
        _is_for_kernels(into, *parts)
        and sum_dtype == torch.float32
        and into.dtype in _DTYPES_IN_C
        and dtype in _DTYPES_IN_C
        and all(part.dtype == dtype for part in parts)
    ):
        _mean_in_c(into, parts)
    elif into.dtype == sum_dtype:
        _mean_by_torch(into, parts)
    else:
        total = torch.empty_like(into, dtype=sum_dtype)
        _mean_by_torch(total, parts)
        into.copy_(total)


def _is_for_kernels(*tensors: Tensor) -> bool:
    """Whether the first of these tensors is large enough, and all lie in memory as the
    kernels need it: their bytes are the elements in order, not to be conjugated or negated
    when they are read."""
    return (
        tensors[0].nbytes >= _LEAST_NBYTES
        and has_kernels(*tensors)
        and all(
            each.is_contiguous() and not each.is_conj() and not each.is_neg() for each in tensors
        )
        and torch.get_num_threads() == 1
    )


def _copy_in_c(into: Tensor, source: Tensor) -> None:
    call_kernel("zero_fn_copy", into, source, into.nbytes, written=[into])


def _mean_in_c(into: Tensor, parts: Sequence[Tensor]) -> None:
    are_bfloat16 = [each.dtype == torch.bfloat16 for each in (parts[0], into)]
    call_kernel(
        "zero_fn_mean", into, list(parts), len(parts), *are_bfloat16, into.numel(), written=[into]
    )


def _mean_by_torch(into: Tensor, parts: Sequence[Tensor]) -> None:
    at = next(
        (number for number, part in enumerate(parts) if part.data_ptr() == into.data_ptr()), 0
    )
    # The parts before `into` are added up first and then to it:
    # the same bits, for addition commutes.
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
