"""Trains a model that does not fit the memory that the program allows itself: its optimizer states, or nothing of it at all.

    python examples/offload_nvme.py --path /local_nvme               # on one process
    python examples/offload_nvme.py --path /local_nvme --ranks 2     # ZeRO-3 on two, twice the model
    python examples/offload_nvme.py --path /local_nvme --everything  # parameters and gradients on the disk, too
    python examples/offload_nvme.py --stock                          # the same without zf.streamed: memory runs out

Before the first step each process limits its own memory (`RLIMIT_DATA`) to what it has and room for gradients, buffers and
activations. The states of AdamW, twice the parameters, are more than that: they rest on the disk, and pass through four
buffers in each step. With `--everything` nothing of the three has room beyond buffers, and the model is initialised from
`meta` straight into a file.
"""

from __future__ import annotations

import argparse
import resource
import time
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

import zero_fn as zf

BUFFER_NBYTES = 8 << 20
WORKSPACE_NBYTES = 320 << 20  # activations, gathered units, holes that the allocator leaves


@dataclass(frozen=True)
class Options:
    path: str
    ranks: int
    layers: int
    dim: int
    steps: int
    stock: bool
    everything: bool


class Block(nn.Module):
    def __init__(self, dim: int) -> None:
        super().__init__()
        self.norm, self.linear = nn.LayerNorm(dim), nn.Linear(dim, dim)

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh(self.linear(self.norm(x)))


def batch(dim: int, rank: int) -> tuple[Tensor, Tensor]:
    """What is to be learnt by heart."""
    generator = torch.Generator().manual_seed(rank)
    return torch.randn(16, dim, generator=generator), torch.randn(16, dim, generator=generator)


def data_nbytes(row: str = "VmData") -> int:
    """Bytes of private memory that this process has mapped."""
    rows = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return int(rows[row].split()[0]) * 1024


def train(options: Options) -> list[str]:
    mesh = init_device_mesh("cpu", (options.ranks,), mesh_dim_names=("dp",))
    rank = dist.get_rank()
    torch.manual_seed(0)
    with torch.device("meta"):
        model: nn.Module = nn.Sequential(*(Block(options.dim) for _ in range(options.layers)))
    model = zf.shard_params(model, mesh["dp"], units=Block)
    own_nbytes = zf.plan(model).held.parameters
    room = own_nbytes + 4 * BUFFER_NBYTES + WORKSPACE_NBYTES  # gradients, buffers, workspace; no states
    if options.everything:
        disk = zf.nvme(options.path)
        model = zf.offload(model, params=disk, grads=disk, optim=disk)
        room = 3 * 4 * BUFFER_NBYTES + WORKSPACE_NBYTES * 3 // 2
    else:
        model = zf.materialize(model, "cpu")
    resource.setrlimit(resource.RLIMIT_DATA, (data_nbytes() + room, resource.RLIM_INFINITY))
    lines = [
        f"rank {rank}: {own_nbytes / 1e6:.0f} MB of parameters, {2 * own_nbytes / 1e6:.0f} MB of states; "
        f"{room / 1e6:.0f} MB of memory for all that is made from now on"
    ]
    if options.everything:
        model = zf.materialize(model, "cpu")
    optimizer: torch.optim.Optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    if not options.stock:
        tier = None if options.everything else zf.nvme(options.path)
        optimizer = zf.streamed(optimizer, tier, buffer=BUFFER_NBYTES)
        lines.append(repr(optimizer).split("\n")[0])
    x, y = batch(options.dim, rank)
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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else None)
    parser.add_argument("--path", default=".", help="a folder of a local disk")
    parser.add_argument("--ranks", type=int, default=1)
    parser.add_argument("--layers", type=int, default=48, help="blocks for each rank")
    parser.add_argument("--dim", type=int, default=1024)
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--stock", action="store_true", help="keep the states in memory: it runs out")
    parser.add_argument("--everything", action="store_true", help="parameters and gradients on the disk, too")
    given = parser.parse_args()
    options = Options(
        given.path, given.ranks, given.layers * given.ranks, given.dim, given.steps, given.stock, given.everything
    )  # fmt: skip
    print("\n".join(zf.launch(train, options.ranks, options)[0]))


if __name__ == "__main__":
    main()
