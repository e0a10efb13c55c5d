"""Learning rates and scales of losses are those of DeepSpeed 0.19.8, which `golden.json` holds.

They were written down by its own classes, with a base rate of 0.005 and random overflows.
"""

import json
import math
from pathlib import Path

import pytest
import torch
from torch import nn

from tests.support.messages import refused
from zero_fn.deepspeed.entries import Entries
from zero_fn.deepspeed.loss_scale import Scaler
from zero_fn.deepspeed.schedulers import rates_of

GOLDEN = json.loads(Path(__file__).with_name("golden.json").read_text())


def scheduled(case):
    rates = rates_of(Entries({"scheduler": {"type": case["type"], "params": case["params"]}}))
    assert rates is not None
    optimizer = torch.optim.Adam([nn.Parameter(torch.zeros(1))], lr=case["own"])
    return optimizer, rates(optimizer)


def stepped(optimizer, rates, steps):
    found = []
    for _ in range(steps):
        (group,) = optimizer.param_groups
        found.append((group["lr"], *group["betas"]))
        optimizer.step()
        rates.step()
    return found


@pytest.mark.parametrize("case", GOLDEN["rates"], ids=lambda case: f"{case['type']} {case['params']}")
def test_rates_are_those_of_deepspeed(case):
    optimizer, rates = scheduled(case)
    betas = case.get("betas", [[0.9, 0.999]] * len(case["rates"]))
    goldens = [(rate, *both) for rate, both in zip(case["rates"], betas, strict=True)]
    for found, golden in zip(stepped(optimizer, rates, len(goldens)), goldens, strict=True):
        assert found == pytest.approx(golden, rel=1e-15, abs=0)


def scaler_of(case):
    rule = {name: case[name] for name in ("first", "window", "hysteresis", "least")}
    return Scaler("cpu", is_refilled=case["consecutive"], **rule)


def scaled_step(scaler, optimizer, *, overflows):
    (parameter,) = optimizer.param_groups[0]["params"]
    (scaler.scale(parameter.sum()) * (math.inf if overflows else 1)).backward()
    scaler.unscale_(optimizer)
    before = parameter.detach().clone()
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad()
    assert scaler.has_skipped == overflows == torch.equal(parameter, before)
    return scaler.get_scale()


@pytest.mark.parametrize("case", GOLDEN["scales"], ids=lambda case: f"hysteresis {case['hysteresis']}")
def test_the_scale_of_the_loss_moves_as_that_of_deepspeed(case):
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=0.1)
    scaler = scaler_of(case)
    for number, (overflows, scale) in enumerate(zip(case["overflows"], case["scales"], strict=True)):
        if number == 20:  # goes on where it was saved
            scaler, saved = scaler_of(case), scaler.state_dict()
            scaler.load_state_dict(saved)
        assert scaled_step(scaler, optimizer, overflows=overflows) == scale


def test_a_fixed_scale_stays():
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=0.1)
    scaler = Scaler("cpu", first=128.0, window=None, hysteresis=1, is_refilled=False, least=1.0)
    assert [scaled_step(scaler, optimizer, overflows=n == 1) for n in range(4)] == [128.0] * 4


def test_overflows_at_the_least_scale_raise():
    """As in DeepSpeed: no step would ever be taken again."""
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=0.1)
    scaler = Scaler("cpu", first=2.0, window=1000, hysteresis=1, is_refilled=False, least=1.0)
    assert scaled_step(scaler, optimizer, overflows=True) == 1.0
    with refused("scale_of_the_loss_is_at_its_least"):
        scaled_step(scaler, optimizer, overflows=True)
