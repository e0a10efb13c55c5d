"""The protocol of sinks, and sinks by words of a command line."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from zero_fn.errors import ConfigError
from zero_fn.monitor.sinks.comet import Comet
from zero_fn.monitor.sinks.line_files import Csv, JsonLines
from zero_fn.monitor.sinks.mlflow import MLflow
from zero_fn.monitor.sinks.outlet import Numbers, Outlet
from zero_fn.monitor.sinks.prometheus import Prometheus
from zero_fn.monitor.sinks.tensorboard import TensorBoard
from zero_fn.monitor.sinks.wandb import WandB

__all__ = ["Sink", "sink_of"]


class Sink(Protocol):
    """Takes the numbers of a run. Any object with this method is one."""

    def log(self, step: int, numbers: Numbers) -> None:
        """Takes the numbers after `step` steps. What is not known is left out."""


def sink_of(text: str) -> Outlet:
    """Makes a sink of a word of a command line, as in `--log tensorboard:runs prometheus:9400`.

    It is `tensorboard`, `csv`, `jsonl`, `prometheus`, `wandb`, `mlflow` or `comet`. After a colon
    may follow a folder, a file, a port (or a file `*.prom`), or a project. They are opened at once,
    so only ranks that log make sinks.

    Raises:
        ConfigError: There is no such word, or the sink cannot be made.
    """
    word, _, rest = text.partition(":")
    if word not in _SINKS:
        raise ConfigError(
            f"{text!r} is no sink.",
            words=", ".join(_SINKS),
            fix="tensorboard:runs, or prometheus:9400",
        )
    return _SINKS[word](*[rest] if rest else [])


def _prometheus(rest: str = "9400") -> Prometheus:
    return Prometheus(int(rest)) if rest.isdecimal() else Prometheus(textfile=rest)


_SINKS: dict[str, Callable[..., Outlet]] = {
    "tensorboard": TensorBoard,
    "csv": lambda path="run.csv": Csv(path),
    "jsonl": lambda path="run.jsonl": JsonLines(path),
    "prometheus": _prometheus,
    "wandb": WandB,
    "mlflow": MLflow,
    "comet": Comet,
}
