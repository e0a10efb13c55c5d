"""A model that a config trains, and a loop as it was written for DeepSpeed."""

import zero_fn as zf
from tests.support.seeds import seed_generator
from tests.support.wholes import full
from tests.support.worlds import WIDTH, Tower, noise
from tests.units.deepspeed.configs import BASES, merged

__all__ = [
    "BASE",
    "MICRO",
    "MICROBATCHES",
    "RATES",
    "STEPS",
    "built",
    "furthest",
    "loss_of",
    "step_of",
    "trained",
    "values",
    "zero",
]

BASE = BASES["base"]
MICRO, STEPS, MICROBATCHES = 3, 4, 2
RATES = [0.0, 0.0, 0.02 * (1 / 3), 0.02 * (2 / 3)]


def zero(stage, **more):
    return merged(BASE, {"zero_optimization": {"stage": stage, **more}})


def built():
    seed_generator(0)
    return Tower()


def loss_of(model, step, number):
    return model(noise(MICRO, WIDTH, seed=10 * step + number)).float().square().mean()


def step_of(setup, step, factor=1.0):
    """A step, as a loop that was written for a config has it; `factor` times the gradients, such as infinity."""
    with zf.accumulate(setup.model):
        for number in range(setup.accumulation_steps):
            (setup.scaled(loss_of(setup.model, step, number)) * factor).backward()
    return setup.step()


def trained(setup):
    """Parameters after a few steps."""
    for step in range(STEPS):
        step_of(setup, step)
        assert all(parameter.grad is None for parameter in setup.model.parameters())
    return values(setup.model)


def values(model):
    return {name: full(parameter) for name, parameter in model.named_parameters()}


def furthest(one, other):
    assert one.keys() == other.keys()
    return max(float((one[name] - other[name]).abs().max()) for name in one if one[name].numel())
