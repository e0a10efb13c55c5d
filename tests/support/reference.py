"""The oracle: each collective as its one-line einops pattern, over the tensors of all ranks.

shard            "(n rows) ... -> n rows ...", then row `rank`
all-gather       "n rows ... -> (n rows) ..."
reduce-scatter   "src (n rows) ... -> n rows ...", mean over src, then row `rank`
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import reduce as fold

import einops
import torch
from torch import Tensor

__all__ = ["all_gather", "any_of", "exchange", "mean_in_rank_order", "padded", "reduce_scatter", "shard"]


def shard(whole: Tensor, rank: int, n: int) -> Tensor:
    """The rows of `rank` of a tensor whose rows divide by `n`."""
    return einops.rearrange(whole, "(n rows) ... -> n rows ...", n=n)[rank]


def all_gather(shards: Sequence[Tensor]) -> Tensor:
    """The whole of equal shards."""
    return einops.rearrange(list(shards), "n rows ... -> (n rows) ...")


def reduce_scatter(addends: Sequence[Tensor], rank: int) -> Tensor:
    """The rows of `rank` of the mean of addends whose rows divide by their number."""
    n = len(addends)
    return einops.reduce(torch.stack(list(addends)), "src (n rows) ... -> n rows ...", "sum", n=n)[rank] / n


def exchange(messages: Sequence[Tensor]) -> Tensor:
    """The messages of all ranks, one row each."""
    return einops.rearrange(list(messages), "src bytes -> src bytes")


def any_of(bits: Sequence[Tensor]) -> Tensor:
    """Which bits any rank has."""
    return einops.reduce(torch.stack(list(bits)), "src bits -> bits", "max")


def mean_in_rank_order(addends: Sequence[Tensor], dtype: torch.dtype) -> Tensor:
    """The mean whose rounding is fixed: added in the order of the ranks in `dtype`, then divided."""
    return fold(torch.add, (addend.to(dtype) for addend in addends)) / len(addends)


def padded(whole: Tensor, numel: int) -> Tensor:
    """A flat tensor with zeros appended up to `numel` elements."""
    return torch.cat([whole, whole.new_zeros(numel - whole.numel())])
