"""Numbers for MLflow."""

from __future__ import annotations

import time
from typing import Any

from zero_fn.monitor.sinks.outlet import Numbers, Outlet, flat, library

__all__ = ["MLflow"]


class MLflow(Outlet):
    """Metrics of the active run of MLflow, or of a new one; named as by `flat`,
    sent by threads of its library.

    Args:
        experiment: The experiment of a new run. `MLFLOW_TRACKING_URI` says where.
        **options: Others of `mlflow.start_run`: `run_id=` of a run that goes on.

    Raises:
        ConfigError: MLflow is not installed.
    """

    def __init__(self, experiment: str | None = None, **options: Any) -> None:
        self._mlflow = library("mlflow", "mlflow-skinny")
        active = self._mlflow.active_run()
        self._is_ours = active is None
        if active is None and experiment is not None:
            self._mlflow.set_experiment(experiment)
        self._id = (active or self._mlflow.start_run(**options)).info.run_id
        self._has_sent = False
        # `log_metrics` of the module would wait for the server in each call.
        self._client = self._mlflow.MlflowClient()
        super().__init__("MLflow")

    def _write(self, step: int, numbers: Numbers) -> None:
        now = round(1000 * time.time())
        metrics = [
            self._mlflow.entities.Metric(name, number, now, step)
            for name, number in flat(numbers).items()
        ]
        # The first is waited for: a server that does not answer is an error now, and two threads of
        # the library that make the same folder of a file store lose what one of them has.
        self._client.log_batch(self._id, metrics, synchronous=not self._has_sent)
        self._has_sent = True

    def close(self) -> None:
        self._mlflow.flush_async_logging()
        if self._is_ours:
            self._mlflow.end_run()
