"""Rounding of float32 to bfloat16 that loses nothing:
what is cut off is kept, or decides by chance.

Stochastic rounding goes up with the probability that makes the mean the number itself:

    float32    s eeeeeeee mmmmmmm rrrrrrrrrrrrrrrr      16 random bits are added to the r,
    bfloat16   s eeeeeeee mmmmmmm                       and all r are cut off: m goes up in r of
                                                        65536 cases

The random bits of an element are a hash of its number and of a key. So they are the same wherever
the element is, and in which piece it is rounded. Infinity and NaN stay what they are; the largest
finite numbers may become infinite, as elsewhere.

Source: Gupta et al. 2015, arXiv:1502.02551; of optimizers in bfloat16 Zamirai et al. 2020,
arXiv:2010.06192. The hash is lowbias32, C. Wellons 2018.
"""

from __future__ import annotations

import math
from typing import TypeVar
from zlib import crc32

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from zero_fn.kernels.compiler import call_kernel, has_kernels

__all__ = ["key_of", "round_randomly", "round_to_two", "widen"]

_MASK = 0xFFFFFFFF
_GOLDEN = 0x9E3779B9  # so that step 0 is no fixed point of the hash

Words = TypeVar("Words", int, Tensor)


def mixed(x: Words) -> Words:
    """The hash of 32 bits to 32 bits.

    Of tensors of int64: products wrap, and only their lower halves are of use.
    """
    x = ((x ^ (x >> 16)) * 0x7FEB352D) & _MASK
    x = ((x ^ (x >> 15)) * 0x846CA68B) & _MASK
    return x ^ (x >> 16)


def key_of(seed: int, name: str, step: int) -> int:
    """The key of one step of one parameter."""
    return crc32(f"{seed} {name}".encode()) ^ mixed((step + _GOLDEN) & _MASK)


def round_randomly(
    values: Tensor, into: Tensor, firsts: NDArray[np.int64], counts: NDArray[np.int64], key: int
) -> None:
    """Rounds flat float32 `values` into flat bfloat16 `into`, element by element;
    the numbers of elements come in runs."""
    if not has_kernels(values, into):
        into.copy_(by_torch(values, firsts, counts, key))
        return
    runs = map(torch.from_numpy, (firsts, counts))
    call_kernel("zero_fn_round_randomly", values, into, *runs, len(firsts), key, written=[into])


def widen(halves: Tensor, lost: Tensor | None, into: Tensor) -> None:
    """Writes flat bfloat16 `halves`, and `lost` added to them, into flat float32 `into`."""
    tensors = (halves, into) if lost is None else (halves, lost, into)
    if not has_kernels(*tensors):
        into.copy_(halves)
        if lost is not None:
            into.add_(lost)
        return
    call_kernel("zero_fn_widen", halves, lost, into, into.numel(), written=[into])


def round_to_two(values: Tensor, into: Tensor, lost: Tensor) -> None:
    """Rounds flat float32 `values` to the nearest bfloat16,
    and what that has cut off to another one."""
    if not has_kernels(values, into, lost):
        into.copy_(values).masked_fill_(values.isnan(), math.nan)
        rest = values - into
        lost.copy_(torch.where(rest.isfinite(), rest, 0.0))
        return
    call_kernel("zero_fn_round_to_two", values, into, lost, values.numel(), written=[into, lost])


def by_torch(
    values: Tensor, firsts: NDArray[np.int64], counts: NDArray[np.int64], key: int
) -> Tensor:
    """Stochastic rounding by torch, on any device."""
    device = values.device
    begins, times = (
        torch.from_numpy(each).to(device) for each in (firsts - counts.cumsum() + counts, counts)
    )
    numbers = torch.repeat_interleave(begins, times, output_size=values.numel())
    numbers += torch.arange(values.numel(), device=device)
    noise = mixed((numbers & _MASK) ^ mixed((numbers >> 32) ^ key)) >> 16
    rounded = ((values.view(torch.int32) + noise.to(torch.int32)) & -(1 << 16)).view(torch.float32)
    found = torch.where(values.isfinite(), rounded, values).to(torch.bfloat16)
    # One NaN, where casts of torch make several.
    return found.masked_fill_(values.isnan(), math.nan)
