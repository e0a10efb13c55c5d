"""A text file of whole lines (CSV, JSON lines): readable at every moment,
after a crash and on a full disk, too."""

from __future__ import annotations

import errno
import mmap
import os
from pathlib import Path

from zero_fn.errors import ConfigError

__all__ = ["WholeLines"]


class WholeLines:
    """Appends lines to a file, each by one write.

    In a file that is there, a last line that a crash tore is cut off.

    Raises:
        ConfigError: The file cannot be opened.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self._file = open(self.path, "a+b", buffering=0)  # noqa: SIM115
        except OSError as error:
            raise ConfigError(
                f"{path} cannot be written.", error=error, fix="name a file in a folder of yours"
            ) from error
        if size := os.fstat(self._file.fileno()).st_size:
            with mmap.mmap(self._file.fileno(), size, access=mmap.ACCESS_READ) as text:
                whole = text.rfind(b"\n") + 1
            self._file.truncate(whole)

    def first(self) -> str:
        """The first line, or an empty text."""
        with open(self.path, encoding="utf-8") as opened:
            return opened.readline()

    def append(self, line: str) -> None:
        """Appends a line; or raises OSError and leaves the file as it was."""
        text, end = line.encode() + b"\n", os.fstat(self._file.fileno()).st_size
        try:
            if self._file.write(text) < len(text):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        except OSError:
            self._file.truncate(end)
            raise

    def replace_first(self, line: str) -> None:
        """Replaces the first line, in a copy that takes the place of the file;
        or raises OSError and changes nothing."""
        copy = self.path.with_name(f".{self.path.name}.new")
        try:
            with open(copy, "wb") as new:
                new.write(line.encode() + b"\n" + self.path.read_bytes().partition(b"\n")[2])
                new.flush()
                os.fsync(new.fileno())
            os.replace(copy, self.path)
        finally:
            copy.unlink(missing_ok=True)
        self._file.close()
        self._file = open(self.path, "a+b", buffering=0)  # noqa: SIM115

    def close(self) -> None:
        self._file.close()
