"""The peak of a ZeRO-3 step, counted: every storage that an operation makes, and the blocks of the rank's arena."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import zero_fn as zf
from tests.support.ranks import Ranks, axis
from tests.support.storages import Storages
from zero_fn.one_host.arena import Arena

WIDTH = 128


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.relu(self.up(x)))


class Recomputed(Block):
    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = checkpoint(super().forward, x, use_reentrant=True)
        return y


def _peak(blocks: int, block: type[Block]) -> tuple[float, float]:
    """Storages above the resting parameters and gradients, and arena blocks, at most, in units."""
    model = zf.zero3(nn.Sequential(*(block() for _ in range(blocks))), axis())
    unit_nbytes = sum(parameter.numel() for parameter in model[0].parameters()) * 4
    arena_nbytes = 0
    allocate = Arena.allocate

    def counted(arena: Arena, nbytes: int) -> int | None:
        nonlocal arena_nbytes
        start = allocate(arena, nbytes)
        arena_nbytes = max(arena_nbytes, sum(end - begin for begin, end in arena._blocks))
        return start

    Arena.allocate = counted  # type: ignore[method-assign]
    try:
        for _ in range(2):  # the second step follows a recorded schedule
            model.zero_grad()
            with Storages() as storages:
                model(torch.randn(1, WIDTH, requires_grad=True)).square().mean().backward()
                gradients = zf.held(model).gradients
    finally:
        Arena.allocate = allocate  # type: ignore[method-assign]
    return (storages.peak - gradients) / unit_nbytes, arena_nbytes / unit_nbytes


@pytest.mark.parametrize("n", [2, 4])
def test_a_zero3_step_needs_four_units_above_rest_whatever_the_depth(ranks: Ranks, n: int) -> None:
    """Weights and gradients of one unit and of what is under way, of which a part rests; the arena, where messages lie until
    all peers read them, holds two units more at the most."""
    for blocks in (4, 10):
        for storages, arena in ranks(n).run(_peak, blocks, Block):
            assert 1 < storages <= 4 - 1 / n
            assert arena <= 2.1


@pytest.mark.parametrize("n", [2, 4])
def test_reentrant_checkpoints_need_little_more_whatever_the_depth(ranks: Ranks, n: int) -> None:
    """Reductions that are on no schedule were once waited for at the end of the backward: five units of ten blocks.

    A unit stays gathered until the backward around its recomputation goes on, so beside its own reduction too.
    """
    for blocks in (4, 10):
        for storages, arena in ranks(n).run(_peak, blocks, Recomputed):
            assert 1 < storages <= 4 + 1.1 / n
            assert arena <= 2.1
