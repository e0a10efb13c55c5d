"""Bytes held and sent are those of the plan, and those of the paper."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext

import pytest
import torch
from torch import Tensor, nn

import zero_fn as zf
from tests.support.models import Language
from tests.support.on_ranks import on_ranks
from tests.support.programs import STAGES, loss_of
from tests.support.ranks import axis
from zero_fn.resting import local_of


def _built(stage: str, is_mixed: bool = False, build: Callable[[], nn.Module] = Language) -> nn.Module:
    torch.manual_seed(0)
    model = STAGES[stage](build(), axis())
    return zf.precision(model) if is_mixed else model


@pytest.mark.parametrize(("is_mixed", "microbatches"), [(False, 3), (True, 1)])
@pytest.mark.parametrize("stage", STAGES)
@on_ranks(3)
def test_bytes_are_those_of_the_plan(stage: str, is_mixed: bool, microbatches: int) -> None:
    model = _built(stage, is_mixed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for step in range(3):
        with zf.traffic() as sent, zf.accumulate(model) if microbatches > 1 else nullcontext():
            for i in range(microbatches):
                loss_of(model, 10 * step + i).backward()
        if step:
            assert sent.nbytes == zf.plan(model, backwards=microbatches).sent_nbytes
            plan, held = zf.plan(model), zf.held(model, optimizer)
            for name in ("parameters", "gradients", "optimizer"):
                assert getattr(held, name) == getattr(plan.held, name) + getattr(plan.padding, name), name
        optimizer.step()
        optimizer.zero_grad()


class Even(nn.Module):
    """Every parameter divides evenly, and into aligned shards: no padding."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(128, 128) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x).tanh()
        return x


@pytest.mark.parametrize("stage", STAGES)
@on_ranks(4)
def test_bytes_follow_the_formulas_of_the_paper(stage: str) -> None:
    n = axis().size()
    model = _built(stage, build=Even)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for _ in range(2):
        with zf.traffic() as sent:
            model(torch.randn(2, 128)).square().mean().backward()
        optimizer.step()
    held, whole = zf.held(model, optimizer), 4 * sum(p.numel() for p in model.parameters())
    shard = whole // n
    assert [held.parameters, held.gradients, held.optimizer] == {
        "replicate": [whole, whole, 2 * whole],
        "zero1": [whole, whole, 2 * shard],
        "zero2": [whole, shard, 2 * shard],
        "zero3": [shard, shard, 2 * shard],
    }[stage]
    volume = (n - 1) * shard
    kept = volume // 4  # the last of four equal layers stays gathered from forward to backward
    times = {"replicate": 2, "zero1": 2, "zero2": 2, "zero3": 3}[stage]
    assert sent.nbytes == times * volume - kept * (stage == "zero3")
    optimizer.zero_grad()
    assert zf.held(model, optimizer).total == held.total - held.gradients


@on_ranks(3)
def test_resting_bytes_are_those_of_the_shards() -> None:
    """A rank rests with its shards, each padded by less than a row and a cache line."""
    for stage in STAGES:
        model = _built(stage, build=lambda: nn.Sequential(*(nn.Linear(64, 64) for _ in range(8))))
        keeps_whole = stage in ("zero1", "zero2")
        sizes = [p.numel() if keeps_whole else local_of(p).numel() for p in model.parameters()]
        padding = sum(4 * p.numel() // len(p) + 64 for p in model.parameters()) * axis().size()
        assert 4 * sum(sizes) <= zf.held(model).parameters <= 4 * sum(sizes) + padding, stage
