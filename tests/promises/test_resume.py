"""N7: saving, starting fresh processes and going on gives the bits of a run that was never interrupted."""

from __future__ import annotations

import tempfile

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

from tests.support.programs import STAGES
from tests.support.ranks import Ranks, axis
from tests.support.wholes import named_fulls
from tests.support.worlds import WIDTH, Tower, noise

STEPS = 3


class Run:
    """A model with dropout, its optimizer, schedule and random numbers, all of which belong to a checkpoint."""

    def __init__(self, stage: str, seed: int) -> None:
        torch.manual_seed(seed)
        self.model: nn.Module = STAGES[stage](Tower(dropout=0.2), axis())
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-2, amsgrad=True)
        self.schedule = torch.optim.lr_scheduler.CosineAnnealingLR(self.optimizer, 2 * STEPS)
        torch.manual_seed(100 + dist.get_rank())
        self.step = 0

    def train(self) -> None:
        for _ in range(STEPS):
            self.model(noise(4, WIDTH, seed=self.step)).square().mean().backward()
            nn.utils.clip_grad_norm_(self.model.parameters(), 0.5)
            self.optimizer.step()
            self.optimizer.zero_grad()
            self.schedule.step()
            self.step += 1

    def states(self) -> dict[str, object]:
        model, optimizer = get_state_dict(self.model, self.optimizer)
        own = {"random": torch.get_rng_state(), "step": self.step, "schedule": self.schedule.state_dict()}
        return {"model": model, "optimizer": optimizer, f"rank {dist.get_rank()}": own}

    def load(self, folder: str) -> None:
        states = self.states()
        dcp.load(states, checkpoint_id=folder)
        set_state_dict(
            self.model,
            self.optimizer,
            model_state_dict=states["model"],  # type: ignore[arg-type]
            optim_state_dict=states["optimizer"],  # type: ignore[arg-type]
        )
        own: dict = states[f"rank {dist.get_rank()}"]  # type: ignore[assignment]
        torch.set_rng_state(own["random"])
        self.step = own["step"]
        self.schedule.load_state_dict(own["schedule"])

    def result(self) -> dict[str, Tensor]:
        found: dict[str, Tensor] = dict(self.model.named_parameters())
        for name, parameter in self.model.named_parameters():
            for key, value in self.optimizer.state[parameter].items():
                found[f"{key} of {name}"] = value
        found = named_fulls(found)
        found["random"] = torch.get_rng_state()
        found["lr"] = torch.tensor(self.schedule.get_last_lr())
        return found


def _uninterrupted(folder: str, stage: str) -> dict[str, Tensor]:
    run = Run(stage, seed=0)
    run.train()
    dcp.save(run.states(), checkpoint_id=folder)
    run.train()
    return run.result()


def _resumed(folder: str, stage: str) -> dict[str, Tensor]:
    run = Run(stage, seed=7)
    run.load(folder)
    run.train()
    return run.result()


@pytest.mark.parametrize(
    ("stage", "n"), [("zero3", 3), *(pytest.param(stage, 2, marks=pytest.mark.long) for stage in STAGES)]
)
def test_n7_a_run_resumed_in_fresh_processes_is_the_uninterrupted_one(ranks: Ranks, stage: str, n: int) -> None:
    fresh = Ranks()  # other processes than those of the session
    try:
        with tempfile.TemporaryDirectory() as folder:
            expected = ranks(n).run(_uninterrupted, folder, stage)
            resumed = fresh(n).run(_resumed, folder, stage)
    finally:
        fresh.close()
    for one, other in zip(expected, resumed, strict=True):
        assert one.keys() == other.keys()
        assert [name for name in one if not torch.equal(one[name], other[name])] == []
