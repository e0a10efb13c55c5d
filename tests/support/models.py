"""Small models with everything that goes wrong: uneven rows, ties, frozen, unused, tiny, scalar and empty parameters."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

__all__ = ["Block", "Language", "Odd", "batch"]


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
