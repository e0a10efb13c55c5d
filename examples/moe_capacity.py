"""Experts with a capacity, as in deepspeed.moe: tokens beyond it are dropped, so shapes are the same in each step.

    torchrun --nproc-per-node 4 moe_capacity.py --ep 2 --capacity_factor 1.25 --residual 1

All ranks must have as many tokens. moe.py drops none, and says more of the axes.
"""

from __future__ import annotations

import argparse
import math
import os
from dataclasses import dataclass, fields

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

import zero_fn as zf


@dataclass
class Options:
    ep: int = 2  # ranks that share the experts of a layer; the data axis has the rest
    experts: int = 4
    top: int = 2  # experts for each token
    capacity_factor: float = 1.0
    eval_capacity_factor: float = 2.0
    min_capacity: int = 4
    residual: int = 0  # 1: a dense MLP beside the experts; each token weighs the two
    dim: int = 16
    tokens: int = 24  # of each rank in a step
    steps: int = 10


def travel(rows: Tensor, ep: DeviceMesh | None, here: int, there: int) -> Tensor:
    """Of rows that ranks hold along one dim, each rank gets those along another: an all-to-all, forwards and backwards."""
    if ep is not None:
        rows = DTensor.from_local(rows, ep, [Shard(here)]).redistribute(placements=[Shard(there)]).to_local()
    return rows


class Layer(nn.Module):
    """Sends tokens to their best experts while these have room; "token dim" in and out. `l_aux` is that of DeepSpeed."""

    def __init__(self, options: Options, ep: DeviceMesh | None = None) -> None:
        super().__init__()
        dim, self.options, self.ep = options.dim, options, ep
        self.router = nn.Linear(dim, options.experts, bias=False)
        drawn = [torch.randn(options.experts, *shape) * dim**-0.5 for shape in ((dim, 2 * dim), (2 * dim, dim))]
        self.up, self.down = (nn.Parameter(distribute_tensor(w, ep, [Shard(0)]) if ep else w) for w in drawn)
        if options.residual:
            self.mlp = nn.Sequential(nn.Linear(dim, 2 * dim), nn.GELU(), nn.Linear(2 * dim, dim))
            self.coefficient = nn.Linear(dim, 2)

    def forward(self, x: Tensor) -> Tensor:
        (tokens, dim), top, experts = x.shape, self.options.top, self.options.experts
        factor = self.options.capacity_factor if self.training else self.options.eval_capacity_factor
        capacity = max(self.options.min_capacity, math.ceil(factor * top * tokens / experts))
        gates = self.router(x).softmax(-1)
        weights, chosen = (each.T.flatten() for each in gates.topk(top, dim=-1))  # all first choices, then all second
        asked = F.one_hot(chosen, experts)
        slot = (asked.cumsum(0) * asked).sum(1) - 1  # how many have asked this expert before
        place = torch.where(slot < capacity, chosen * capacity + slot, experts * capacity)  # the last: dropped
        weights = (weights * (slot < capacity)).view(top, tokens, 1)
        if top > 1:  # those that are left add up to 1
            weights = weights / weights.sum(0).clamp_min(torch.finfo(x.dtype).eps)
        sent = x.new_zeros(experts * capacity + 1, dim).index_add(0, place, x.repeat(top, 1))[:-1]
        arrived = travel(sent.view(1, experts, capacity, dim), self.ep, 0, 1)  # "rank expert slot dim"
        up, down = (w.to_local() if isinstance(w, DTensor) else w for w in (self.up, self.down))
        answers = travel(F.gelu(arrived @ up) @ down, self.ep, 1, 0).view(-1, dim)
        y = (weights * F.pad(answers, (0, 0, 0, 1))[place].view(top, tokens, dim)).sum(0)  # zeros for what was dropped
        if self.options.residual:
            share, rest = self.coefficient(x).softmax(-1).split(1, dim=-1)
            y = share * y + rest * self.mlp(x)
        self.l_aux = experts * (gates.mean(0) * asked[:tokens].to(x.dtype).mean(0)).sum()
        return x + y


def build(options: Options, mesh: DeviceMesh | None = None) -> nn.Sequential:
    """A guess of a token from the one before. Dense parameters are sharded over both axes, experts over dp."""
    torch.manual_seed(0)  # every rank builds the same values
    dim, ep = options.dim, mesh and mesh["ep"]
    model = nn.Sequential(nn.Embedding(32, dim), Layer(options, ep), Layer(options, ep), nn.Linear(dim, 32))
    if mesh is None:
        return model
    model = zf.shard_params(model, mesh["dp"], units=Layer)
    return zf.shard_params(model, mesh["ep"], where=lambda name, _: not name.endswith((".up", ".down")))


def loss_of(model: nn.Sequential, tokens: Tensor) -> Tensor:
    return F.cross_entropy(model(tokens), (7 * tokens + 3) % 32) + 0.01 * sum(layer.l_aux for layer in model[1:3])


def main() -> None:
    parser = argparse.ArgumentParser()
    for field in fields(Options):
        parser.add_argument(f"--{field.name}", type=type(field.default), default=field.default)
    options = Options(**vars(parser.parse_args()))
    shape = (int(os.environ["WORLD_SIZE"]) // options.ep, options.ep)
    mesh = init_device_mesh("cuda" if torch.cuda.is_available() else "cpu", shape, mesh_dim_names=("dp", "ep"))
    model = build(options, mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    draws = torch.Generator().manual_seed(dist.get_rank())  # every rank of both axes has other tokens
    for step in range(options.steps):
        loss = loss_of(model, torch.randint(32, (options.tokens,), generator=draws).to(mesh.device_type))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if dist.get_rank() == 0:
            print(f"step {step}: loss {loss.item():.5f}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
