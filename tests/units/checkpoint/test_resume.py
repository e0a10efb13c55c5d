"""A run that is saved, started anew in other processes and loaded goes on as if it had not stopped, to the bit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import lr_scheduler

import zero_fn as zf
from tests.support.groups import alone
from tests.support.programs import STAGES
from tests.support.ranks import Ranks, axis
from tests.support.wholes import named_fulls
from tests.support.worlds import WIDTH, Tower, noise

STEPS = 3


class Run:
    """A model with dropout and batch statistics, its optimizer, schedule and random numbers."""

    def __init__(self, stage: str, dtype: torch.dtype, path: str, seed: int) -> None:
        torch.manual_seed(seed)
        model: nn.Module = nn.Sequential(Tower(dropout=0.2), nn.BatchNorm1d(WIDTH)).to(dtype)
        if stage == "away":
            model = zf.offload(zf.zero3(model, axis()), params=zf.nvme(path), grads=zf.nvme(path))
        elif stage == "local buffers":
            model = zf.zero3(model, axis(), buffers="local")
        else:
            model = STAGES[stage](model, axis())
        self.model, self.dtype = model, dtype
        self.optimizer: Any = torch.optim.AdamW(model.parameters(), lr=1e-2, amsgrad=True)
        self.schedule = torch.optim.lr_scheduler.CosineAnnealingLR(self.optimizer, 2 * STEPS)
        if stage == "away":
            self.optimizer = zf.streamed(self.optimizer, zf.nvme(path), buffer="16MiB", finish="forward")
        torch.manual_seed(100 + dist.get_rank())
        self.step = 0

    def train(self, steps: int = STEPS) -> None:
        for _ in range(steps):
            self.model(noise(4, WIDTH, seed=self.step, dtype=self.dtype)).square().mean().backward()
            nn.utils.clip_grad_norm_(self.model.parameters(), 0.5)
            self.optimizer.step()
            self.optimizer.zero_grad()
            self.schedule.step()
            self.step += 1

    def save(self, folder: str, how: str) -> None:
        extra = {"schedule": self.schedule, "random": torch.get_rng_state(), "step": self.step}
        if how == "sync":
            zf.save(f"{folder}/step-{self.step}", self.model, self.optimizer, extra=extra)
            return
        saving = zf.save_async(f"{folder}/step-{self.step}", self.model, self.optimizer, extra=extra)
        self.train()  # changes everything that is being saved
        saving.wait()

    def load(self, folder: str) -> None:
        found = zf.load(folder, self.model, self.optimizer, extra={"schedule": self.schedule})
        torch.set_rng_state(found["random"])
        self.step = found["step"]

    def result(self) -> dict[str, Tensor]:
        found: dict[str, Tensor] = dict(self.model.state_dict())
        for number, states in self.optimizer.state_dict()["state"].items():
            found |= {f"{number} {name}": value for name, value in states.items()}
        found = named_fulls({name: value for name, value in found.items() if isinstance(value, Tensor)})
        found["random"] = torch.get_rng_state()
        found["lr"] = torch.tensor(self.schedule.get_last_lr())
        return found


def _uninterrupted(folder: str, stage: str, dtype: torch.dtype, how: str) -> dict[str, Tensor]:
    run = Run(stage, dtype, folder, seed=0)
    run.train()
    run.save(folder, how)
    if how == "sync":
        run.train()
    return run.result()


def _resumed(folder: str, stage: str, dtype: torch.dtype) -> dict[str, Tensor]:
    run = Run(stage, dtype, folder, seed=7)
    run.train(1)
    run.load(folder)
    run.train()
    return run.result()


@pytest.mark.parametrize(
    ("stage", "n", "dtype", "how"),
    [
        ("zero1", 2, torch.bfloat16, "async"),
        ("zero3", 3, torch.float32, "sync"),
        ("away", 3, torch.float32, "async"),
        ("zero3", 1, torch.float32, "async"),
        ("local buffers", 2, torch.float32, "async"),
    ],
)
def test_a_run_resumed_in_fresh_processes_is_the_uninterrupted_one(
    ranks: Ranks, stage: str, n: int, dtype: torch.dtype, how: str, tmp_path: Path
) -> None:
    fresh = Ranks()  # other processes than those of the session
    try:
        expected = ranks(n).run(_uninterrupted, str(tmp_path), stage, dtype, how)
        resumed = fresh(n).run(_resumed, str(tmp_path), stage, dtype)
    finally:
        fresh.close()
    for one, other in zip(expected, resumed, strict=True):
        assert one.keys() == other.keys()
        apart = {name: (value.double() - other[name].double()).abs().max().item() for name, value in one.items()}
        assert {name: most for name, most in apart.items() if most != 0} == {}


@pytest.mark.parametrize("is_sharded", [False, True])
def test_a_backward_of_a_forward_before_a_load_is_refused(tmp_path: Path, is_sharded: bool) -> None:
    """It would compute gradients with the weights that were loaded: torch refuses it, too, after `load_state_dict`."""
    with alone() as mesh:
        model: nn.Module = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
        model = zf.zero3(model, mesh) if is_sharded else model
        zf.save(tmp_path / "a", model)
        output = model(torch.ones(1, 3))
        zf.load(tmp_path / "a", model)
        with pytest.raises(zf.StateError if is_sharded else RuntimeError, match=r"stepped|inplace operation"):
            output.sum().backward()


SCHEDULES: dict[str, dict[str, Any]] = {
    "ChainedScheduler": {},
    "ConstantLR": {"total_iters": 3},
    "CosineAnnealingLR": {"T_max": 5},
    "CosineAnnealingWarmRestarts": {"T_0": 2, "T_mult": 2},
    "CyclicLR": {"base_lr": 0.01, "max_lr": 0.2, "step_size_up": 2, "mode": "triangular2"},
    "ExponentialLR": {"gamma": 0.7},
    "LambdaLR": {"lr_lambda": lambda step: 0.9**step},
    "LinearLR": {"total_iters": 4},
    "MultiStepLR": {"milestones": [1, 2, 2, 5], "gamma": 0.3},
    "MultiplicativeLR": {"lr_lambda": lambda step: 1 - 0.1 * step},
    "OneCycleLR": {"max_lr": 0.3, "total_steps": 40},
    "PolynomialLR": {"total_iters": 6, "power": 2.0},
    "ReduceLROnPlateau": {"patience": 1, "cooldown": 1},
    "SequentialLR": {},
    "StepLR": {"step_size": 2},
}
"""Every schedule of torch, by its arguments."""


def _schedule(name: str, optimizer: torch.optim.Optimizer) -> Any:
    """A schedule; one that is made of others has all that torch lets be in it."""
    simple = [each for each, arguments in SCHEDULES.items() if arguments and each != "ReduceLROnPlateau"]
    if name == "SequentialLR":
        return lr_scheduler.SequentialLR(optimizer, [_schedule(each, optimizer) for each in simple], [*range(1, 12)])
    if name == "ChainedScheduler":
        inside = lr_scheduler.ChainedScheduler([_schedule(each, optimizer) for each in simple], optimizer)
        return lr_scheduler.ChainedScheduler([inside, _schedule("SequentialLR", optimizer)], optimizer)
    return getattr(lr_scheduler, name)(optimizer, **SCHEDULES[name])


def _scheduled(name: str) -> tuple[torch.optim.Optimizer, Any]:
    optimizer = torch.optim.SGD([nn.Parameter(torch.ones(2))], lr=0.1, momentum=0.9)
    return optimizer, _schedule(name, optimizer)


def _rates(optimizer: torch.optim.Optimizer, schedule: Any, loss: float) -> list[float]:
    """A step; what it leaves the groups with."""
    optimizer.step()
    schedule.step(*[loss] * isinstance(schedule, lr_scheduler.ReduceLROnPlateau))
    return [value for group in optimizer.param_groups for value in group.values() if isinstance(value, float)]


def test_every_schedule_goes_on_wherever_it_was_saved(tmp_path: Path) -> None:
    """Also those that are made of others: each keeps what it knows in a state of its own kind (MultiStepLR in a Counter)."""
    assert {*SCHEDULES} == {*lr_scheduler.__all__} - {"LRScheduler"}, "torch has others"
    runs, steps = {name: _scheduled(name) for name in SCHEDULES}, 13
    wanted: dict[str, list[list[float]]] = {name: [] for name in SCHEDULES}
    for step in range(steps):
        extra = {f"{name}/{at}": part for name, run in runs.items() for at, part in enumerate(run)}
        zf.save(tmp_path / f"step-{step}", extra=extra)
        for name, run in runs.items():
            wanted[name].append(_rates(*run, loss=-min(step, 4)))
    for start in range(steps):
        resumed = {name: _scheduled(name) for name in SCHEDULES}
        extra = {f"{name}/{at}": part for name, run in resumed.items() for at, part in enumerate(run)}
        zf.load(tmp_path / f"step-{start}", extra=extra)
        for name, run in resumed.items():
            found = [_rates(*run, loss=-min(step, 4)) for step in range(start, steps)]
            assert found == wanted[name][start:], f"{name}, saved at step {start}"


def _statistics(folder: str) -> None:
    """Each rank sees other rows, and keeps its own statistics of them."""
    model = zf.zero3(nn.Sequential(Tower(), nn.BatchNorm1d(WIDTH)), axis(), buffers="local")
    model(noise(4, WIDTH, seed=dist.get_rank()))
    zf.save(f"{folder}/step-1", model)


def _elsewhere(folder: str) -> list[float]:
    """The statistics of rank 0, where they are asked for."""
    model: Any = zf.zero3(nn.Sequential(Tower(), nn.BatchNorm1d(WIDTH)), axis(), buffers="local")
    before = model[1].running_mean.clone()
    with pytest.raises(zf.CheckpointError, match=r"running_mean: 2 ranks have saved different values of a buffer"):
        zf.load(folder, model)
    assert torch.equal(model[1].running_mean, before), "a refused load has changed something"
    asked: Any = zf.zero3(nn.Sequential(Tower(), nn.BatchNorm1d(WIDTH)), axis())
    zf.load(folder, asked)
    found: list[float] = asked[1].running_mean.tolist()
    return found


def test_buffers_of_ranks_are_not_those_of_rank_0_in_silence(ranks: Ranks, tmp_path: Path) -> None:
    ranks(2).run(_statistics, str(tmp_path))
    plain: Any = nn.Sequential(Tower(), nn.BatchNorm1d(WIDTH))
    zf.load(tmp_path, plain)
    assert ranks(3).run(_elsewhere, str(tmp_path)) == [plain[1].running_mean.tolist()] * 3
