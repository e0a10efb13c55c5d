"""Sequences cut over an axis of their own, ZeRO over dp and cp together.

Attention gathers keys and values, or is torch's ring. torch's `context_parallel` is that ring behind a dispatcher that knows
the kernels of accelerators only (2.13); here the kernel of the CPU is given to it by hand.
"""

from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.tensor.experimental._context_parallel import _attention as ring

import zero_fn as zf
from tests.axes.grids import grid
from tests.support.models import Language

WIDTH, HEADS, LENGTH, VOCABULARY, STEPS = 8, 2, 8, 11, 3


class _Gathered(torch.autograd.Function):
    """The parts of all ranks along a dim; gradients are summed and go back to the parts."""

    @staticmethod
    def forward(ctx, part, dim, group):
        ctx.dim, ctx.group = dim, group
        parts = [torch.empty_like(part) for _ in range(dist.get_world_size(group))]
        dist.all_gather(parts, part.contiguous(), group=group)
        return torch.cat(parts, dim)

    @staticmethod
    def backward(ctx, grad):
        total = grad.contiguous().clone()
        dist.all_reduce(total, group=ctx.group)
        return total.chunk(dist.get_world_size(ctx.group), ctx.dim)[dist.get_rank(ctx.group)], None, None


class _Ring(torch.autograd.Function):
    """torch's ring attention, causal and balanced: each rank has one chunk from the left half and its mirror image."""

    @staticmethod
    def forward(ctx, q, k, v, group):
        def attend(q, k, v, *, is_causal):
            found = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, is_causal)
            return found

        out, lse = ring._templated_ring_attention(group, 2, attend, q, k, v, is_causal=True)
        ctx.group = group
        ctx.save_for_backward(q, k, v, out, lse)
        return out

    @staticmethod
    def backward(ctx, grad):
        def attend(*, grad, query, key, value, out, logsumexp, is_causal):
            found = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
                grad, query, key, value, out, logsumexp, 0.0, is_causal
            )
            return found

        q, k, v, out, lse = ctx.saved_tensors
        grads = ring._templated_ring_attention_backward(
            ctx.group, 2, attend, grad.contiguous(), "grad", q, k, v, out, lse, is_causal=True
        )
        return grads[0], grads[1], grads[2], None


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.qkv, self.out = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.mesh = None
        self.is_ring = False

    def forward(self, x):
        qkv = self.qkv(self.norm(x)).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
        q, k, v = qkv.unbind(0)
        if self.mesh is not None and self.is_ring:
            mixed = _Ring.apply(q, k, v, self.mesh.get_group())
            return x + self.out(mixed.transpose(1, 2).flatten(2))
        first = 0
        if self.mesh is not None:
            first = self.mesh.get_local_rank() * x.shape[1]
            k, v = (_Gathered.apply(part, 2, self.mesh.get_group()) for part in (k, v))
        places = torch.arange(first, first + x.shape[1])
        mask = places[:, None] >= torch.arange(k.shape[2])
        mixed = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        y = x + self.out(mixed.transpose(1, 2).flatten(2))
        return y


def _decoder():
    torch.manual_seed(0)
    model = Language(VOCABULARY, WIDTH)
    model.blocks = nn.ModuleList(Attention() for _ in range(2))
    return model.double()


def _loss(model, tokens, targets):
    return F.cross_entropy(model(tokens).flatten(0, 1), targets.flatten())


def _batch(step, row):
    text = torch.randint(0, VOCABULARY, (2, LENGTH + 1), generator=torch.Generator().manual_seed(10 * step + row))
    return text[:, :-1], text[:, 1:]


def _alone():
    model = _decoder()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    seen = []
    for step in range(STEPS):
        loss = torch.stack([_loss(model, *_batch(step, row)) for row in range(2)]).mean()
        loss.backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()
        seen += [loss.item(), norm.item()]
    return seen


def _together(stage, is_flat, is_ring):
    mesh = grid("dp", "cp")
    model = _decoder()
    shard = (zf.replicate, zf.shard_optimizer, zf.shard_grads, zf.shard_params)[stage]
    axes = [mesh["dp", "cp"]._flatten("dp_cp")] if is_flat else [mesh["cp"], mesh["dp"]]
    for axis in axes:
        model = shard(model, axis)
    for layer in model.blocks:
        layer.mesh, layer.is_ring = mesh["cp"], is_ring
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    rank = mesh["cp"].get_local_rank()
    chunks = torch.arange(LENGTH).chunk(4)
    own = torch.cat([chunks[rank], chunks[3 - rank]] if is_ring else [chunks[2 * rank], chunks[2 * rank + 1]])
    seen = []
    for step in range(STEPS):
        tokens, targets = _batch(step, mesh["dp"].get_local_rank())
        with patch.object(ring._cp_options, "convert_to_f32", False):  # would sum in float32
            loss = _loss(model, tokens[:, own], targets[:, own])
            loss.backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()
        total = loss.detach().clone()
        dist.all_reduce(total)
        seen += [total.item() / 4, norm.full_tensor().item()]
    return seen


@pytest.mark.parametrize(
    ("stage", "is_flat", "is_ring"),
    [
        *((0, True, False), (1, False, False), (2, True, False), (3, False, False), (3, True, False)),
        *((1, True, True), (2, False, True), (3, True, True)),
    ],
)
def test_sequences_cut_over_ranks_train_as_in_one_process(ranks, stage, is_flat, is_ring):
    """In float64, where orders of summation differ far below the bound; over two axes and over one that was flattened."""
    assert ranks(4).run(_together, stage, is_flat, is_ring) == [pytest.approx(_alone(), rel=0, abs=1e-12)] * 4


def _by_a_config(stage):
    """`sequence_parallel_size` over four ranks: the loss of a part is its share of that of the whole."""
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "sequence_parallel_size": 2,
        "gradient_clipping": 0.5,
        "optimizer": {"type": "AdamW", "params": {"lr": 0.01, "weight_decay": 0.01}},
        "zero_optimization": {"stage": stage},
    }
    setup = zf.from_deepspeed(_decoder().float(), config, grid("dp", "cp")["dp", "cp"]._flatten("both"))
    parts = setup.mesh._get_root_mesh()["sp"]
    for layer in setup.model.blocks:
        layer.mesh = parts
    seen = []
    for step in range(STEPS):
        batch = _batch(step, setup.mesh.get_local_rank())
        tokens, targets = (each.chunk(2, dim=1)[parts.get_local_rank()] for each in batch)
        loss = F.cross_entropy(setup.model(tokens).flatten(0, 1), targets.flatten(), reduction="sum") / batch[1].numel()
        setup.scaled(loss).backward()
        norm = setup.step()
        total = loss.detach().clone()
        dist.all_reduce(total)
        seen += [total.item() / 2, norm or 0.0]
    return seen


@pytest.mark.parametrize("stage", [1, 3])
def test_sequences_that_a_config_cuts_train_as_in_one_process(ranks, stage):
    assert ranks(4).run(_by_a_config, stage) == [pytest.approx(_alone(), rel=0, abs=1e-5)] * 4
