"""Numbers for Weights & Biases."""

from __future__ import annotations

from typing import Any

from zero_fn.monitor.sinks.outlet import Numbers, Outlet, flat, library

__all__ = ["WandB"]


class WandB(Outlet):
    """Metrics of the open run of Weights & Biases, or of a new one; named as by `flat`,
    sent by a process of its library.

    Args:
        project: Its project.
        **options: Others of `wandb.init`: `id=` and `resume=` of a run
            that goes on, `mode="offline"`.

    Raises:
        ConfigError: The package wandb is not installed.
    """

    def __init__(self, project: str | None = None, **options: Any) -> None:
        wandb = library("wandb", "wandb")
        self._is_ours = wandb.run is None
        self._run = wandb.run or wandb.init(project=project, **options)
        super().__init__("Weights & Biases")

    def _write(self, step: int, numbers: Numbers) -> None:
        self._run.log(flat(numbers), step=step)

    def close(self) -> None:
        if self._is_ours:
            self._run.finish()
