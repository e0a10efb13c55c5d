"""Numbers for Comet."""

from __future__ import annotations

from typing import Any

from zero_fn.monitor.sinks.outlet import Numbers, Outlet, flat, library

__all__ = ["Comet"]


class Comet(Outlet):
    """Metrics of the running experiment of Comet, or of a new one; named as by `flat`,
    sent by threads of its library.

    Args:
        project: Its project.
        **options: Others of `comet_ml.start`: `experiment_key=` of an experiment
            that goes on, `online=False`.

    Raises:
        ConfigError: The package comet_ml is not installed.
    """

    def __init__(self, project: str | None = None, **options: Any) -> None:
        comet = library("comet_ml", "comet_ml")
        self._is_ours = comet.get_running_experiment() is None
        self._experiment = comet.start(project_name=project, **options)
        super().__init__("Comet")

    def _write(self, step: int, numbers: Numbers) -> None:
        self._experiment.log_metrics(flat(numbers), step=step)

    def close(self) -> None:
        if self._is_ours:
            self._experiment.end()
