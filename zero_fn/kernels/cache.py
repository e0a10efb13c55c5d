"""A folder of this user's for compiled libraries, that nobody else can write to.

What is loaded from it runs with the rights of this process, so neither the folder nor a file in it is trusted that
another user owns or may write. Where there is no such folder (a read-only home, somebody else's), the library is compiled
into a folder of this process and removed when it is loaded.
"""

from __future__ import annotations

import os
import stat
import tempfile
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

__all__ = ["cache_folder", "is_ours", "stored"]


def cache_folder() -> Path | None:
    """The folder, made if it is missing; None if none can be had."""
    base = os.environ.get("XDG_CACHE_HOME")
    with suppress(OSError, RuntimeError):  # RuntimeError: no home
        folder = (Path(base) if base else Path.home() / ".cache") / "zero_fn" / "kernels"
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        if is_ours(folder) and os.access(folder, os.R_OK | os.W_OK | os.X_OK):
            return folder
    return None


def is_ours(path: Path) -> bool:
    """Whether this user owns a file or folder and nobody else may write it. Links are not followed."""
    try:
        found = path.lstat()
    except OSError:
        return False
    return (
        not stat.S_ISLNK(found.st_mode)
        and found.st_uid == os.getuid()
        and not found.st_mode & (stat.S_IWGRP | stat.S_IWOTH)
    )


def stored(path: Path, make: Callable[[Path], None], *, anew: bool = False) -> None:
    """Makes a file unless it is there. Any number of processes may do so at once: each sees all of it or nothing.

    Args:
        path: The file, in a folder that is ours.
        make: Writes it to the path it is given.
        anew: Replace the one that is there.

    Raises:
        OSError: The folder cannot be written.
    """
    if is_ours(path) and not anew:
        return
    made, name = tempfile.mkstemp(prefix=".", suffix=path.suffix, dir=path.parent)
    os.close(made)
    try:
        make(Path(name))
        os.chmod(name, 0o700)
        os.replace(name, path)  # whoever has loaded the old one keeps it
    except BaseException:
        with suppress(OSError):
            os.unlink(name)
        raise
