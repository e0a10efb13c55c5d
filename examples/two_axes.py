"""Two data axes (HSDP): shards within a machine, replicas between machines.

    torchrun --nproc-per-node 4 two_axes.py                      2 x 2 ranks of one machine
    torchrun --nnodes 4 --nproc-per-node 8 ... two_axes.py --inner 8 --compose hsdp

The axis `inner` runs over the ranks of a machine, where links are fast, and `outer` over machines. A second axis is a second
transform; all of these compositions train the same numbers, and differ in what is held and in what is sent over which links.
"""

from __future__ import annotations

import argparse
import os
from dataclasses import dataclass, fields

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

import zero_fn as zf


@dataclass
class Options:
    compose: str = "hsdp"  # hsdp, hpz, zero1-zero3 or zero3: see `composed`
    inner: int = 2  # ranks of the inner axis; the outer one has the rest
    layers: int = 4
    dim: int = 64
    rows: int = 16  # of a batch of each rank
    steps: int = 5
    lr: float = 1e-3


class Block(nn.Module):
    def __init__(self, dim: int) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(dim), nn.Linear(dim, 4 * dim), nn.Linear(4 * dim, dim)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.relu(self.up(self.norm(x))))


def composed(model: nn.Module, mesh: DeviceMesh, name: str) -> nn.Module:
    """The composition of this name. Of n ranks on `inner` and m on `outer`, a rank holds 1/n or 1/(n m) of each state."""
    inside = zf.shard_params(model, mesh["inner"], units=Block)  # parameters, gradients and states: 1/n
    if name == "hsdp":  # gradients are all-reduced outside; is zf.hybrid(model, mesh)
        return zf.replicate(inside, mesh["outer"])
    if name == "zero1-zero3":  # states 1/(n m); outside parameters are gathered once a step, gradients reduced once
        return zf.shard_optimizer(inside, mesh["outer"])
    if name == "hpz":  # gradients and states 1/(n m)
        return zf.shard_grads(inside, mesh["outer"])
    if name == "zero3":  # everything 1/(n m): each layer is gathered over both axes
        return zf.shard_params(inside, mesh["outer"])
    raise SystemExit(f"--compose {name} is not one of hsdp, hpz, zero1-zero3, zero3")


def main() -> None:
    parser = argparse.ArgumentParser()
    for field in fields(Options):
        parser.add_argument(f"--{field.name}", type=type(field.default), default=field.default)
    options = Options(**vars(parser.parse_args()))
    device = "cuda" if torch.cuda.is_available() else "cpu"
    rank, ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    shape = (ranks // options.inner, options.inner)  # neighbours are on one machine
    mesh = init_device_mesh(device, shape, mesh_dim_names=("outer", "inner"))  # starts the process group, too

    torch.manual_seed(0)  # every rank builds the same model
    model: nn.Module = nn.Sequential(*(Block(options.dim) for _ in range(options.layers)))
    model = composed(model, mesh, options.compose)
    optimizer = torch.optim.AdamW(model.parameters(), lr=options.lr)
    draws = torch.Generator().manual_seed(rank)  # every rank of both axes has other rows
    for step in range(options.steps):
        x = torch.randn(options.rows, options.dim, generator=draws).to(device)
        with zf.traffic() as sent:
            loss = (model(x) - x.flip(1)).square().mean()
            loss.backward()
            optimizer.step()
        optimizer.zero_grad()
        mean = loss.detach() / ranks
        dist.all_reduce(mean)
        if rank == 0:
            print(f"step {step}: loss {mean.item():.6f}, bytes sent by axis: {dict(sent.by_axis)}", flush=True)
    if rank == 0:
        print(zf.plan(model, optimizer))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
