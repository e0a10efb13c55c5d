"""The section `fp16`: torch's loss scaler, with DeepSpeed's rule of when the scale changes.

A step is taken if no gradient has an infinity or NaN; `window` taken steps in a row, after a first one, double the scale.
Other steps are skipped on every rank; the `hysteresis`-th of these and each after it halves the scale. (torch's own rule has
no hysteresis, and counts the window in another way.)
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from zero_fn.deepspeed.entries import Entries
from zero_fn.errors import StateError

__all__ = ["Scaler", "scaler_of"]


class Scaler(torch.amp.GradScaler):
    """torch's loss scaler with DeepSpeed's rule. `has_skipped` says whether the last step was skipped."""

    def __init__(
        self,
        device: str,  # the type of that of the gradients
        *,
        first: float,
        window: int | None,  # taken steps after which the scale doubles; None: it never changes
        hysteresis: int,  # skipped steps after which it is halved
        is_refilled: bool,  # whether each taken step resets the count of skipped steps; else only a doubling does
        least: float,
    ) -> None:
        super().__init__(device, init_scale=first)
        self._lazy_init_scale_growth_tracker(torch.empty(0, device=device).device)  # a stage may never see a loss
        self._window = window
        self._hysteresis = hysteresis
        self._is_refilled = is_refilled
        self._least = least
        self._left = hysteresis
        self._steps = 0
        self._skipped_at = -1
        self.has_skipped = False

    def skip(self) -> None:
        """Skips the step that comes: gradients of another stage of a pipeline are not finite."""
        for state in self._per_optimizer_states.values():
            for found in state["found_inf_per_device"].values():
                found.fill_(1.0)

    def update(self, new_scale: float | Tensor | None = None) -> None:
        """Changes the scale after a step as the rule says, or sets it to `new_scale`.

        Raises:
            StateError: Gradients overflow at the smallest scale. Raised on every rank.
        """
        found = [inf for state in self._per_optimizer_states.values() for inf in state["found_inf_per_device"].values()]
        self.has_skipped = any(bool(inf.item()) for inf in found)
        scale = self.get_scale()
        if new_scale is None and self._window is not None:
            scale = self._moved(scale, self._window)
        super().update(scale if new_scale is None else new_scale)

    def state_dict(self) -> dict[str, Any]:
        """The scale, and the counts of taken and skipped steps."""
        return {**super().state_dict(), "left": self._left, "steps": self._steps, "skipped_at": self._skipped_at}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Loads what `state_dict` returned."""
        super().load_state_dict(state_dict)
        self._left, self._steps, self._skipped_at = (state_dict[name] for name in ("left", "steps", "skipped_at"))

    def _moved(self, scale: float, window: int) -> float:
        if self.has_skipped:
            if self._left == 1 and scale <= self._least:
                raise StateError(
                    "Gradients overflow at the smallest loss scale.",
                    scale=scale,
                    why="no step would be taken any more",
                    fix='look for what is infinite or NaN (torch.autograd.detect_anomaly); or "bf16": {"enabled": true}',
                )
            if self._left == 1:
                scale = max(scale / 2, self._least)
            else:
                self._left -= 1
            self._skipped_at = self._steps
        else:
            since = self._steps - self._skipped_at - 1  # the step after one that was skipped does not count
            is_over = since > 0 and since % window == 0
            if self._is_refilled or is_over:
                self._left = self._hysteresis
            if is_over:
                scale *= 2
        self._steps += 1
        return scale


def scaler_of(entries: Entries) -> Callable[[str], Scaler] | None:
    """Reads the section. The result makes the scaler, given the type of the device; None if float16 is not used."""
    if not entries["fp16.enabled"]:
        return None
    fixed = entries["fp16.loss_scale"]
    return partial(
        Scaler,
        first=fixed or 2.0 ** entries["fp16.initial_scale_power"],
        window=None if fixed else entries["fp16.loss_scale_window"],
        hysteresis=entries["fp16.hysteresis"],
        is_refilled=entries["fp16.consecutive_hysteresis"],
        least=max(entries["fp16.min_loss_scale"], 2.0**-24),
    )
