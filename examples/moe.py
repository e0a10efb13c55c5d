"""A mixture of experts on data x expert ranks: dense parameters are sharded over both axes, experts over one.

    torchrun --nproc-per-node 4 moe.py --ep 2 --experts 4 --stage 3

Every rank has another batch; ranks of `ep` also have other experts, and tokens travel to theirs and back. Experts are made
DTensors that are cut over ep first. Then a transform over dp shards them like all else, and one over ep leaves them out.
"""

from __future__ import annotations

import argparse
import os
from dataclasses import dataclass, fields
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

import zero_fn as zf

STAGES = [zf.replicate, zf.shard_optimizer, zf.shard_grads, zf.shard_params]


@dataclass
class Options:
    stage: int = 3  # of ZeRO
    ep: int = 2  # ranks that share the experts of a layer; the data axis has the rest
    experts: int = 4
    top: int = 2  # experts for each token
    dim: int = 16
    tokens: int = 24  # of each rank in a step
    steps: int = 10


class Exchange(torch.autograd.Function):
    """Sends rows to other ranks and receives rows from them. The backward sends the gradients back."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, sent: list[int], received: list[int], group: Any) -> Tensor:
        ctx.way_back = received, sent, group
        result = rows.new_empty(sum(received), *rows.shape[1:])
        dist.all_to_all_single(result, rows.contiguous(), received, sent, group=group)
        return result

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return Exchange.apply(grad, *ctx.way_back), None, None, None


class Layer(nn.Module):
    """Sends each token to its best experts, on whichever rank they are; "token dim" in and out."""

    def __init__(self, options: Options, group: Any = None) -> None:
        super().__init__()
        dim, self.top, self.ranks = options.dim, options.top, 1 if group is None else group.size()
        self.router = nn.Linear(dim, options.experts, bias=False)
        self.up = nn.Parameter(torch.randn(options.experts, dim, 2 * dim) * dim**-0.5)
        self.down = nn.Parameter(torch.randn(options.experts, 2 * dim, dim) * dim**-0.5)
        self.exchange = lambda rows, *sizes: Exchange.apply(rows, *sizes, group) if group else rows

    def forward(self, x: Tensor) -> Tensor:
        weights, chosen = self.router(x).softmax(-1).topk(self.top, dim=-1)  # "token top"
        order = chosen.flatten().argsort(stable=True)  # by expert
        asked = torch.bincount(chosen.flatten(), minlength=self.router.out_features).view(self.ranks, -1)
        asking = self.exchange(asked, [1] * self.ranks, [1] * self.ranks)  # from each rank to the experts here
        sent, received = asked.sum(1).tolist(), asking.sum(1).tolist()
        arrived = self.exchange(x[order // self.top], sent, received)
        here = torch.arange(asking.shape[1], device=x.device).repeat(self.ranks).repeat_interleave(asking.flatten())
        by_expert = here.argsort(stable=True)
        parts = arrived[by_expert].split(asking.sum(0).tolist())
        up, down = (w.to_local() if isinstance(w, DTensor) else w for w in (self.up, self.down))
        answers = torch.cat([F.gelu(part @ one) @ other for part, one, other in zip(parts, up, down, strict=True)])
        returned = self.exchange(answers[by_expert.argsort()], received, sent)
        return x.index_add(0, order // self.top, returned * weights.flatten()[order, None])


def build(options: Options, mesh: DeviceMesh | None = None) -> nn.Sequential:
    """The model, a guess of a token from the one before; without a mesh one process has all experts."""
    torch.manual_seed(0)  # every rank builds the same values
    dim, group = options.dim, mesh and mesh.get_group("ep")
    model = nn.Sequential(nn.Embedding(32, dim), Layer(options, group), Layer(options, group), nn.Linear(dim, 32))
    if mesh is None:
        return model
    for layer in model[1:3]:
        for name in ("up", "down"):
            setattr(layer, name, nn.Parameter(distribute_tensor(getattr(layer, name).detach(), mesh["ep"], [Shard(0)])))
    model = STAGES[options.stage](model, mesh["dp"], units=Layer)
    return STAGES[options.stage](model, mesh["ep"], where=lambda name, _: not name.endswith((".up", ".down")))


def main() -> None:
    parser = argparse.ArgumentParser()
    for field in fields(Options):
        parser.add_argument(f"--{field.name}", type=type(field.default), default=field.default)
    options = Options(**vars(parser.parse_args()))
    device = "cuda" if torch.cuda.is_available() else "cpu"
    shape = (int(os.environ["WORLD_SIZE"]) // options.ep, options.ep)
    mesh = init_device_mesh(device, shape, mesh_dim_names=("dp", "ep"))  # starts the process group, too
    model = build(options, mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    draws = torch.Generator().manual_seed(dist.get_rank())  # every rank of both axes has other tokens
    for step in range(options.steps):
        tokens = torch.randint(32, (options.tokens,), generator=draws).to(device)
        loss = F.cross_entropy(model(tokens), (7 * tokens + 3) % 32)  # a permutation, to be learnt
        loss.backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0).full_tensor()  # over dense parameters and experts
        optimizer.step()
        optimizer.zero_grad()
        if dist.get_rank() == 0:
            print(f"step {step}: loss {loss.item():.5f}, norm {norm.item():.5f}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
