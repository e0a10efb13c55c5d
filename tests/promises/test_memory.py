"""G48: what is freed, and when: at the end of a step, and with `del model`, without the garbage collector."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import zero_fn as zf
from tests.support.programs import STAGES
from tests.support.ranks import Ranks, axis
from tests.support.worlds import ALL, WIDTH, Tower, noise
from zero_fn.resting import local_of
from zero_fn.runtime.entry import runs_of, units_of
from zero_fn.runtime.group import Buffer
from zero_fn.runtime.kind import Level


class Storages:
    """Watches every storage that the runtime allocates for gathered parameters."""

    def __init__(self) -> None:
        self.seen: list[weakref.ref[torch.UntypedStorage]] = []
        self._allocate = Buffer.allocate

    def __enter__(self) -> Storages:
        seen, allocate = self.seen, self._allocate

        def watched(of: Buffer) -> torch.Tensor:
            buffer = allocate(of)
            if of.level is Level.WHOLE:
                seen.append(weakref.ref(buffer.untyped_storage()))
            return buffer

        Buffer.allocate = watched  # type: ignore[method-assign, assignment]
        return self

    def __exit__(self, *_: object) -> None:
        Buffer.allocate = self._allocate  # type: ignore[method-assign]

    @property
    def alive(self) -> int:
        """How many still have memory."""
        return sum(1 for reference in self.seen if (storage := reference()) is not None and storage.nbytes())


def _train(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    for step in range(2):
        model(noise(4, WIDTH, seed=step)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def _accumulate(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    with zf.accumulate(model):
        for step in range(2):
            model(noise(4, WIDTH, seed=step)).square().mean().backward()
    optimizer.step()


def _evaluate(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    with torch.no_grad():
        model(noise(4, WIDTH, seed=0))


def _fail(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    try:
        model(noise(4, WIDTH + 1, seed=0))
    except RuntimeError:  # `pytest.raises` would keep its frames in a cycle
        return
    raise AssertionError("nothing was raised")


PROGRAMS: dict[str, Callable[[nn.Module, torch.optim.Optimizer], None]] = {
    "a step": _train,
    "accumulate": _accumulate,
    "evaluation": _evaluate,
    "a failed forward": _fail,
}


def _freed(program: str, stage: str) -> None:
    gc.collect()
    gc.disable()
    try:
        with Storages() as storages:
            torch.manual_seed(0)
            model: Any = STAGES[stage](Tower(), axis())
            kept = storages.alive
            resting = zf.held(model).parameters
            assert kept == (0 if stage in ("replicate", "zero3") else len(units_of(model)))
            optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
            PROGRAMS[program](model, optimizer)
            assert storages.alive == kept, "gathered parameters were not freed"
            assert zf.held(model).parameters == resting
            if stage == "zero3" and program != "a failed forward":
                assert len(storages.seen) >= 4, "nothing was gathered"
            watched: dict[str, weakref.ref[Any]] = {
                name: weakref.ref(local_of(p).untyped_storage()) for name, p in model.named_parameters()
            }
            watched |= {
                f"state of {i}": weakref.ref(value)
                for i, s in enumerate(optimizer.state.values())
                for value in s.values()
            }
            watched |= {f"parameter {name}": weakref.ref(p) for name, p in model.named_parameters()}
            watched |= {f"unit {unit.name}": weakref.ref(unit) for unit in units_of(model)}
            watched |= {f"run {unit.name}": weakref.ref(runs_of(model, verb="test")[0]) for unit in units_of(model)}
            watched["model"] = weakref.ref(model)
            del model, optimizer
            assert [name for name, reference in watched.items() if reference() is not None] == []
            assert storages.alive == 0
    finally:
        gc.enable()


@pytest.mark.parametrize("program", PROGRAMS)
@pytest.mark.parametrize("stage", ALL)
def test_g48_memory_is_freed_after_a_step_and_with_the_model(ranks: Ranks, stage: str, program: str) -> None:
    ranks(2).run(_freed, program, stage)


def _resting_bytes() -> None:
    """A rank rests with its shards, each padded by less than a row and a cache line."""
    for stage in ALL:
        model: Any = STAGES[stage](nn.Sequential(*(nn.Linear(64, 64) for _ in range(8))), axis())
        keeps_whole = stage in ("zero1", "zero2")
        sizes = [p.numel() if keeps_whole else local_of(p).numel() for p in model.parameters()]
        rows = [parameter.numel() // len(parameter) for parameter in model.parameters()]
        padding = sum(4 * row + 64 for row in rows) * axis().size()
        held = zf.held(model).parameters
        assert 4 * sum(sizes) <= held <= 4 * sum(sizes) + padding, stage


def test_g48_resting_bytes_are_those_of_the_shards(ranks: Ranks) -> None:
    for n in (2, 3):
        ranks(n).run(_resting_bytes)


def _model_dies_first(stage: str) -> None:
    """Only the loss is kept; a backward of it touches names of modules that are gone."""
    torch.manual_seed(0)
    model: Any = STAGES[stage](Tower(), axis())
    parameters = list(model.parameters())
    x = noise(4, WIDTH, seed=0).requires_grad_()
    loss = model(x).square().mean()
    del model
    loss.backward()
    assert x.grad is not None
    assert all(parameter.grad is not None for parameter in parameters)


@pytest.mark.parametrize("stage", ALL)
def test_g48_a_backward_may_outlive_the_model(ranks: Ranks, stage: str) -> None:
    ranks(2).run(_model_dies_first, stage)
