"""The numbers of `zf.metrics` in the Trainer's own log, and so in whatever it reports to."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from transformers import TrainerCallback

import zero_fn as zf
from zero_fn.deepspeed.reporter import Reporter
from zero_fn.deepspeed.settings import Settings
from zero_fn.integrations.accelerate import bare
from zero_fn.monitor.metrics import Metrics
from zero_fn.monitor.sinks.outlet import flat

__all__ = ["LogsMetrics", "ReportsCallback"]

if TYPE_CHECKING:
    from transformers import Trainer as _AnyTrainer
else:
    _AnyTrainer = object  # the mixin is used beside a Trainer


class LogsMetrics(_AnyTrainer):
    """What a Trainer logs of training has the numbers of `zf.metrics`,
    once `measure` was called."""

    _measuring: _MetricsCallback | None = None  # trainers of TRL have a `_metrics` of their own

    def measure(self, options: Mapping[str, Any]) -> None:
        """Measures from the beginning of `train` to its end, with options of `zf.metrics`.

        If they do not say otherwise, a report is made as often as the Trainer logs,
        and the norm is left to it.
        """
        self._measuring = _MetricsCallback(self, options)
        self.add_callback(self._measuring)

    def log(self, logs: dict[str, float], *args: Any, **options: Any) -> None:
        if self._measuring is not None and "loss" in logs:
            logs, self._measuring.numbers = logs | self._measuring.numbers, {}
        super().log(logs, *args, **options)


class _MetricsCallback(TrainerCallback):
    """Measures. `numbers`: of the last report, by flat names, until they are taken."""

    def __init__(self, trainer: LogsMetrics, options: Mapping[str, Any]) -> None:
        self._trainer = trainer
        self._options = {"norm": "on_spike" in options, **options}
        self._metrics: Metrics | None = None
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


class ReportsCallback(TrainerCallback):
    """Prints and logs what a DeepSpeed config asks for."""

    def __init__(self, trainer: Any, settings: Settings) -> None:
        self._trainer = trainer
        self._settings = settings
        self._reporter: Reporter | None = None

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        assert self._settings.reporting is not None, "nothing to report"
        self.on_train_end(args, state, control)  # a training before it may have raised
        optimizer = bare(self._trainer.optimizer)
        self._reporter = Reporter(
            self._settings.reporting,
            self._trainer.model,
            optimizer,
            state.global_step,
            self._trainer.skipped_steps,
        )

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        assert self._reporter is not None, "not begun"
        samples = (
            args.per_device_train_batch_size * args.gradient_accumulation_steps * args.world_size
        )
        scaler = self._trainer.accelerator.scaler
        self._reporter.step(samples=samples, norm=None, scaler=scaler)

    def on_train_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if self._reporter is not None:
            self._reporter.close()
            self._reporter = None
