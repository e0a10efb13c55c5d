"""Bytes held and sent are those of the paper; and those of the plan, by the laws (`property_tests/test_plan_laws.py`)."""

import pytest
import torch
from torch import nn

import zero_fn as zf
from tests.support.on_ranks import on_ranks
from tests.support.programs import STAGES
from tests.support.ranks import axis
from zero_fn.values.dtensors import local_of


def _even():
    """Every parameter divides evenly, and into aligned shards: no padding."""
    return nn.Sequential(*(nn.Linear(128, 128) for _ in range(4)))


@pytest.mark.parametrize("stage", STAGES)
@on_ranks(4)
def test_bytes_follow_the_formulas_of_the_paper(stage):
    n = axis().size()
    model = STAGES[stage](_even(), axis())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for _ in range(2):
        with zf.traffic() as sent:
            model(torch.randn(2, 128)).square().mean().backward()
        optimizer.step()
    held, whole = zf.memory(model, optimizer), 4 * sum(p.numel() for p in model.parameters())
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
    assert zf.memory(model, optimizer).total == held.total - held.gradients


def _wide():
    """So large that padding does not show."""
    return nn.Sequential(*(nn.Sequential(nn.Linear(256, 256, bias=False), nn.ReLU()) for _ in range(4)))


ROUNDED = {"rest": torch.bfloat16, "round": "stochastic", "seed": 5}
NARROW = {"compute": torch.bfloat16, "grads": torch.bfloat16}
BYTES = {  # of each parameter on two ranks, in the order of STAGES
    "narrow gradients": (NARROW, lambda optimizer: optimizer, (16, 10, 9, 7)),
    "stochastic": (ROUNDED, zf.streamed, (12, 8, 7, 6)),
    "kahan": ({"rest": torch.bfloat16, "round": "kahan"}, zf.streamed, (14, 9, 8, 7)),
    "stochastic, at owners": (ROUNDED, zf.by_owner, (8, 8, 7, 6)),
}


@pytest.mark.parametrize("kind", BYTES)
@on_ranks(2)
def test_narrow_values_take_the_bytes_that_they_have(kind):
    """As they are planned before the optimizer is wrapped, and after it."""
    options, wrap, papers = BYTES[kind]
    for each, (stage, place) in zip(papers, STAGES.items(), strict=True):
        model = place(zf.precision(_wide(), **options), axis())
        stock = torch.optim.AdamW(model.parameters(), fused=wrap is zf.streamed)
        plans = [zf.plan(model, stock)] if wrap is not zf.by_owner else []
        optimizer = wrap(stock)
        for _ in range(2):
            with zf.traffic() as sent:
                model(torch.ones(2, 256)).float().sum().backward()
            optimizer.step()
        plans.append(zf.plan(model, optimizer))
        wanted = each * 4 * 256 * 256
        assert [zf.memory(model, optimizer).total, *(plan.memory.total for plan in plans)] == [wanted] * (
            len(plans) + 1
        ), stage
        if kind == "narrow gradients":
            shards = 1 if stage == "replicate" else 2
            assert plans[-1].in_flight_nbytes >= 4 * 4 * 256 * 256 // shards, "a stock step widens them"
        if wrap is not zf.by_owner:
            assert sent.nbytes == plans[-1].sent_nbytes, stage


@pytest.mark.parametrize("stage", ["zero2", "zero3"])
@on_ranks(2)
def test_only_adapters_are_reduced_and_a_frozen_base_is_sharded_in_its_dtype(stage):
    """LoRA, Hu et al. 2021, beside a base of 8 bits."""
    layers = nn.Sequential(*(nn.Sequential(nn.Linear(6, 2, False), nn.Linear(2, 6, False)) for _ in range(3)))
    for layer in layers:
        layer.base = nn.Parameter(torch.ones(6, 6, dtype=torch.int8), requires_grad=False)
    model = STAGES[stage](nn.Sequential(nn.Linear(6, 6).requires_grad_(False), layers), axis(), units="1.*")
    for _ in range(2):
        with zf.traffic() as sent:
            model(torch.ones(2, 6)).sum().backward()
    assert sent.by_collective["reduce-scatter"] == 3 * 4 * (2 * 6 + 6 * 2) / 2, "each sends half of them"
    bases = [parameter for name, parameter in model.named_parameters() if name.endswith("base")]
    assert {base.dtype for base in bases} == {torch.int8}
    assert sum(local_of(base).numel() for base in bases) == 3 * 6 * 6 / 2
