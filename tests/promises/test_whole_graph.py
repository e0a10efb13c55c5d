"""`torch.compile(model, fullgraph=True)`: one graph may hold the inside of one unit, and not several units."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch._dynamo.utils
from torch import Tensor, nn

import zero_fn as zf
from tests.support.ranks import Ranks, axis
from tests.support.worlds import noise


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.linear(x))


class Chain(nn.Module):
    def __init__(self, blocks: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(blocks))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x


def _gradients(model: nn.Module) -> list[Tensor]:
    return [parameter.grad.full_tensor() for parameter in model.parameters()]  # type: ignore[union-attr]


def _refused(stage: str) -> tuple[str, bool]:
    torch._dynamo.reset()
    torch.manual_seed(0)
    model = getattr(zf, stage)(Chain(3), axis(), units=Block)
    x = noise(4, 8, seed=0)
    with pytest.raises(Exception, match="zero_fn gathers a unit here") as raised:
        torch.compile(model, backend="eager", fullgraph=True)(x)
    model(x).square().mean().backward()  # the model is as it was
    found = _gradients(model)
    torch.manual_seed(0)
    other = getattr(zf, stage)(Chain(3), axis(), units=Block)
    other(x).square().mean().backward()
    return str(raised.value), all(map(torch.equal, found, _gradients(other)))


@pytest.mark.parametrize("stage", ["replicate", "zero1", "zero2", "zero3"])
def test_one_graph_of_several_units_is_refused(ranks: Ranks, stage: str) -> None:
    """By the compiler, in our words, on every rank; the model goes on."""
    for said, is_as_it_was in ranks(2, deadline_s=200).run(_refused, stage):
        assert "torch.compile(model) without fullgraph=True, or block.compile() for each block" in said
        assert is_as_it_was


def _deep(way: str) -> tuple[int, list[Tensor]]:
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    torch.manual_seed(0)
    model: Any = zf.zero3(Chain(10), axis(), units=Block)
    for i, block in enumerate(model.blocks):
        if way == "in place":
            block.compile(backend="eager", fullgraph=True)
        elif way == "around":
            model.blocks[i] = torch.compile(block, backend="eager", fullgraph=True)
    for _ in range(2):
        model(noise(4, 8, seed=0)).sum().backward()
    return torch._dynamo.utils.counters["stats"]["unique_graphs"], _gradients(model)


@pytest.mark.parametrize("way", ["in place", "around"])
def test_the_inside_of_a_unit_is_one_graph_that_blocks_share(ranks: Ranks, way: str) -> None:
    """More blocks than the compiler compiles one function for (8)."""
    case = ranks(2, deadline_s=200)
    for (graphs, found), (_, expected) in zip(case.run(_deep, way), case.run(_deep, "plain"), strict=True):
        assert graphs == 2, "one for inputs without gradients, and one for all other blocks"
        assert all(map(torch.equal, found, expected))
