"""A folder in the shared memory of this host, which outlives a process
that is killed, and no launcher.

/dev/shm/zero_fn-0123456789abcdef/   of one user: mode 0700
    users       each process that uses the folder has a shared lock on it,
                which ends with the process
    launcher    the parent of the process that came last, and when it was started
    writer      locked by the process that makes the copies of a run (`claim`)
    keeper      locked by a small process (`folder_keeper.py`): it removes the folder once no
                process uses it and the launcher has ended, or ten minutes have passed
"""

from __future__ import annotations

import fcntl
import os
import stat
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any, ClassVar
from weakref import WeakValueDictionary

from zero_fn.errors import StateError
from zero_fn.local import folder_keeper

__all__ = ["ROOT", "SharedFolder", "host_name"]

ROOT = Path("/dev/shm")

_PREFIX = "zero_fn-"


def host_name() -> str:
    """What is equal for processes that share memory, and for no others:
    the kernel, and what is mounted for it."""
    boot = Path("/proc/sys/kernel/random/boot_id")
    with suppress(OSError):
        return f"{boot.read_text().strip()}/{os.stat(ROOT).st_dev}"
    raise StateError(
        "This system has no shared memory in which files can be kept.",
        missing=str(boot if not boot.exists() else ROOT),
        fix="use Linux; in a container, mount a tmpfs on /dev/shm: docker run --shm-size 64g",
    )


class SharedFolder:
    """A folder that is used by this process until `close`, or its end."""

    _users = _writer = -1
    # Folders in use by this process.
    _writers: ClassVar[WeakValueDictionary[Path, SharedFolder]] = WeakValueDictionary()

    def __init__(self, word: str) -> None:
        """Makes the folder, unless there is one.

        Folders that others have left without a keeper are removed.
        """
        self.path = self.path_of(word)
        _sweep()
        while True:
            with suppress(FileExistsError):
                self.path.mkdir(0o700)
            _require_own(self.path)
            with suppress(FileNotFoundError):  # it has just been removed
                if self._attach():
                    return

    def _attach(self) -> bool:
        users = os.open(self.path / "users", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(users, fcntl.LOCK_SH)
            if not os.path.samestat(os.fstat(users), os.stat(self.path / "users")):
                raise FileNotFoundError
            written = self.path / f"launcher-{os.getpid()}"
            launcher, when = os.getppid(), folder_keeper.started(os.getppid())
            # 0: a launcher that cannot be seen.
            written.write_text(f"{launcher} {when}" if when else "0 0")
            written.replace(self.path / "launcher")
            _start_keeper(self.path)
        except BaseException:
            os.close(users)
            raise
        self._users = users
        return True

    @staticmethod
    def path_of(word: str) -> Path:
        """Where the folder of a word is, or would be."""
        return ROOT / f"{_PREFIX}{word}"

    def claim(self, *, locks: bool) -> bool:
        """Becomes its writer until `leave`; False if there is one,
        in this process or, with `locks`, in another."""
        if self.path in self._writers:
            return False
        if locks:
            writer = os.open(self.path / "writer", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            try:
                # Children that outlive this process do not hold it.
                fcntl.lockf(writer, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:
                os.close(writer)
                return False
            self._writer = writer
        self._writers[self.path] = self
        return True

    def leave(self) -> None:
        """Uses it no longer, and leaves it to processes that come later."""
        if self._writers.get(self.path) is self:
            del self._writers[self.path]
        for file in (self._writer, self._users):
            if file >= 0:
                os.close(file)
        self._users = self._writer = -1

    __del__ = leave

    def close(self) -> None:
        """Uses it no longer. It is removed when no process does."""
        (self.path / "launcher").unlink(missing_ok=True)
        self.leave()


def _require_own(path: Path) -> None:
    with suppress(FileNotFoundError):
        found = path.lstat()
        if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid() or found.st_mode & 0o077:
            raise StateError(
                "A folder in shared memory is not of this user alone.",
                path=path,
                why="another user could read what is in it, or has made it",
                fix=f"rm -r {path}; or remove the file .memory_copies beside the checkpoints, "
                "so that another name is drawn",
            )


def _start_keeper(folder: Path) -> None:
    lock = os.open(folder / "keeper", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:  # there is one
        return
    else:
        command = [sys.executable, "-I", "-S", folder_keeper.__file__, str(folder)]
        none = subprocess.DEVNULL
        pipes: dict[str, Any] = {"stdin": none, "stdout": none, "stderr": none, "pass_fds": [lock]}
        # Nothing of the variables of a rank: the keeper is none.
        own = {name: os.environ[name] for name in ("PATH", "LD_LIBRARY_PATH") if name in os.environ}
        subprocess.run(command, **pipes, env=own, cwd="/", start_new_session=True, check=True)
    finally:
        os.close(lock)


def _sweep() -> None:
    """Removes folders of this user that neither a process uses nor a keeper keeps:
    it was killed, too."""
    for path in ROOT.glob(f"{_PREFIX}*"):
        with suppress(OSError):
            found = path.lstat()
            if stat.S_ISDIR(found.st_mode) and found.st_uid == os.geteuid():
                folder_keeper.remove(str(path), is_keeper=False)
