"""Trains a GPT on one GPU with the memory of its host, or on a CPU alone.

    python one_gpu_and_host.py                                       a small model, everything on the host
    python one_gpu_and_host.py --layers 32 --dim 4096 --rest all     6.4 billion parameters: 13 GB of a GPU, 103 of its host
    python one_gpu_and_host.py --layers 24 --dim 2048 --rest states  1.2 billion: 10 GB of a GPU, 10 of its host

docs/guides/one-gpu.md has a table of models and machines. The model is built on `meta`, and initialised layer by layer where
it rests, so that nothing is ever whole anywhere else. One process; `torchrun` and a transform over a mesh make it many.
"""

from __future__ import annotations

import argparse
import time
from dataclasses import dataclass, fields
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import zero_fn as zf

HOST = zf.cpu()
RESTS: dict[str, dict[str, Any]] = {
    "nothing": {},
    "states": {"optim": HOST},
    "all": {"params": HOST, "grads": HOST, "optim": HOST, "reshard_after": "backward"},  # parameters travel once a step
    "all, in turns": {"params": HOST, "grads": HOST, "optim": HOST},  # two layers at once are on the GPU
}


@dataclass
class Options:
    rest: str = "all"  # what rests on the host between uses: a name of RESTS
    layers: int = 4
    dim: int = 128
    heads: int = 4
    seq: int = 128  # tokens of a sequence
    rows: int = 4  # sequences of a step: as many as fit, for the longer a step computes, the less copies are seen
    steps: int = 20
    lr: float = 1e-3


class Block(nn.Module):
    """Causal attention, then a feed-forward layer; "row time dim" in and out."""

    def __init__(self, dim: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.qkv, self.out = nn.Linear(dim, 3 * dim, bias=False), nn.Linear(dim, dim, bias=False)
        self.up, self.down = nn.Linear(dim, 4 * dim), nn.Linear(4 * dim, dim)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norm1(x)).unflatten(-1, (3, self.heads, -1)).transpose(1, 3).unbind(2)
        x = x + self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class GPT(nn.Module):
    """Tokens "row time" to logits "row time vocab"; activations of a block are computed again in the backward."""

    def __init__(self, options: Options, vocab: int = 256) -> None:
        super().__init__()
        self.embed, self.place = nn.Embedding(vocab, options.dim), nn.Embedding(options.seq, options.dim)
        self.blocks = nn.ModuleList(Block(options.dim, options.heads) for _ in range(options.layers))
        self.norm, self.head = nn.LayerNorm(options.dim), nn.Linear(options.dim, vocab, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens) + self.place(torch.arange(tokens.shape[1], device=tokens.device))
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False)
        return self.head(self.norm(x))


def main() -> None:
    parser = argparse.ArgumentParser()
    for field in fields(Options):
        parser.add_argument(f"--{field.name}", type=type(field.default), default=field.default)
    options = Options(**vars(parser.parse_args()))
    device = "cuda" if torch.cuda.is_available() else "cpu"

    torch.manual_seed(0)
    with torch.device("meta"):
        model: nn.Module = GPT(options)
    model = zf.precision(model, grads=torch.bfloat16)  # compute and gradients in bfloat16, parameters in float32
    model = zf.offload(model, **RESTS[options.rest]) if RESTS[options.rest] else model
    model = zf.materialize(model, device)
    optimizer: torch.optim.Optimizer
    optimizer = torch.optim.AdamW(model.parameters(), lr=options.lr, fused=True)  # fused: C code on the host
    optimizer = zf.streamed(optimizer) if RESTS[options.rest] else optimizer
    print(zf.plan(model, optimizer))  # bytes on the GPU and on the host, and over the link between them

    for step in range(options.steps):
        began = time.perf_counter()
        first = torch.randint(256, (options.rows, 1), device=device)
        tokens = (first + 3 * torch.arange(options.seq + 1, device=device)) % 256  # yours: text
        loss = F.cross_entropy(model(tokens[:, :-1]).flatten(0, 1).float(), tokens[:, 1:].flatten())
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        speed = options.rows * options.seq / (time.perf_counter() - began)
        print(f"step {step}: loss {loss.item():.3f}, {speed:,.0f} tokens/s")


if __name__ == "__main__":
    main()
