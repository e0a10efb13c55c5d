"""Numbers as lines of JSON."""

from __future__ import annotations

import json
import math
import os
import time

from zero_fn.monitor.lines import WholeLines
from zero_fn.monitor.sink import Numbers, Outlet, flat

__all__ = ["JsonLines"]


class JsonLines(Outlet):
    """Lines of a file, each an object: `step`, `time` (seconds since 1970),
    and the numbers, named as by `flat`.

    A run that is started again goes on in its file; steps since the checkpoint are in it twice.
    JSON has no numbers that are not finite: they are the texts "NaN", "Infinity" and "-Infinity",
    which Python, pandas and JavaScript turn into numbers.

    Args:
        path: The file. Folders above it are made.

    Raises:
        ConfigError: The file cannot be written.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self._lines = WholeLines(path)
        super().__init__(str(path))

    def _write(self, step: int, numbers: Numbers) -> None:
        row = {"step": step, "time": round(time.time(), 3)} | {
            name: _plain(x) for name, x in flat(numbers).items()
        }
        self._lines.append(json.dumps(row, allow_nan=False))

    def close(self) -> None:
        self._lines.close()


def _plain(value: float) -> float | str:
    if math.isfinite(value):
        return value
    return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
