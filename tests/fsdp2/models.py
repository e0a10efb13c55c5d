"""The models that FSDP2's tests are about, in a few lines each."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from tests.support.worlds import Trial, World, differences, noise

__all__ = ["DIM", "Mlp", "Stacked", "run_all", "stack", "train"]

DIM = 6


class Mlp(nn.Module):
    """Two linears of widths that two ranks do not divide, and a residual."""

    def __init__(self, hidden: int = 7) -> None:
        super().__init__()
        self.enter, self.leave = nn.Linear(DIM, hidden), nn.Linear(hidden, DIM)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = x + self.leave(torch.relu(self.enter(x)))
        return y


def stack(depth: int = 3) -> nn.Sequential:
    """Several of them, in a row."""
    return nn.Sequential(*(Mlp(7 + number) for number in range(depth)))


class Stacked(nn.Module):
    """A stack between two parameters of the root."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(DIM))
        self.layers = nn.ModuleList(Mlp() for _ in range(3))
        self.head = nn.Linear(DIM, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = x * self.scale
        for layer in self.layers:
            x = layer(x)
        y: Tensor = self.head(x)
        return y


def train(world: World, model: nn.Module, loss: object = None, steps: int = 3) -> None:
    """Some steps of Adam; everything is noted."""
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    for step in range(steps):
        x = noise(4, DIM, seed=step)
        world.step(model, optimizer, loss(model, x) if callable(loss) else model(x).square().mean())


def run_all(trials: Sequence[Trial]) -> list[str]:
    """Where a stage differs from replicas in any trial. On the ranks."""
    return [f"{trial.__name__}: {line}" for trial in trials for line in differences(trial)]
