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

_THEN: dict[str, Literal["hold", "decay", "cosine"]] = {
    "WarmupLR": "hold",
    "WarmupDecayLR": "decay",
    "WarmupCosineLR": "cosine",
}
_RISES = ("warmup_type", "warmup_num_steps", "last_batch_iteration")
_TAKES = {
    "hold": (*_RISES, "warmup_min_lr", "warmup_max_lr"),
    "decay": (*_RISES, "warmup_min_lr", "warmup_max_lr", "total_num_steps"),
    "cosine": (*_RISES, "warmup_min_ratio", "cos_min_ratio", "total_num_steps"),
}
_OF_TORCH = {
    "OneCycle": "torch.optim.lr_scheduler.OneCycleLR(setup.optimizer, ...)",
    "LRRangeTest": "torch.optim.lr_scheduler.LambdaLR(setup.optimizer, lambda step: 1 + step / 2000)",
}


@dataclass(frozen=True, slots=True)
class Warmup:
    """Rates that rise for a while, and then stay, fall to nothing, or fall by a cosine.

    Attributes:
        then: What comes after: WarmupLR, WarmupDecayLR or WarmupCosineLR.
        least: The first rate; of "cosine" as a part of the optimizer's.
        most: The highest rate; None is the optimizer's.
        steps: How many it rises for.
        is_linear: Whether it rises linearly, and not with the logarithm of the step.
        total: Steps of the training; for "hold" without meaning.
        last: The last rate of "cosine", as a part of the optimizer's.
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
        if done < 0:
            return 0.0 if self.then == "cosine" else self.least
        part, rest = 1.0, max(1, self.total - self.steps)
        if done < self.steps:
            part = done / self.steps if self.is_linear else math.log(done + 1) / math.log(self.steps)
        elif self.then == "decay":
            part = max(0.0, (self.total - done) / rest)
        elif self.then == "cosine":
            progress = min(1.0, (done - self.steps + 1) / rest)
            return own * max(0.0, self.last + (1 - self.last) * (1 + math.cos(math.pi * progress)) / 2)
        if self.then == "cosine":
            return own * (self.least + (1 - self.least) * part)
        return self.least + ((own if self.most is None else self.most) - self.least) * part


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


def warmup_of(entries: Entries) -> Warmup | None:
    """Reads the section; None if there is none.

    Raises:
        RefusedEntry: It asks for another scheduler, or for rates that are none.
    """
    if not entries.is_given("scheduler"):
        return None
    name, params = entries["scheduler.type"], "scheduler.params"
    if name not in _THEN:
        instead = _OF_TORCH.get(name, '"type": "WarmupLR"; or a scheduler of torch, over setup.optimizer')
        raise entries.refused("scheduler.type", " or ".join(_THEN), instead)
    then = _THEN[name]
    wants, total = f"one of {', '.join(_TAKES[then])}, which {name} has", f"{params}.total_num_steps"
    wrong = [
        entries.refused(f"{params}.{entry}", wants, "remove it")
        for entry in entries.given_under(params)
        if entry not in _TAKES[then]
    ]
    if then != "hold" and not entries.is_given(total):
        wrong.append(entries.refused(total, "the steps of the training", '"total_num_steps": 10000'))
    if wrong:
        raise wrong[0]
    most = entries[f"{params}.warmup_max_lr"]
    return Warmup(
        then,
        float(entries[f"{params}.warmup_min_ratio" if then == "cosine" else f"{params}.warmup_min_lr"]),
        0.001 if then == "decay" and most is None else most,
        max(2, entries[f"{params}.warmup_num_steps"]),
        entries[f"{params}.warmup_type"] == "linear",
        entries[total] or 0,
        entries[f"{params}.cos_min_ratio"],
    )
