"""The life of one rank, inside its process: take a seat, run functions, leave.

[Note: leaving] A rank that has run its only function stays for `_LINGER_S`, so that its last messages arrive, and then
leaves. A peer that still waits for it in a collective then gets an error, instead of waiting for the timeout.
"""

from __future__ import annotations

import faulthandler
import linecache
import multiprocessing
import os
import signal
import sys
import threading
import time
import traceback
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import TextIO

import torch
import torch.distributed as dist

from zero_fn.local.gloo import give_groups_one_thread
from zero_fn.local.sending import dumps, dumps_exception, loads

__all__ = ["Report", "Seat", "live", "seat"]

_LINGER_S = 5.0


@dataclass(frozen=True, slots=True)
class Seat:
    """What makes a process one rank of n; see `LocalRanks`."""

    rank: int
    n: int
    backend: str
    threads: int
    collective_timeout_s: float | None
    runs_once: bool
    folder: Path  # of the files that ranks and their parent share
    environ: dict[str, str]  # all of it
    cells: dict[str, list[str]]  # source lines of notebook cells, which are in no file, for tracebacks

    def file(self, kind: str) -> Path:
        """What this rank prints, "out" and "err", and where it is, "stacks", which it writes on SIGUSR1."""
        return self.folder / f"{self.rank}.{kind}"


@dataclass(frozen=True, slots=True)
class Report:
    """What a rank says about one function: a value or an exception, pickled."""

    is_value: bool
    pickled: bytes
    traceback: str = ""
    at_s: float = 0.0  # on the monotonic clock, which is the same for all processes of a machine


seat: Seat | None = None
"""The seat of this process, if it is a rank."""


def live(connection: Connection, own: Seat) -> None:
    """Runs the functions that come over the connection, and sends a `Report` on each back, until the connection ends."""
    global seat
    seat = own
    os.setpgid(0, 0)  # Ctrl-C reaches the parent only, and what the rank starts can be killed with it
    threading.Thread(target=_end_with_parent, daemon=True).start()
    for fd, kind in ((1, "out"), (2, "err")):
        os.dup2(os.open(own.file(kind), os.O_WRONLY | os.O_APPEND), fd)
    patience_s: float | None = None
    while connection.poll(patience_s):
        try:
            message = connection.recv_bytes()
        except (EOFError, OSError):
            return
        # Reads before it joins: a rank that waits for one that cannot join would not read what the parent sends.
        report = _perform(message, own)
        sys.stdout.flush()
        sys.stderr.flush()
        connection.send(report)
        patience_s = _LINGER_S if own.runs_once and report.is_value else None  # [Note: leaving]


def _end_with_parent() -> None:
    """Waits until the parent is gone, however it ended, then kills the rank and what it started."""
    parent = multiprocessing.parent_process()
    assert parent is not None, "a rank has been started by somebody"
    parent.join()
    os.killpg(0, signal.SIGKILL)


def _perform(message: bytes, own: Seat) -> Report:
    try:
        if not dist.is_initialized():
            _join(own)
        fn, args, kwargs = loads(message, "The function")
        value = fn(*args, **kwargs)
        if torch.cuda.is_available() and torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
            torch.cuda.synchronize()  # a rank that leaves with kernels in flight would break collectives of its peers
        report = Report(True, dumps(value, f"What rank {own.rank} returned"))
        if own.runs_once:
            threading._shutdown()  # type: ignore[attr-defined]  # joins threads that write, as the end of Python does
        return report
    except SystemExit:
        raise
    except BaseException as error:
        at_s = time.monotonic()
        return Report(False, dumps_exception(error), "".join(traceback.format_exception(error)), at_s)


def _join(own: Seat) -> None:
    """Makes this process a rank of the default process group."""
    os.environ.clear()
    os.environ.update(own.environ)
    sys.stdout, sys.stderr = _by_line(1), _by_line(2)
    faulthandler.enable()
    faulthandler.register(signal.SIGUSR1, file=os.open(own.file("stacks"), os.O_WRONLY))
    linecache.cache.update({name: (0, None, lines, name) for name, lines in own.cells.items()})
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed()  # or every launch would draw the numbers of the server it is forked from
    torch.set_num_threads(own.threads)
    if "nccl" in own.backend:
        torch.cuda.set_device(own.rank)
    dist.set_debug_level_from_env()  # type: ignore[attr-defined]
    give_groups_one_thread()
    timeout = None if own.collective_timeout_s is None else timedelta(seconds=own.collective_timeout_s)
    # A file, not a port: nothing to race for.
    store = dist.FileStore(str(own.folder / "store"), own.n)  # type: ignore[attr-defined]
    dist.init_process_group(own.backend, store=store, rank=own.rank, world_size=own.n, timeout=timeout)


def _by_line(fd: int) -> TextIO:
    r"""A text stream that writes whenever a line ends, by "\n" or by the "\r" of a progress bar."""
    return open(fd, "w", buffering=1, encoding="utf-8", errors="backslashreplace", closefd=False)
