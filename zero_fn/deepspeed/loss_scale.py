"""The section `fp16`: torch's scaler of losses, by DeepSpeed's rule of when the scale moves.

A step without an infinity or NaN in any gradient is taken; `window` of them in a row, after a first, double the scale. A step
with one is skipped on every rank, and halves the scale once `hysteresis` of them have been skipped.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from zero_fn.errors import StateError

__all__ = ["LossScale", "Scaler"]


@dataclass(frozen=True, slots=True)
class LossScale:
    """How losses are scaled.

    Attributes:
        first: The first scale.
        is_fixed: Whether it is the last, too.
        window: Steps after which it doubles.
        hysteresis: Skipped steps after which it is halved.
        is_refilled: Whether every step that is taken gives all of `hysteresis` back, and not only a doubling.
        least: It never falls below.
    """

    first: float
    is_fixed: bool
    window: int
    hysteresis: int
    is_refilled: bool
    least: float


class Scaler(torch.amp.GradScaler):
    """torch's scaler, whose scale moves by a `LossScale`.

    Attributes:
        has_skipped: Whether the last step was skipped.
    """

    def __init__(self, device: str, rule: LossScale) -> None:
        super().__init__(device, init_scale=rule.first)
        self._rule = rule
        self._left = rule.hysteresis
        self._steps = 0
        self._skipped_at = -1
        self.has_skipped = False

    def update(self, new_scale: float | Tensor | None = None) -> None:
        """Moves the scale after a step, or sets it.

        Raises:
            StateError: Gradients overflow at the least scale there may be; on every rank.
        """
        found = [inf for state in self._per_optimizer_states.values() for inf in state["found_inf_per_device"].values()]
        self.has_skipped = any(bool(inf.item()) for inf in found)
        scale = self.get_scale()
        if new_scale is None and not self._rule.is_fixed:
            scale = self._moved(scale)
        super().update(scale if new_scale is None else new_scale)

    def state_dict(self) -> dict[str, Any]:
        """The scale, and what it moves by."""
        return {**super().state_dict(), "left": self._left, "steps": self._steps, "skipped_at": self._skipped_at}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Takes over what `state_dict` gave."""
        super().load_state_dict(state_dict)
        self._left, self._steps, self._skipped_at = (state_dict[name] for name in ("left", "steps", "skipped_at"))

    def _moved(self, scale: float) -> float:
        if self.has_skipped:
            if self._left == 1 and scale <= self._rule.least:
                raise StateError(
                    "Gradients overflow at the least scale of the loss.",
                    scale=scale,
                    why="no step would be taken any more",
                    fix='look for what is infinite or NaN (torch.autograd.detect_anomaly); or "bf16": {"enabled": true}',
                )
            if self._left == 1:
                scale = max(scale / 2, self._rule.least)
            else:
                self._left -= 1
            self._skipped_at = self._steps
        else:
            since = self._steps - self._skipped_at - 1  # the step after one that was skipped does not count
            is_over = since > 0 and since % self._rule.window == 0
            if self._rule.is_refilled or is_over:
                self._left = self._rule.hysteresis
            if is_over:
                scale *= 2
        self._steps += 1
        return scale
