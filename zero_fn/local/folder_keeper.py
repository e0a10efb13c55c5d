"""A small process that removes a folder in shared memory once nobody needs it: see
`shared_folder.py`, which starts it.

    python -I -S folder_keeper.py FOLDER FD

`FD` is open and locked, and stays so while this process lives.
It imports neither torch nor zero_fn.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import signal
import sys
import time

IDLE_S = 600.0
"""Seconds without a process that uses the folder, after which it is removed,
though the launcher lives: a shell does."""


def started(pid: int) -> str:
    """When a process was started, in clock ticks since boot; nothing if it has ended."""
    try:
        with open(f"/proc/{pid}/stat") as file:
            fields = file.read().rpartition(")")[2].split()
    except OSError:
        return ""
    return "" if fields[0] in "ZX" else fields[19]


def lives(folder: str) -> bool:
    """Whether the launcher of the ranks that came last still runs.

    One that is init, or nobody, never ends.
    """
    try:
        with open(f"{folder}/launcher") as file:
            pid, when = file.read().split()
    except (OSError, ValueError):
        return False
    return int(pid) <= 1 or started(int(pid)) == when


def remove(folder: str, *, is_keeper: bool) -> bool:
    """Removes the folder unless a process uses it, or another keeper keeps it.

    Returns whether it is gone.
    """
    held: list[int] = []
    gone = f"{folder}.{os.urandom(4).hex()}.gone"
    try:
        if folder.endswith(".gone"):  # and whoever removed it was killed
            gone = folder
            return True
        # Whoever makes the folder may be about to make these: they are made here,
        # so that there is one to lock.
        for name in ("users",) if is_keeper else ("users", "keeper"):
            held.append(os.open(f"{folder}/{name}", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600))
            fcntl.flock(held[-1], fcntl.LOCK_EX | fcntl.LOCK_NB)
        if not os.path.samestat(os.fstat(held[0]), os.stat(f"{folder}/users")):
            return False  # it was removed meanwhile, and is another one's
        # All at once: a process that waits for the lock sees that it has come too late,
        # and one that comes finds nothing.
        os.rename(folder, gone)
    except FileNotFoundError:
        return True
    except OSError:
        return False
    finally:
        for file in held:
            os.close(file)
        shutil.rmtree(gone, ignore_errors=True)
    return True


def is_used(folder: str) -> bool:
    """Whether a process uses the folder."""
    try:
        users = os.open(f"{folder}/users", os.O_RDWR | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        fcntl.flock(users, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return False
    except OSError:
        return True
    finally:
        os.close(users)


def keep(folder: str) -> None:
    told: list[int] = []
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, lambda number, _: told.append(number))
    idle_since = time.monotonic()
    while os.path.exists(f"{folder}/users"):
        is_idle = time.monotonic() - idle_since > IDLE_S
        if is_used(folder):
            idle_since = time.monotonic()
        elif (told or not lives(folder) or is_idle) and remove(folder, is_keeper=True):
            return
        time.sleep(0.5)


if __name__ == "__main__":
    if os.fork():
        os._exit(0)  # whoever has started this one need not wait for it
    keep(sys.argv[1])
