"""For the examples of several axes: their mesh on the CPU, under `zf.launch` and under torchrun."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from math import prod
from typing import TypeVar

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

import zero_fn as zf

__all__ = ["mesh_of", "on_ranks"]

R = TypeVar("R")


@contextmanager
def mesh_of(**sizes: int) -> Iterator[DeviceMesh]:
    """The mesh with these axes: of the ranks of `zf.launch`, which has joined them already, or of torchrun, joined here."""
    is_launched = dist.is_initialized()
    if not is_launched:
        dist.init_process_group("gloo")
    torch.set_num_threads(1)
    try:
        yield init_device_mesh("cpu", tuple(sizes.values()), mesh_dim_names=tuple(sizes))
    finally:
        if not is_launched:
            dist.destroy_process_group()


def on_ranks(sizes: dict[str, int], fn: Callable[..., R], *args: object) -> R | None:
    """What rank 0 of such a mesh returns from `fn(*args)`; None on the other ranks of torchrun."""
    if "RANK" in os.environ:
        value = fn(*args)
        return value if os.environ["RANK"] == "0" else None
    values: list[R] = zf.launch(fn, prod(sizes.values()), *args)
    return values[0]
