"""Nothing grows: neither with steps nor with models that come and go, and a deleted model is gone at once.

Profile `dev` does fewer of both than `ci` and `deep`. The collector of garbage is off while it is counted, so that a cycle of
references is growth too.
"""

from __future__ import annotations

import gc
import os
import sys
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass

import pytest
import torch
from torch import nn

import zero_fn as zf
from tests.support.models import Language, Odd
from tests.support.profiles import PROFILE
from tests.support.programs import STAGES, loss_of
from tests.support.ranks import Ranks, axis

pytestmark = [
    pytest.mark.skipif(sys.platform != "linux", reason="memory is read from /proc"),
    pytest.mark.timeout(1100),
]

IS_SHORT = PROFILE == "dev"
STEPS = 75 if IS_SHORT else 2000
CYCLES = 15 if IS_SHORT else 500
WARM_UP_STEPS, WARM_UP_CYCLES = (25, 6) if IS_SHORT else (100, 250)
"""The allocator reaches its size within 250 cycles of replicated models: 652 KiB, then 40 KiB more in 1,750 cycles."""

TOLERATED_NBYTES = 2**20
TOLERATED_OBJECTS = 20
"""11 to 14 were seen, those of the first footprint among them; one object more for every cycle would be too many."""


@dataclass(frozen=True)
class Footprint:
    """What this process holds.

    Attributes:
        resident_nbytes: Memory, after Python and the allocator have given back what they could.
        files: Open descriptors.
        arenas: Mappings of shared memory, of this rank and of peers.
        tensors: Tensors that Python holds.
        objects: All objects with references.
    """

    resident_nbytes: int
    files: int
    arenas: int
    tensors: int
    objects: int

    @staticmethod
    def now() -> Footprint:
        import ctypes  # here, because it cannot be sent to ranks

        objects = gc.get_objects()
        tensors = sum(issubclass(type(thing), torch.Tensor) for thing in objects)
        count = len(objects)
        del objects
        # Cycles have been counted. What a collection frees beside them are Python's lists of free tuples, which grow to 2000
        # of each length while there is none.
        gc.collect()
        ctypes.pythonapi.malloc_trim(0)
        with open("/proc/self/statm") as statm, open("/proc/self/maps") as maps:
            pages, mappings = int(statm.read().split()[1]), maps.read()
        return Footprint(
            pages * os.sysconf("SC_PAGE_SIZE"),
            len(os.listdir("/proc/self/fd")),
            mappings.count("memfd:zero_fn"),
            tensors,
            count,
        )


def _optimizer(model: nn.Module) -> torch.optim.Optimizer:
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    return torch.optim.AdamW(trained, lr=1e-3, foreach=True)


def _step(model: nn.Module, optimizer: torch.optim.Optimizer, number: int) -> None:
    """Every other step accumulates two backwards."""
    accumulates = number % 2 == 1
    with zf.accumulate(model) if accumulates else nullcontext():
        for seed in range(2 if accumulates else 1):
            loss_of(model, seed).backward()
    optimizer.step()
    optimizer.zero_grad()


def _over_steps(stage: str, warm_up: int, steps: int) -> tuple[Footprint, Footprint]:
    model = STAGES[stage](Language(blocks=1), axis())
    optimizer = _optimizer(model)
    return _around(lambda number: _step(model, optimizer, number), warm_up, steps)


def _over_cycles(stage: str, warm_up: int, cycles: int) -> tuple[Footprint, Footprint]:
    def cycle(number: int) -> None:
        model = STAGES[stage](Odd(), axis())
        _step(model, _optimizer(model), number)

    return _around(cycle, warm_up, cycles)


def _around(act: Callable[[int], None], warm_up: int, times: int) -> tuple[Footprint, Footprint]:
    gc.collect()
    gc.disable()
    try:
        for number in range(warm_up):
            act(number)
        gc.collect()  # what the first calls of torch left
        before = Footprint.now()
        for number in range(times):
            act(number)
        return before, Footprint.now()
    finally:
        gc.enable()


def _require_no_growth(footprints: list[tuple[Footprint, Footprint]]) -> None:
    for before, after in footprints:
        print(before, after)
        assert after.files == before.files
        assert after.arenas == before.arenas
        assert after.tensors == before.tensors
        assert after.objects <= before.objects + TOLERATED_OBJECTS
        assert after.resident_nbytes <= before.resident_nbytes + TOLERATED_NBYTES


@pytest.mark.parametrize("stage", STAGES)
def test_steps_leave_nothing_behind(ranks: Ranks, stage: str) -> None:
    _require_no_growth(ranks(2, deadline_s=1000).run(_over_steps, stage, WARM_UP_STEPS, STEPS))


@pytest.mark.parametrize("stage", STAGES)
def test_models_that_come_and_go_leave_nothing_behind(ranks: Ranks, stage: str) -> None:
    """Nor the shared memory and the open files of their transports, of which every transform makes a new one."""
    _require_no_growth(ranks(2, deadline_s=1000).run(_over_cycles, stage, WARM_UP_CYCLES, CYCLES))
