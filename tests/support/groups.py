"""Process groups inside the process of the tests: one real rank, or many that are only pretended.

with alone() as axis:            # one gloo rank: everything runs, nothing moves
with pretended(4) as axis:       # rank 0 of 4 on torch's fake backend: transforms and predictions, no forward
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.testing._internal.distributed.fake_pg import FakeStore

from zero_fn.local.gloo import give_groups_one_thread

__all__ = ["alone", "pretended", "pretended_grid"]


@contextmanager
def alone() -> Iterator[DeviceMesh]:
    """The axis "dp" over one gloo rank."""
    give_groups_one_thread()
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        yield init_device_mesh("cpu", (1,), mesh_dim_names=("dp",))
    finally:
        dist.destroy_process_group()


@contextmanager
def pretended(size: int, *, rank: int = 0, device_type: str = "cpu") -> Iterator[DeviceMesh]:
    """The axis "dp" as `rank` of `size` sees it; its collectives return at once and move nothing. Of accelerators, too, to
    plan for them."""
    with _pretended(size, rank):
        yield DeviceMesh(device_type, list(range(size)), mesh_dim_names=("dp",))


@contextmanager
def pretended_grid(dp: int, tp: int) -> Iterator[DeviceMesh]:
    """A mesh of two axes, as rank 0 sees it."""
    with _pretended(dp * tp, 0):
        yield init_device_mesh("cpu", (dp, tp), mesh_dim_names=("dp", "tp"))


@contextmanager
def _pretended(size: int, rank: int) -> Iterator[None]:
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=size)
    try:
        yield
    finally:
        dist.destroy_process_group()
