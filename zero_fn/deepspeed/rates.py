"""The section `scheduler`: the learning rates of DeepSpeed's warm-ups as a scheduler of torch.

The first step has the least rate, and so has the second: DeepSpeed counts from -1, when nothing has been stepped.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Literal

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from zero_fn.deepspeed.entries import Entries

__all__ = ["Rates", "Warmup", "warmup_of"]

_OF_TORCH = {
    "OneCycle": "torch.optim.lr_scheduler.OneCycleLR(setup.optimizer, ...)",
    "LRRangeTest": "torch.optim.lr_scheduler.LambdaLR(setup.optimizer, lambda step: 1 + step / 2000)",
}


@dataclass(frozen=True, slots=True)
class Warmup:
    """Rates that rise for a while, and then stay, fall to nothing, or fall by a cosine.

    Attributes:
        then: What comes after: WarmupLR, WarmupDecayLR or WarmupCosineLR.
        least: The first rate; of `cosine` as a part of the optimizer's.
        most: The highest rate; None is the optimizer's.
        steps: How many it rises for.
        is_linear: Whether it rises linearly, and not with the logarithm of the step.
        total: Steps of the training; for "hold" without meaning.
        last: The last rate of `cosine`, as a part of the optimizer's.
    """

    then: Literal["hold", "decay", "cosine"]
    least: float
    most: float | None
    steps: int
    is_linear: bool
    total: int = 0
    last: float = 0.0

    def rate(self, own: float, step: int) -> float:
        """The rate of a group.

        Args:
            own: The rate that the optimizer was built with.
            step: Steps that were taken.
        """
        done = step - 1  # as DeepSpeed counts
        if self.then == "cosine":
            return own * self._part(done)
        most = own if self.most is None else self.most
        return self.least if done < 0 else self.least + (most - self.least) * self._part_of_rise(done)

    def _part(self, done: int) -> float:
        """Of the optimizer's rate, for `cosine`."""
        if done < 0:
            return 0.0
        if done < self.steps:
            return self.least + (1 - self.least) * self._risen(done)
        progress = min(1.0, (done - self.steps + 1) / max(1, self.total - self.steps))
        return max(0.0, self.last + (1 - self.last) * (1 + math.cos(math.pi * progress)) / 2)

    def _part_of_rise(self, done: int) -> float:
        if done < self.steps:
            return self._risen(done)
        if self.then == "hold":
            return 1.0
        return max(0.0, (self.total - done) / max(1.0, self.total - self.steps))

    def _risen(self, done: int) -> float:
        return done / self.steps if self.is_linear else math.log(done + 1) / math.log(self.steps)


class Rates(LRScheduler):
    """Sets the rates of a `Warmup`: a scheduler of torch, to be stepped after each step of its optimizer."""

    def __init__(self, optimizer: Optimizer, warmup: Warmup) -> None:
        self._warmup = warmup
        super().__init__(optimizer)

    def get_lr(self) -> list[Any]:
        """The rates of all groups, now."""
        return [self._warmup.rate(float(own), self.last_epoch) for own in self.base_lrs]

    def state_dict(self) -> dict[str, Any]:
        """How many steps were taken, and the rates; the formula is of the config."""
        return {name: value for name, value in super().state_dict().items() if name != "_warmup"}


def warmup_of(section: Entries | None) -> Warmup | None:
    """Reads the section; None if there is none.

    Raises:
        ConfigError: It asks for another scheduler, or for rates that are none.
    """
    if section is None:
        return None
    kinds: dict[str, Literal["hold", "decay", "cosine"]] = {
        "WarmupLR": "hold",
        "WarmupDecayLR": "decay",
        "WarmupCosineLR": "cosine",
    }
    name = section.kind(became="setup.scheduler", example="WarmupLR")
    if name not in kinds:
        raise section.wrong(
            "type", " or ".join(kinds), _OF_TORCH.get(name, "a scheduler of torch, over setup.optimizer")
        )
    then = kinds[name]
    params = section.params()
    section.close()
    is_linear = params.text("warmup_type", "log", became="how it rises", among=("log", "linear")) == "linear"
    steps = max(2, params.integer("warmup_num_steps", 1000, became="steps", least=1))
    params.only("last_batch_iteration", -1, fix="setup.scheduler.load_state_dict(...)")
    total = 0
    if then != "hold":
        if not params.has("total_num_steps"):
            raise params.wrong("total_num_steps", "the steps of the training", '"total_num_steps": 10000')
        total = params.integer("total_num_steps", 10000, became="steps", least=1)
    if then == "cosine":
        least = params.number("warmup_min_ratio", 0.0, became="the first rate, in parts", least=0)
        last = params.number("cos_min_ratio", 1e-4, became="the last rate, in parts", least=0)
        params.close()
        return Warmup(then, least, None, steps, is_linear, total, last)
    least = params.number("warmup_min_lr", 0.0, became="the first rate", least=0)
    most: float | None = None if then == "hold" else 0.001
    if params.has("warmup_max_lr"):
        most = params.number("warmup_max_lr", 0.001, became="the highest rate", least=0)
    params.close()
    return Warmup(then, least, most, steps, is_linear, total)
