"""The section `scheduler`: the learning rates of DeepSpeed's warm-ups, as a scheduler of torch.

    WarmupLR        rises, then stays
    WarmupDecayLR   rises, then falls to the first rate
    WarmupCosineLR  rises, then falls by a cosine; its options are parts of the optimizer's rate

The first two steps have the smallest rate: DeepSpeed counts steps from -1.
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from zero_fn.deepspeed.entries import Entries

__all__ = ["Warmup", "warmup_of"]

_RISES = ("warmup_type", "warmup_num_steps", "last_batch_iteration")
_TAKES = {
    "WarmupLR": (*_RISES, "warmup_min_lr", "warmup_max_lr"),
    "WarmupDecayLR": (*_RISES, "warmup_min_lr", "warmup_max_lr", "total_num_steps"),
    "WarmupCosineLR": (*_RISES, "warmup_min_ratio", "cos_min_ratio", "total_num_steps"),
}
_OF_TORCH = {
    "OneCycle": "torch.optim.lr_scheduler.OneCycleLR(setup.optimizer, ...)",
    "LRRangeTest": "torch.optim.lr_scheduler.LambdaLR(setup.optimizer, lambda step: 1 + step / 2000)",
    "Cosine": '"type": "WarmupCosineLR"; or torch.optim.lr_scheduler.CosineAnnealingLR(setup.optimizer, ...)',
}


class Warmup(LRScheduler):
    """A scheduler of torch whose rates rise first; `then` is DeepSpeed's name of it, `options` are `scheduler.params`."""

    def __init__(self, optimizer: Optimizer, then: str, options: Mapping[str, Any]) -> None:
        self._then, self._options = then, options
        super().__init__(optimizer)

    def get_lr(self) -> list[Any]:
        """The rates of all parameter groups for the next step."""
        return [_rate(self._then, self._options, float(own), self.last_epoch - 1) for own in self.base_lrs]

    def state_dict(self) -> dict[str, Any]:
        """The number of steps taken, and the rates. The formula is not saved: it comes from the config."""
        return {name: value for name, value in super().state_dict().items() if name not in ("_then", "_options")}


def _rate(then: str, options: Mapping[str, Any], own: float, done: int) -> float:
    """The rate of a parameter group that was built with the rate `own`, after `done` steps as DeepSpeed counts them."""
    is_cosine, steps = then == "WarmupCosineLR", max(2, options["warmup_num_steps"])
    least = float(options["warmup_min_ratio" if is_cosine else "warmup_min_lr"])
    if done < 0:
        return 0.0 if is_cosine else least
    total, part = options.get("total_num_steps", 0), 1.0
    left = max(1, total - steps)
    if done < steps:
        part = done / steps if options["warmup_type"] == "linear" else math.log(done + 1) / math.log(steps)
    elif then == "WarmupDecayLR":
        part = max(0.0, (total - done) / left)
    elif is_cosine:
        least, part = options["cos_min_ratio"], (1 + math.cos(math.pi * min(1.0, (done - steps + 1) / left))) / 2
    if is_cosine:
        return own * max(0.0, least + (1 - least) * part)
    return least + ((own if options["warmup_max_lr"] is None else options["warmup_max_lr"]) - least) * part


def warmup_of(entries: Entries) -> Callable[[Optimizer], Warmup] | None:
    """Reads the section. The result makes the scheduler from the optimizer; None if the config has none.

    Raises:
        RefusedEntry: The section asks for another scheduler, or has entries that the scheduler does not take or lacks one.
    """
    if not entries.is_given("scheduler"):
        return None
    then, params = entries["scheduler.type"], "scheduler.params"
    given = entries.given_under(params)
    if then == "Cosine" and {"warmup_num_steps", "total_num_steps"} <= given.keys():  # no name that DeepSpeed has
        then = "WarmupCosineLR"
    if then not in _TAKES:
        instead = _OF_TORCH.get(then, '"type": "WarmupLR"; or a scheduler of torch, over setup.optimizer')
        raise entries.refused("scheduler.type", " or ".join(_TAKES), instead)
    known, total = _TAKES[then], f"{params}.total_num_steps"
    wants = f"one of {', '.join(known)}, which {then} has"
    wrong = [
        entries.refused(f"{params}.{name}", wants, (*difflib.get_close_matches(name, known, n=1), "remove it")[0])
        for name in given
        if name not in known
    ]
    if "total_num_steps" in known and not entries.is_given(total):
        wrong.append(entries.refused(total, "the steps of the training", '"total_num_steps": 10000'))
    if wrong:
        raise wrong[0]
    options = {name: entries[f"{params}.{name}"] for name in known}
    if then == "WarmupDecayLR" and options["warmup_max_lr"] is None:
        options["warmup_max_lr"] = 0.001
    return partial(Warmup, then=then, options=options)
