"""The numbers of `zf.metrics` in the Trainer's own log, and so in whatever it reports to."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from transformers import Trainer, TrainerCallback

import zero_fn as zf
from zero_fn.integrations.accelerate import bare
from zero_fn.monitor.sink import flat

__all__ = ["MetricsCallback"]


class MetricsCallback(TrainerCallback):
    """Measures while a Trainer trains. `numbers`: of the last report, by flat names, until they are taken.

    Args:
        trainer: The Trainer, whose model and optimizer are measured from the beginning of `train` to its end.
        options: Those of `zf.metrics`. A report is made as often as the Trainer logs; the Trainer measures the norm itself.
    """

    def __init__(self, trainer: Trainer, options: Mapping[str, Any]) -> None:
        self._trainer, self._options = trainer, {"norm": "on_spike" in options, **options}
        self._metrics: zf.Metrics | None = None
        self.numbers: dict[str, float] = {}

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.on_train_end(args, state, control)  # a training before it may have raised
        every = max(1, int(state.logging_steps))
        self._metrics = zf.metrics(
            self._trainer.model, bare(self._trainer.optimizer), **{"every": every, **self._options}
        )

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        assert self._metrics is not None, "not begun"
        found = self._metrics.step()
        self.numbers = flat(found) if found else self.numbers

    def on_train_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if self._metrics is not None:
            self._metrics.close()
            self._metrics = None
