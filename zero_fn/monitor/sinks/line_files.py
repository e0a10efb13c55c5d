"""Numbers as lines of a file, CSV or JSON: readable at every moment,
after a crash and on a full disk, too."""

from __future__ import annotations

import csv
import errno
import io
import json
import math
import mmap
import os
import time
from collections.abc import Iterable
from pathlib import Path

from zero_fn.errors import ConfigError
from zero_fn.monitor.sinks.outlet import Numbers, Outlet, flat

__all__ = ["Csv", "JsonLines"]


class _LineFile(Outlet):
    """Appends lines to a file, each by one write.

    In a file that is there, a last line that a crash tore is cut off.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self._path = Path(path)
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            self._open()
        except OSError as error:
            raise ConfigError(
                f"{path} cannot be written.", error=error, fix="name a file in a folder of yours"
            ) from error
        if size := os.fstat(self._file.fileno()).st_size:
            with mmap.mmap(self._file.fileno(), size, access=mmap.ACCESS_READ) as text:
                whole = text.rfind(b"\n") + 1
            self._file.truncate(whole)
        super().__init__(str(path))

    def _open(self) -> None:
        self._file = open(self._path, "a+b", buffering=0)  # noqa: SIM115

    def _append(self, line: str) -> None:
        """Appends a line; or raises OSError and leaves the file as it was."""
        text, end = line.encode() + b"\n", os.fstat(self._file.fileno()).st_size
        try:
            if self._file.write(text) < len(text):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        except OSError:
            self._file.truncate(end)
            raise

    def close(self) -> None:
        self._file.close()


class JsonLines(_LineFile):
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

    def _write(self, step: int, numbers: Numbers) -> None:
        row = {
            name: value if math.isfinite(value) else json.dumps(value)
            for name, value in _row(step, numbers).items()
        }
        self._append(json.dumps(row))


class Csv(_LineFile):
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
        super().__init__(path)
        with open(path, encoding="utf-8", newline="") as opened:
            self._columns = next(csv.reader(opened), [])
        if self._columns and self._columns[:2] != ["step", "time"]:
            columns = ", ".join(self._columns[:4])
            raise ConfigError(
                f"{path} is not a file of a run.",
                columns=columns,
                fix="name a file that is not there",
            )

    def _write(self, step: int, numbers: Numbers) -> None:
        row = _row(step, numbers)
        if new := [name for name in row if name not in self._columns]:
            self._widen(_cells(self._columns + new))
            self._columns += new
        self._append(_cells(row.get(name, "") for name in self._columns))

    def _widen(self, first: str) -> None:
        """Replaces the first line, in a copy that takes the place of the file;
        or raises OSError and changes nothing."""
        copy = self._path.with_name(f".{self._path.name}.new")
        try:
            with open(copy, "wb") as new:
                new.write(first.encode() + b"\n" + self._path.read_bytes().partition(b"\n")[2])
                new.flush()
                os.fsync(new.fileno())
            os.replace(copy, self._path)
        finally:
            copy.unlink(missing_ok=True)
        self._file.close()
        self._open()


def _row(step: int, numbers: Numbers) -> dict[str, float]:
    return {"step": step, "time": round(time.time(), 3), **flat(numbers)}


def _cells(cells: Iterable[object]) -> str:
    written = io.StringIO()
    csv.writer(written, lineterminator="").writerow(cells)
    return written.getvalue()
