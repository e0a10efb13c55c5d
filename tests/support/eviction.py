"""Evictions on the CPU, as if the model were on an accelerator: to host memory that is not that of the model."""

from __future__ import annotations

import importlib
from contextvars import ContextVar

from torch import Tensor, nn
from torch.optim import Optimizer

import zero_fn as zf
from zero_fn.tiers.tier_tensor import TierTensor
from zero_fn.values.dtensors import local_of
from zero_fn.values.tiers import Cpu

__all__ = ["evicted"]

_is_pretended: ContextVar[bool] = ContextVar(
    "_is_pretended", default=False
)  # of this thread: simulated ranks are threads
_module = importlib.import_module("zero_fn.transforms.offloaded_states")
_of_the_package = _module._leaves


def _leaves(tensor: Tensor) -> bool:
    local = local_of(tensor)
    return not local.is_meta and not isinstance(local, TierTensor) if _is_pretended.get() else _of_the_package(tensor)


# Once, and not around each call: two threads that both put back what they found there leave one of them behind.
_module._leaves = _leaves  # type: ignore[attr-defined]


def evicted(module: nn.Module, optimizer: Optimizer | None = None, to: Cpu | None = None) -> zf.Evicted:
    """`zf.offload_states` of a model whose memory is not that of the host."""
    token = _is_pretended.set(True)
    try:
        return zf.offload_states(module, optimizer, to=zf.cpu() if to is None else to)
    finally:
        _is_pretended.reset(token)
