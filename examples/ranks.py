"""All ranks as one mesh axis, and what each does for the whole: its rows of a batch, its part of a mean."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
import torch.distributed as dist
from corpus import Corpus, rows
from options import Options
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

__all__ = ["Job", "data_parallel_axis"]


@contextmanager
def data_parallel_axis() -> Iterator[DeviceMesh]:
    """The axis of all ranks: those of `zf.launch`, which has joined them already, or those of torchrun, joined here."""
    is_launched = dist.is_initialized()
    local_ranks = int(os.environ["LOCAL_WORLD_SIZE"])
    device = "cuda" if torch.cuda.device_count() >= local_ranks else "cpu"
    if device == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    else:
        torch.set_num_threads(max(1, (os.cpu_count() or 1) // local_ranks))
    if not is_launched:
        dist.init_process_group("nccl" if device == "cuda" else "gloo")
    try:
        yield init_device_mesh(device, (dist.get_world_size(),), mesh_dim_names=("dp",))
    finally:
        if not is_launched:
            dist.destroy_process_group()


@dataclass(frozen=True, slots=True)
class Job:
    """What every rank and both trainings have in common."""

    options: Options
    corpus: Corpus
    mesh: DeviceMesh

    @property
    def is_first(self) -> bool:
        """Whether this rank is the one that shows and writes results."""
        return self.mesh.get_local_rank() == 0

    def share(self, text: Tensor, step: int, microbatches: int) -> Tensor:
        """This rank's rows of a step: "(rank microbatch row) time -> microbatch row time", row `rank`."""
        batch = rows(text, self.options.batch, self.options.seq, step=step, seed=self.options.seed)
        shares = batch.view(self.mesh.size(), microbatches, -1, self.options.seq + 1)
        return shares[self.mesh.get_local_rank()].to(self.mesh.device_type)

    def mean(self, loss: Tensor) -> float:
        """The mean over ranks."""
        total = loss.detach().clone()
        dist.all_reduce(total, group=self.mesh.get_group())
        return total.item() / self.mesh.size()
