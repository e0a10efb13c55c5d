"""What a step asks of the host: calls of Python and C functions per unit, which no busy machine can change.

`examples/benchmarks/hosts.py` measures the time; this bound sees what makes it grow before anyone measures. It only falls.
"""

import cProfile
import gc
import pstats

import pytest
import torch
from torch import nn

from tests.support.groups import pretended
from tests.support.programs import STAGES

CALLS_PER_UNIT = {"replicate": 472, "zero1": 363, "zero2": 346, "zero3": 427}
"""Most calls of a unit of six parameters in a forward and a backward, with those of torch itself. Lower it with each gain."""

CALLS_FOR_CONSTANTS = 42
"""How many more they may be with four buffers in a unit that never change, of which one is large."""

UNITS, STEPS = 8, 3


class Unit(nn.Module):
    """Six small parameters."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x


class WithConstants(Unit):
    """Has buffers that never change, such as masks and frequencies."""

    def __init__(self):
        super().__init__()
        for i in range(4):
            self.register_buffer(f"constant_{i}", torch.zeros(64 if i else 1 << 20))


def calls_per_unit(stage, unit=Unit):
    """Calls of functions in a training step, over the number of units, on one of two pretended ranks."""
    with pretended(2) as mesh:
        plain = nn.Sequential(*(unit() for _ in range(UNITS)))
        model = STAGES[stage](plain, mesh, units=unit)
        x = torch.randn(2, 8)
        parameters = [*model.parameters()]  # outside: to list them is no part of a step

        def step():
            model(x).sum().backward()
            for parameter in parameters:
                parameter.grad = None

        for _ in range(4):  # what is made once is made
            step()
        profile = cProfile.Profile()
        gc.disable()  # a collection calls back, sometimes
        try:
            profile.enable()
            for _ in range(STEPS):
                step()
            profile.disable()
        finally:
            gc.enable()
    stats = pstats.Stats(profile)
    return stats.total_calls / STEPS / UNITS


@pytest.mark.parametrize("stage", CALLS_PER_UNIT)
def test_a_step_asks_no_more_of_the_host_than_it_did(stage):
    found = calls_per_unit(stage)
    assert round(found) <= CALLS_PER_UNIT[stage], f"{found} calls per unit"


def test_buffers_that_never_change_are_read_ever_more_rarely():
    """To read all of them in every forward took time, and a wait on an accelerator."""
    assert calls_per_unit("zero3", WithConstants) - calls_per_unit("zero3") <= CALLS_FOR_CONSTANTS


def test_the_count_sees_a_call_more_per_unit(monkeypatch):
    """A bound is worth something if what it is about moves the number."""
    from zero_fn.runtime.unit import Unit

    before, reshard = calls_per_unit("zero3"), Unit.reshard
    monkeypatch.setattr(Unit, "reshard", lambda unit: reshard(unit))
    assert calls_per_unit("zero3") >= before + 1
