"""The section `scheduler`: the learning rates of DeepSpeed's schedulers, as a scheduler of torch.

    WarmupLR        rises, then stays
    WarmupDecayLR   rises, then falls to the first rate
    WarmupCosineLR  rises, then falls by a cosine; its options are parts of the optimizer's rate
    OneCycle        rises, falls again, then decays; the first beta of the optimizer moves the
                    other way, the second is 0.99
    LRRangeTest     rises without end, to find the highest rate that trains

The first two steps of a warm-up have the smallest rate: DeepSpeed counts steps from -1.
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

__all__ = ["Rates", "rates_of"]

_RISES = ("warmup_type", "warmup_num_steps", "last_batch_iteration")
_CYCLE = (
    "first_step_size",
    "second_step_size",
    "first_stair_count",
    "second_stair_count",
    "momentum",
    "min_mom",
    "max_mom",
)
_TAKES = {
    "WarmupLR": (*_RISES, "warmup_min_lr", "warmup_max_lr"),
    "WarmupDecayLR": (*_RISES, "warmup_min_lr", "warmup_max_lr", "total_num_steps"),
    "WarmupCosineLR": (*_RISES, "warmup_min_ratio", "cos_min_ratio", "total_num_steps"),
    "OneCycle": (
        *(f"cycle_{name}" for name in ("min_lr", "max_lr", *_CYCLE)),
        *("decay_lr_rate", "decay_mom_rate", "decay_step_size", "last_batch_iteration"),
    ),
    "LRRangeTest": (
        *(f"lr_range_test_{name}" for name in ("min_lr", "step_size", "step_rate", "staircase")),
        _RISES[-1],
    ),
}
_NEEDS = {
    "total_num_steps": ("the steps of the training", '"total_num_steps": 10000'),
    "cycle_min_lr": ("the least rate of the cycle", '"cycle_min_lr": 1e-5'),
    "cycle_max_lr": ("the highest rate of the cycle", '"cycle_max_lr": 1e-3'),
}


class Rates(LRScheduler):
    """A scheduler of torch with DeepSpeed's rates; `kind` is DeepSpeed's name of it,
    `options` are `scheduler.params`."""

    def __init__(self, optimizer: Optimizer, kind: str, options: Mapping[str, Any]) -> None:
        self._kind = kind
        self._options = options
        super().__init__(optimizer)

    def get_lr(self) -> list[Any]:
        """The rates of all parameter groups for the next step;
        those of OneCycle set the groups' first beta, too."""
        if self._kind == "OneCycle" and self._options["cycle_momentum"]:
            for group in self.optimizer.param_groups:
                if "betas" in group:
                    group["betas"] = (_cycled(self._options, self.last_epoch)[1], 0.99)
        return [
            _rate(self._kind, self._options, float(own), self.last_epoch) for own in self.base_lrs
        ]

    def state_dict(self) -> dict[str, Any]:
        """The number of steps taken, and the rates.

        The formula is not saved: it comes from the config.
        """
        return {
            name: value
            for name, value in super().state_dict().items()
            if name not in ("_kind", "_options")
        }


def _rate(kind: str, options: Mapping[str, Any], own: float, taken: int) -> float:
    """The rate of a parameter group that was built with the rate `own`,
    once so many steps were taken."""
    if kind == "LRRangeTest":
        part = taken / options["lr_range_test_step_size"]
        part = math.floor(part) if options["lr_range_test_staircase"] else part
        return float(
            options["lr_range_test_min_lr"] * (1 + options["lr_range_test_step_rate"] * part)
        )
    if kind == "OneCycle":
        return _cycled(options, taken)[0]
    return _warmed(kind, options, own, taken - 1)


def _cycled(options: Mapping[str, Any], taken: int) -> tuple[float, float]:
    """The rate and the first beta of OneCycle."""
    first = float(options["cycle_first_step_size"])
    second = options["cycle_second_step_size"]
    second = first if second is None else float(second)
    low, high = options["cycle_min_lr"], options["cycle_max_lr"]
    least, most = options["cycle_min_mom"], options["cycle_max_mom"]
    total = first + second
    if taken > total:
        gone = (taken - total) / options["decay_step_size"] if options["decay_step_size"] else 0.0
        return low / (1 + options["decay_lr_rate"] * gone), most * (
            1 + options["decay_mom_rate"] * gone
        )
    if not taken:
        # DeepSpeed sets the least beta before the first step, and the highest with the second.
        return low, least
    stairs, position = options["cycle_first_stair_count"], taken % total
    part, ratio = 1.0 + taken / total - math.floor(1 + taken / total), first / total
    if part > ratio and options["cycle_second_stair_count"] is not None:
        stairs = options["cycle_second_stair_count"]
    height = part / ratio if part <= ratio else (part - 1) / (ratio - 1)
    if stairs:
        at = (
            position * stairs / first if position <= first else (total - position) * stairs / second
        )
        height = math.floor(at) / stairs
    return low + (high - low) * height, most - (most - least) * height


def _warmed(kind: str, options: Mapping[str, Any], own: float, done: int) -> float:
    """The rate of a warm-up after `done` steps as DeepSpeed counts them."""
    is_cosine, steps = kind == "WarmupCosineLR", max(2, options["warmup_num_steps"])
    least = float(options["warmup_min_ratio" if is_cosine else "warmup_min_lr"])
    if done < 0:
        return 0.0 if is_cosine else least
    total, part = options.get("total_num_steps", 0), 1.0
    left = max(1, total - steps)
    if done < steps:
        part = (
            done / steps
            if options["warmup_type"] == "linear"
            else math.log(done + 1) / math.log(steps)
        )
    elif kind == "WarmupDecayLR":
        part = max(0.0, (total - done) / left)
    elif is_cosine:
        least = options["cos_min_ratio"]
        part = (1 + math.cos(math.pi * min(1.0, (done - steps + 1) / left))) / 2
    if is_cosine:
        return own * max(0.0, least + (1 - least) * part)
    return (
        least
        + ((own if options["warmup_max_lr"] is None else options["warmup_max_lr"]) - least) * part
    )


def rates_of(entries: Entries) -> Callable[[Optimizer], Rates] | None:
    """Reads the section.

    The result makes the scheduler from the optimizer; None if the config has none.

    Raises:
        RefusedEntry: The section asks for another scheduler,
            or has entries that the scheduler does not take or lacks one.
    """
    if not entries.is_given("scheduler"):
        return None
    kind, params = entries["scheduler.type"], "scheduler.params"
    given = entries.given_under(params)
    # DeepSpeed has no such name.
    if kind == "Cosine" and {"warmup_num_steps", "total_num_steps"} <= given.keys():
        kind = "WarmupCosineLR"
    if kind not in _TAKES:
        instead = '"type": "WarmupLR"; or a scheduler of torch, over setup.optimizer'
        if kind == "Cosine":
            instead = (
                '"type": "WarmupCosineLR"; or '
                "torch.optim.lr_scheduler.CosineAnnealingLR(setup.optimizer, ...)"
            )
        raise entries.refused("scheduler.type", " or ".join(_TAKES), instead)
    known = _TAKES[kind]
    for name in given:
        near = difflib.get_close_matches(name, known, n=1)
        wants = f"one of {', '.join(known)}, which {kind} has"
        entries.refuse_if(f"{params}.{name}", (name not in known, wants, (*near, "remove it")[0]))
    for name, (wants, fix) in _NEEDS.items():
        is_lacking = name in known and not entries.is_given(f"{params}.{name}")
        entries.refuse_if(f"{params}.{name}", (is_lacking, wants, fix))
    options = {name: entries[f"{params}.{name}"] for name in known}
    if kind == "WarmupDecayLR" and options["warmup_max_lr"] is None:
        options["warmup_max_lr"] = 0.001
    return partial(Rates, kind=kind, options=options)
