"""What our sinks have in common: flat names, and what they do when the world outside fails."""

from __future__ import annotations

import importlib
import re
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from functools import cache
from types import ModuleType
from typing import Self

from zero_fn.errors import ConfigError, warn_once

__all__ = ["Numbers", "Outlet", "flat", "library", "split"]

Numbers = Mapping[str, float | Sequence[float]]
"""Numbers by their names in Prometheus, with labels as it writes them:
`zero_fn_sent_bytes_total{axis="dp"}`.

What ends in `_total` is a counter, and has the sum since the run began. A sequence has the
observations since the last call, for a histogram. All else is a gauge.
"""

_KEY = re.compile(r"([a-zA-Z_:][a-zA-Z0-9_:]*)(?:\{(.*)\})?")
_LABEL = re.compile(r'([a-zA-Z_][a-zA-Z0-9_]*)="([^"\\\n]*)"')


@cache
def split(key: str) -> tuple[str, dict[str, str]]:
    """The name and the labels of a key: `'a_total{axis="dp"}'` is `("a_total", {"axis": "dp"})`.

    Raises:
        ConfigError: It is not one.
    """
    found = _KEY.fullmatch(key)
    labels = _LABEL.findall((found and found[2]) or "")
    if not found or ",".join(f'{name}="{value}"' for name, value in labels) != (found[2] or ""):
        raise ConfigError(
            f"A number cannot be named {key!r}.",
            why="a name has letters, digits and underscores; labels may follow in braces",
            fix="""'eval_loss', or 'eval_loss{data="wiki"}'""",
        )
    return found[1], dict(labels)


def flat(numbers: Numbers) -> dict[str, float]:
    """One number for each name, for sinks that know neither labels nor histograms.

    `zero_fn_sent_bytes_total{axis="dp"}` becomes `zero_fn/sent_bytes_total/dp`; a histogram
    `zero_fn_step_seconds` becomes `zero_fn/step_seconds/mean` and `zero_fn/step_seconds/max`.
    """
    found = {}
    for key, value in numbers.items():
        name, labels = split(key)
        name = "/".join([re.sub("^zero_fn_", "zero_fn/", name), *labels.values()])
        if not isinstance(value, Sequence):
            found[name] = float(value)
        elif value:
            found |= {f"{name}/mean": sum(value) / len(value), f"{name}/max": float(max(value))}
    return found


def library(module: str, package: str) -> ModuleType:
    """Imports the library of a sink. Raises ConfigError if it is not installed."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise ConfigError(
            f"This sink needs {package}.", error=error, fix=f"pip install {package}"
        ) from error


class Outlet(ABC):
    """A sink of ours.

    What goes wrong in the world outside costs numbers, never the training, and is told.

    A full disk, or a server that does not answer: the numbers of a step are lost, there is one
    warning for each outlet, and later steps are tried again. A name that cannot be one is a mistake
    in the program, and raises.

    Args:
        where: Where the numbers go, for the warning.

    Attributes:
        lost: Steps whose numbers were lost.
    """

    def __init__(self, where: str) -> None:
        self.where = where
        self.lost = 0

    def log(self, step: int, numbers: Numbers) -> None:
        """Takes the numbers after `step` steps. Raises ConfigError if a name cannot be one."""
        for key in numbers:
            split(key)
        try:
            self._write(step, numbers)
        except Exception as error:  # of any library
            self.lost += 1
            warn_once(
                f"{type(self).__name__} lost numbers on their way to {self.where}.",
                step=step,
                error=repr(error),
                why="training goes on, and later steps are tried again; "
                "this is said once, and `lost` counts on",
                fix="free the disk, or start the server",
            )

    @abstractmethod
    def _write(self, step: int, numbers: Numbers) -> None: ...

    @abstractmethod
    def close(self) -> None:
        """Writes what is still to be written, and ends."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
