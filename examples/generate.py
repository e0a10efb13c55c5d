"""Writes text with a model whose parameters memory does not hold (ZeRO-Inference): they rest on the host or on a disk.

    python generate.py                                                     a small model with random weights
    python generate.py --weights runs/a                                    what pretrain.py has saved; take its sizes, too
    python generate.py --path /local_nvme --layers 48 --dim 4096           9.7 billion parameters: 39 GB on a disk

The model is built on `meta`, without memory, and filled layer by layer straight where it rests. Each forward then reads every
layer once, while the one before it computes. One prompt at a time is bound by these reads: write many texts at once.
"""

from __future__ import annotations

import argparse
import time
from dataclasses import dataclass, fields

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import zero_fn as zf


@dataclass
class Options:
    weights: str = ""  # a folder of zf.save; random weights without
    path: str = ""  # a folder on a local disk for the parameters; without, host memory
    layers: int = 4
    dim: int = 128
    heads: int = 4
    seq: int = 128  # bytes that the model sees
    prompt: str = "Once upon a time"
    rows: int = 2  # texts that are written at once
    tokens: int = 20  # bytes to write
    temperature: float = 0.7


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
    """Bytes "row time" to logits of the next byte, "row time 256"."""

    def __init__(self, layers: int, dim: int, heads: int, seq: int) -> None:
        super().__init__()
        self.embed, self.place = nn.Embedding(256, dim), nn.Embedding(seq, dim)
        self.blocks = nn.ModuleList(Block(dim, heads) for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(dim), nn.Linear(dim, 256, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens) + self.place(torch.arange(tokens.shape[1], device=tokens.device))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def main() -> None:
    parser = argparse.ArgumentParser()
    for field in fields(Options):
        parser.add_argument(f"--{field.name}", type=type(field.default), default=field.default)
    options = Options(**vars(parser.parse_args()))
    device = "cuda" if torch.cuda.is_available() else "cpu"

    with torch.device("meta"):
        model: nn.Module = GPT(options.layers, options.dim, options.heads, options.seq).requires_grad_(False)
    model = zf.offload(model, params=zf.nvme(options.path) if options.path else zf.cpu(), units=Block)
    torch.manual_seed(0)
    model = zf.materialize(model, device)
    if options.weights:
        zf.load(options.weights, model, only="model")
    print(zf.plan(model))  # bytes in memory, and where parameters rest
    nbytes = sum(parameter.numel() * parameter.element_size() for parameter in model.parameters())

    tokens = torch.tensor([list(options.prompt.encode())] * options.rows, device=device)
    began = time.perf_counter()
    with torch.inference_mode():
        for _ in range(options.tokens):
            logits = model(tokens[:, -options.seq :])[:, -1] / options.temperature
            tokens = torch.cat((tokens, torch.multinomial(logits.float().softmax(-1), 1)), dim=1)
    took = time.perf_counter() - began
    print(f"{took / options.tokens:.2f} s a byte, {nbytes * options.tokens / took / 1e9:.2f} GB/s of parameters")
    for row in tokens.tolist():
        print(repr(bytes(row).decode("utf-8", "replace")))


if __name__ == "__main__":
    main()
