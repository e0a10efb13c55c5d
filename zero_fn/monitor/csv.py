"""Numbers as rows of a CSV file."""

from __future__ import annotations

import csv
import io
import os
import time
from collections.abc import Iterable

from zero_fn.errors import ConfigError
from zero_fn.monitor.lines import WholeLines
from zero_fn.monitor.sink import Numbers, Outlet, flat

__all__ = ["Csv"]


class Csv(Outlet):
    """Rows of a file: the columns `step`, `time` (seconds since 1970),
    and one for each number, named as by `flat`.

    A run that is started again goes on in its file; steps since the checkpoint are in it twice.
    When a number appears that has no column yet, a copy with a longer first line takes the place of
    the file; rows before stay short, as readers allow. What is not known is empty; what is not
    finite is `nan`, `inf` or `-inf`.

    Args:
        path: The file. Folders above it are made.

    Raises:
        ConfigError: The file cannot be written, or is another's.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self._lines = WholeLines(path)
        self._columns = next(csv.reader([self._lines.first()]), [])
        if self._columns and self._columns[:2] != ["step", "time"]:
            columns = ", ".join(self._columns[:4])
            raise ConfigError(
                f"{path} is not a file of a run.",
                columns=columns,
                fix="name a file that is not there",
            )
        super().__init__(str(path))

    def _write(self, step: int, numbers: Numbers) -> None:
        row = {"step": step, "time": round(time.time(), 3), **flat(numbers)}
        if new := [name for name in row if name not in self._columns]:
            write = self._lines.replace_first if self._columns else self._lines.append
            write(_text(self._columns + new))
            self._columns += new
        self._lines.append(_text(row.get(name, "") for name in self._columns))

    def close(self) -> None:
        self._lines.close()


def _text(cells: Iterable[object]) -> str:
    written = io.StringIO()
    csv.writer(written, lineterminator="").writerow(cells)
    return written.getvalue()
