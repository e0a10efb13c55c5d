"""Sequences cut over an axis of their own: attention gathers keys and values, ZeRO shards over dp and cp together.

torch's `context_parallel` knows no attention on the CPU (2.13), so the exchange is written out here: what zero_fn has to get
right is the same.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

import zero_fn as zf
from tests.composition.grids import grid
from tests.ranks import Ranks

WIDTH, HEADS, LENGTH, VOCABULARY, STEPS = 8, 2, 8, 11, 3


class _Gathered(torch.autograd.Function):
    """The parts of all ranks along a dim; gradients are summed and go back to the parts."""

    @staticmethod
    def forward(ctx: Any, part: Tensor, dim: int, group: Any) -> Tensor:
        ctx.dim, ctx.group = dim, group
        parts = [torch.empty_like(part) for _ in range(dist.get_world_size(group))]
        dist.all_gather(parts, part.contiguous(), group=group)
        return torch.cat(parts, dim)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        total = grad.contiguous().clone()
        dist.all_reduce(total, group=ctx.group)
        return total.chunk(dist.get_world_size(ctx.group), ctx.dim)[dist.get_rank(ctx.group)], None, None


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.qkv, self.out = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.mesh: DeviceMesh | None = None

    def forward(self, x: Tensor) -> Tensor:
        qkv = self.qkv(self.norm(x)).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
        q, k, v = qkv.unbind(0)
        first = 0
        if self.mesh is not None:
            first = self.mesh.get_local_rank() * x.shape[1]
            k, v = (_Gathered.apply(part, 2, self.mesh.get_group()) for part in (k, v))  # type: ignore[no-untyped-call]
        places = torch.arange(first, first + x.shape[1])
        mask = places[:, None] >= torch.arange(k.shape[2])
        mixed = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        y: Tensor = x + self.out(mixed.transpose(1, 2).flatten(2))
        return y


class Decoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.layers = nn.ModuleList(Attention() for _ in range(2))
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x)
        return F.cross_entropy(self.head(x).flatten(0, 1), targets.flatten())


def _batch(step: int, row: int) -> tuple[Tensor, Tensor]:
    text = torch.randint(0, VOCABULARY, (2, LENGTH + 1), generator=torch.Generator().manual_seed(10 * step + row))
    return text[:, :-1], text[:, 1:]


def _alone() -> list[tuple[float, float]]:
    torch.manual_seed(0)
    model = Decoder().double()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    seen = []
    for step in range(STEPS):
        loss = torch.stack([model(*_batch(step, row)) for row in range(2)]).mean()
        loss.backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()
        seen.append((loss.item(), norm.item()))
    return seen


def _together(stage: int, is_flat: bool) -> list[tuple[float, float]]:
    mesh = grid("dp", "cp")
    torch.manual_seed(0)
    model: Any = Decoder().double()
    shard: Any = (zf.replicate, zf.shard_optimizer, zf.shard_grads, zf.shard_params)[stage]
    axes = [mesh["dp", "cp"]._flatten("dp_cp")] if is_flat else [mesh["cp"], mesh["dp"]]
    for axis in axes:
        model = shard(model, axis)
    for layer in model.layers:
        layer.mesh = mesh["cp"]
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    own = slice(*(LENGTH // 2 * (mesh["cp"].get_local_rank() + i) for i in range(2)))
    seen = []
    for step in range(STEPS):
        tokens, targets = _batch(step, mesh["dp"].get_local_rank())
        loss = model(tokens[:, own], targets[:, own])
        loss.backward()
        norm: Any = nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()
        total = loss.detach().clone()
        dist.all_reduce(total)
        seen.append((total.item() / 4, norm.full_tensor().item()))
    return seen


@pytest.mark.parametrize("is_flat", [False, True])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_sequences_cut_over_ranks_train_as_in_one_process(ranks: Ranks, stage: int, is_flat: bool) -> None:
    """In float64, where orders of summation differ far below the bound; over two axes and over one that was flattened."""
    expected = _alone()
    for seen in ranks(4).run(_together, stage, is_flat):
        for one, other in zip(seen, expected, strict=True):
            assert abs(one[0] - other[0]) < 1e-12
            assert abs(one[1] - other[1]) < 1e-12
