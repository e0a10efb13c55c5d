"""The oracle of reductions."""

from __future__ import annotations

from collections.abc import Sequence
from functools import reduce as fold

import torch
from torch import Tensor

__all__ = ["mean_in_rank_order"]


def mean_in_rank_order(addends: Sequence[Tensor], dtype: torch.dtype) -> Tensor:
    """The mean whose rounding is fixed: added in the order of the ranks in `dtype`, then divided."""
    return fold(torch.add, (addend.to(dtype) for addend in addends)) / len(addends)
