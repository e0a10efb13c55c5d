"""Trains a model under a memory limit that its optimizer states exceed, or that the whole model exceeds.

    python examples/offload_nvme.py --path /local_nvme               # on one process
    python examples/offload_nvme.py --path /local_nvme --ranks 2     # ZeRO-3 on two, twice the model
    python examples/offload_nvme.py --path /local_nvme --everything  # parameters and gradients on the disk, too
    python examples/offload_nvme.py --stock                          # the same without zf.streamed: memory runs out

Before the first step each process limits its own memory: on the CPU by `RLIMIT_DATA`, on a GPU by torch. There is room
for gradients, buffers and activations, but not for the states of AdamW, which are twice as large as the parameters. So they
rest on the disk, and pass through four buffers in each step. With `--everything` there is room for buffers only: parameters,
gradients and states rest on the disk, and the model is initialised from `meta` straight into a file.
"""

from __future__ import annotations

import time
from dataclasses import dataclass

import torch
import torch.distributed as dist
from program import device_option, limit_memory, mesh_of, on_ranks, option, parse
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

import zero_fn as zf

BUFFER_NBYTES = 8 << 20
WORKSPACE_NBYTES = 320 << 20  # activations, gathered units, holes that the allocator leaves


@dataclass(frozen=True)
class Options:
    """The command line."""

    path: str = option(".", "a folder of a local disk")
    ranks: int = option(1, "local ranks; torchrun says it by itself")
    layers: int = option(48, "blocks for each rank")
    dim: int = option(1024, "width")
    rows: int = option(16, "rows of a batch of each rank")
    steps: int = option(5, "optimizer steps")
    stock: bool = option(False, "keep the states in memory: it runs out")
    everything: bool = option(False, "parameters and gradients on the disk, too")
    device: str | None = device_option()


class Block(nn.Module):
    def __init__(self, dim: int) -> None:
        super().__init__()
        self.norm, self.linear = nn.LayerNorm(dim), nn.Linear(dim, dim)

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh(self.linear(self.norm(x)))


def batch(rows: int, dim: int, rank: int) -> tuple[Tensor, Tensor]:
    """Random inputs and targets, which the model learns by heart."""
    generator = torch.Generator().manual_seed(rank)
    return torch.randn(rows, dim, generator=generator), torch.randn(rows, dim, generator=generator)


def run(options: Options) -> list[str]:
    """What every rank runs. Returns lines to print."""
    device = options.device or "cpu"
    with mesh_of(device, dp=options.ranks) as mesh:
        return train(options, mesh, device)


def train(options: Options, mesh: DeviceMesh, device: str) -> list[str]:
    """Trains under the limit. Returns lines to print."""
    rank = dist.get_rank()
    torch.manual_seed(0)
    with torch.device("meta"):
        model: nn.Module = nn.Sequential(*(Block(options.dim) for _ in range(options.layers * options.ranks)))
    model = zf.shard_params(model, mesh["dp"], units=Block)
    own_nbytes = zf.plan(model).held.parameters
    room = own_nbytes + 4 * BUFFER_NBYTES + WORKSPACE_NBYTES  # gradients, buffers, workspace; no states
    if options.everything:
        disk = zf.nvme(options.path)
        model = zf.offload(model, params=disk, grads=disk, optim=disk)
        room = 3 * 4 * BUFFER_NBYTES + WORKSPACE_NBYTES * 3 // 2
    else:
        model = zf.materialize(model, device)
    limit_memory(device, room)
    lines = [
        f"rank {rank}: {own_nbytes / 1e6:.0f} MB of parameters, {2 * own_nbytes / 1e6:.0f} MB of states; "
        f"{room / 1e6:.0f} MB of memory for all that is made from now on"
    ]
    if options.everything:
        model = zf.materialize(model, device)
    optimizer: torch.optim.Optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    if not options.stock:
        tier = None if options.everything else zf.nvme(options.path)
        optimizer = zf.streamed(optimizer, tier, buffer=BUFFER_NBYTES)
        lines.append(repr(optimizer).split("\n")[0])
    x, y = (tensor.to(device) for tensor in batch(options.rows, options.dim, rank))
    for step in range(options.steps):
        start = time.perf_counter()
        optimizer.zero_grad()
        loss = (model(x) - y).square().mean()
        loss.backward()
        middle = time.perf_counter()
        optimizer.step()
        end = time.perf_counter()
        lines.append(f"step {step}: loss {loss.item():.4f}, {middle - start:.2f} s + {end - middle:.2f} s of optimizer")
    return lines


if __name__ == "__main__":
    options = parse(Options, __doc__)
    print(*(on_ranks(options.ranks, run, options) or ()), sep="\n")
