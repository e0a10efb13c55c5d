"""Trains a model that memory does not hold: parameters, gradients and optimizer states rest on a local disk.

    torchrun --nproc-per-node 1 nvme.py --path /local_nvme                               a small model
    torchrun --nproc-per-node 2 nvme.py --path /local_nvme --layers 64 --dim 4096        1.1 billion parameters on two ranks

Each rank keeps its shard in files of its own, reads a layer while the one before it computes, and steps the optimizer chunk
by chunk. Memory holds a few buffers, two layers, and activations. The files have no names: they are gone when the process
ends. The disk needs 16 bytes for each parameter.
"""

from __future__ import annotations

import argparse
import os
import time
from dataclasses import dataclass, fields

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

import zero_fn as zf


@dataclass
class Options:
    path: str = "."  # a folder on a local disk; zf.nvme takes several disks, too
    buffer: int = 8 << 20  # bytes of each of the four buffers of parameters, gradients and states
    layers: int = 4
    dim: int = 128
    rows: int = 16  # of a batch of each rank
    steps: int = 5
    lr: float = 1e-3
    log_to: str = ""  # where metrics go while it runs: "tensorboard:runs prometheus:9400"


class Block(nn.Module):
    def __init__(self, dim: int) -> None:
        super().__init__()
        self.norm, self.linear = nn.LayerNorm(dim), nn.Linear(dim, dim)

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh(self.linear(self.norm(x)))


def main() -> None:
    parser = argparse.ArgumentParser()
    for field in fields(Options):
        parser.add_argument("--" + field.name.replace("_", "-"), type=type(field.default), default=field.default)
    options = Options(**vars(parser.parse_args()))
    device = "cuda" if torch.cuda.is_available() else "cpu"
    rank, ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    mesh = init_device_mesh(device, (ranks,), mesh_dim_names=("dp",))  # starts the process group, too

    torch.manual_seed(0)  # every rank draws the same model
    with torch.device("meta"):  # shapes without memory
        model: nn.Module = nn.Sequential(*(Block(options.dim) for _ in range(options.layers)))
    disk = zf.nvme(options.path)
    model = zf.shard_params(model, mesh["dp"], units=Block)
    model = zf.offload(model, params=disk, grads=disk, optim=disk)
    model = zf.materialize(model, device)  # layer by layer, straight into the files
    optimizer = zf.streamed(torch.optim.AdamW(model.parameters(), lr=options.lr, fused=True), buffer=options.buffer)
    if rank == 0:
        print(zf.plan(model, optimizer))
    metrics = zf.metrics(model, optimizer, sinks=options.log_to.split(), every=1)

    draws = torch.Generator().manual_seed(rank)  # random rows, which the model learns by heart
    x, y = torch.randn(2, options.rows, options.dim, generator=draws).to(device)
    for step in range(options.steps):
        began = time.perf_counter()
        loss = (model(x) - y).square().mean()
        loss.backward()
        computed = time.perf_counter()
        optimizer.step()
        metrics.step(loss, samples=options.rows)
        optimizer.zero_grad()
        if rank == 0:
            took = f"{computed - began:.2f} s + {time.perf_counter() - computed:.2f} s of optimizer"
            print(f"step {step}: loss {loss.item():.4f}, {took}", flush=True)
    metrics.close()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
