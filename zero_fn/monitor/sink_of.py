"""Sinks by words of a command line."""

from __future__ import annotations

from collections.abc import Callable

from zero_fn.errors import ConfigError
from zero_fn.monitor.comet import Comet
from zero_fn.monitor.csv import Csv
from zero_fn.monitor.json_lines import JsonLines
from zero_fn.monitor.mlflow import MLflow
from zero_fn.monitor.prometheus import Prometheus
from zero_fn.monitor.sink import Outlet
from zero_fn.monitor.tensorboard import TensorBoard
from zero_fn.monitor.wandb import WandB

__all__ = ["sink_of"]


def sink_of(text: str) -> Outlet:
    """Makes a sink of a word of a command line, as in `--log tensorboard:runs prometheus:9400`.

    It is `tensorboard`, `csv`, `jsonl`, `prometheus`, `wandb`, `mlflow` or `comet`. After a colon
    may follow a folder, a file, a port (or the URL of a pushgateway, or a file `*.prom`), or a
    project. They are opened at once, so only ranks that log make sinks.

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
    return _SINKS[word](rest)


def _prometheus(rest: str) -> Prometheus:
    if rest.isdecimal() or not rest:
        return Prometheus(int(rest or 9400))
    if rest.startswith(("http:", "https:")):
        return Prometheus(gateway=rest)
    return Prometheus(textfile=rest)


_SINKS: dict[str, Callable[[str], Outlet]] = {
    "tensorboard": lambda rest: TensorBoard(rest or "runs"),
    "csv": lambda rest: Csv(rest or "run.csv"),
    "jsonl": lambda rest: JsonLines(rest or "run.jsonl"),
    "prometheus": _prometheus,
    "wandb": lambda rest: WandB(rest or None),
    "mlflow": lambda rest: MLflow(rest or None),
    "comet": lambda rest: Comet(rest or None),
}
