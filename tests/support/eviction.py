"""Evictions on the CPU, as if the model were on an accelerator: to host memory that is not that of the model."""

from __future__ import annotations

from unittest.mock import patch

from torch import Tensor, nn
from torch.optim import Optimizer

import zero_fn as zf
from zero_fn.resting import local_of
from zero_fn.runtime.tier_tensor import TierTensor
from zero_fn.values.tiers import Cpu

__all__ = ["evicted"]


def _leaves(tensor: Tensor) -> bool:
    local = local_of(tensor)
    return not local.is_meta and not isinstance(local, TierTensor)


def evicted(module: nn.Module, optimizer: Optimizer | None = None, to: Cpu | None = None) -> zf.Evicted:
    """`zf.evict` of a model whose memory is not that of the host."""
    with patch("zero_fn.transforms.evict._leaves", _leaves):
        return zf.evict(module, optimizer, to=zf.cpu() if to is None else to)
