"""Small models with everything that goes wrong: uneven rows, ties, frozen, unused, tiny, scalar and empty parameters."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

__all__ = ["WIDTH", "Block", "Language", "Layer", "Odd", "Recomputed", "Stack", "Tower", "batch"]

WIDTH = 6


class Block(nn.Module):
    """A residual block with an uneven inner width and a learned scalar gate."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(dim)
        self.up = nn.Linear(dim, 2 * dim + 3)
        self.down = nn.Linear(2 * dim + 3, dim)
        self.gate = nn.Parameter(torch.tensor(0.5))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.gate * self.down(F.gelu(self.up(self.norm(x))))


class Layer(nn.Module):
    """A residual layer of any width from 1 on, so that shards are uneven and often empty; repeated, so each is a unit."""

    def __init__(self, width: int = WIDTH, hidden: int = 9) -> None:
        super().__init__()
        self.first = nn.Linear(width, hidden)
        self.second = nn.Linear(hidden, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.second(torch.tanh(self.first(x)))


class Stack(nn.Module):
    """Layers between two linears of the root."""

    def __init__(self, width: int = WIDTH, hidden: int = 9, layers: int = 3) -> None:
        super().__init__()
        self.enter = nn.Linear(width, width)
        self.layers = nn.ModuleList(Layer(width, hidden) for _ in range(layers))
        self.leave = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        x = self.enter(x)
        for layer in self.layers:
            x = self.run(layer, x)
        output: Tensor = self.leave(x)
        return output

    def run(self, layer: nn.Module, x: Tensor) -> Tensor:
        output: Tensor = layer(x)
        return output


class Tower(nn.Module):
    """Three blocks, each a unit with a scalar and uneven rows, between two linears of the root."""

    def __init__(self, *, dropout: float = 0.0) -> None:
        super().__init__()
        self.enter = nn.Linear(WIDTH, 7)
        self.blocks = nn.ModuleList(Block(7) for _ in range(3))
        self.dropout = nn.Dropout(dropout)
        self.leave = nn.Linear(7, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        x = self.enter(x)
        for block in self.blocks:
            x = self.dropout(block(x))
        output: Tensor = self.leave(x)
        return output


class Recomputed(Tower):
    """Each block is a checkpoint."""

    reentrant = False

    def forward(self, x: Tensor) -> Tensor:
        x = self.enter(x)
        for block in self.blocks:
            x = self.dropout(checkpoint(block, x, use_reentrant=self.reentrant))
        output: Tensor = self.leave(x)
        return output


class Language(nn.Module):
    """A language model in small: its head is tied to its embedding, its blocks are the units."""

    def __init__(self, vocabulary: int = 37, dim: int = 10, blocks: int = 3) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, dim)
        self.blocks = nn.ModuleList(Block(dim) for _ in range(blocks))
        self.norm = nn.LayerNorm(dim)
        self.head = nn.Linear(dim, vocabulary, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        logits: Tensor = self.head(self.norm(x))
        return logits


class Odd(Language):
    """`Language` with parameters of every awkward kind beside it."""

    def __init__(self) -> None:
        super().__init__()
        first, second, third = self.blocks
        second.up.weight = first.up.weight  # tied across units
        third.norm.requires_grad_(False)  # frozen inside a trained unit
        for parameter in second.norm.parameters():
            parameter.requires_grad_(False)
        self.unused = nn.Parameter(torch.randn(7, 3))
        self.empty = nn.Parameter(torch.empty(0, 4))
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.single = nn.Parameter(torch.randn(1))  # smaller than the axis
        self.wide = nn.Parameter(torch.randn(1, 10))  # one row: one rank owns all of it
        self.turned = nn.Parameter(torch.randn(10, 6).t())  # not contiguous
        self.steps = nn.Parameter(torch.tensor([3, 4]), requires_grad=False)  # integers
        self.wave = nn.Parameter(torch.randn(5, dtype=torch.complex64))
        self.precise = nn.Parameter(torch.randn(3, dtype=torch.float64))

    def forward(self, tokens: Tensor) -> Tensor:
        logits = super().forward(tokens)
        extra = self.scale * self.single * self.wide.sum() + (self.turned**2).mean() + self.steps.sum()
        extra = extra + self.wave.abs().sum() + self.precise.float().sum() + self.empty.sum()
        return logits * (1 + 0.01 * extra)


def batch(seed: int, rank: int, *, vocabulary: int = 37, rows: int = 3, length: int = 5) -> tuple[Tensor, Tensor]:
    """Tokens and targets of one rank and microbatch."""
    generator = torch.Generator().manual_seed(1000 * seed + rank)
    tokens = torch.randint(0, vocabulary, (rows, length + 1), generator=generator)
    return tokens[:, :-1], tokens[:, 1:]
