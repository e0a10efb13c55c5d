"""Named compositions of transforms, for those who think in stages."""

from __future__ import annotations

from typing import Any, TypeVar

from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from zero_fn.transforms.shard import shard_grads, shard_optimizer, shard_params

__all__ = ["zero1", "zero2", "zero3"]

M = TypeVar("M", bound=nn.Module)


def zero1(module: M, mesh: DeviceMesh, **options: Any) -> M:
    """ZeRO stage 1: `shard_optimizer`. Options, errors and result are those of that transform."""
    return shard_optimizer(module, mesh, **options)


def zero2(module: M, mesh: DeviceMesh, **options: Any) -> M:
    """ZeRO stage 2: `shard_grads` of `shard_optimizer`. Options, errors and result are those of `shard_grads`."""
    return shard_grads(module, mesh, **options)


def zero3(module: M, mesh: DeviceMesh, **options: Any) -> M:
    """ZeRO stage 3: `shard_params` of `shard_grads` of `shard_optimizer`. Options, errors and result are those of
    `shard_params`."""
    return shard_params(module, mesh, **options)
