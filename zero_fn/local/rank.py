"""The life of one rank, inside its process: take a seat, run functions, leave.

[Note: leaving]
A rank that returned stays for `linger_s`, so that its last messages arrive, and then leaves. A peer that still waits
for it in a collective sees a closed connection, and an error, instead of a silence until the timeout.
"""

from __future__ import annotations

import faulthandler
import linecache
import os
import pickle
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
from zero_fn.local.sending import SendError, brief, dumps, dumps_exception, loads

__all__ = ["Outcome", "Seat", "rank_main", "seat"]


@dataclass(frozen=True, slots=True)
class Seat:
    """What makes a forked process one rank of n.

    Attributes:
        rank: Position among the ranks, `0 <= rank < n`.
        n: Number of ranks.
        backend: Of the default process group, as `init_process_group` takes it.
        threads: Of torch, inside the rank.
        collective_timeout_s: Seconds a collective may wait for its peers; None for torch's default.
        linger_s: Seconds to stay after the first function returned; None to stay for more. [Note: leaving]
        directory: Of the files that the ranks and their parent share.
        environ: The whole environment of the rank.
        cwd: Working directory.
        path: `sys.path`.
        argv: `sys.argv`.
        cells: Source lines of code that is in no file, for tracebacks: file name -> lines.
    """

    rank: int
    n: int
    backend: str
    threads: int
    collective_timeout_s: float | None
    linger_s: float | None
    directory: str
    environ: dict[str, str]
    cwd: str
    path: list[str]
    argv: list[str]
    cells: dict[str, list[str]]


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a rank reports about one function.

    Attributes:
        is_value: Whether the function returned; else it raised.
        pickled: The value or the exception.
        traceback: Of the exception, as text; empty for a value.
        at_s: When, on the monotonic clock of the machine, in seconds.
    """

    is_value: bool
    pickled: bytes
    traceback: str
    at_s: float


seat: Seat | None = None
"""The seat of this process, if it is a rank."""

_stacks_file: TextIO | None = None


def rank_main(connection: Connection) -> None:
    """The life of a rank: take a seat, run functions, end when nobody is there to ask for more."""
    global seat
    seat = pickle.loads(connection.recv_bytes())
    assert isinstance(seat, Seat), "the first message to a rank is its seat"
    has_joined = False
    patience_s: float | None = None
    while connection.poll(patience_s):
        try:
            message = connection.recv_bytes()
        except (EOFError, OSError):
            break
        # Read first, join after: a rank that waits for one that cannot join would not read what the parent is sending.
        refusal = None if has_joined else _join(seat)
        has_joined = True
        outcome = refusal or _perform(message)
        sys.stdout.flush()
        sys.stderr.flush()
        connection.send_bytes(pickle.dumps(outcome))
        patience_s = seat.linger_s if outcome.is_value else None
    threading._shutdown()  # type: ignore[attr-defined]  # joins threads that write, as the end of any Python program does


def _join(seat: Seat) -> Outcome | None:
    """Makes this process a rank of the default process group, or says why it cannot."""
    global _stacks_file
    faulthandler.enable()
    _stacks_file = (Path(seat.directory) / f"{seat.rank}.stacks").open("w")
    faulthandler.register(signal.SIGUSR1, file=_stacks_file, all_threads=True)
    try:
        os.environ.clear()
        os.environ.update(seat.environ)
        os.chdir(seat.cwd)
        sys.path[:] = seat.path
        sys.argv[:] = seat.argv
        linecache.cache.update({name: (0, None, lines, name) for name, lines in seat.cells.items()})
        sys.stdout = sys.__stdout__ = _by_line(1)  # type: ignore[misc, assignment]
        sys.stderr = sys.__stderr__ = _by_line(2)  # type: ignore[misc, assignment]
        if "numpy" in sys.modules:
            sys.modules["numpy"].random.seed()  # or every launch would draw the numbers of the server it is forked from
        _join_process_group(seat)
    except Exception as error:
        return _raised(error)
    return None


def _by_line(fd: int) -> TextIO:
    r"""A text stream that writes whenever a line ends, by "\n" or by the "\r" of a progress bar."""
    return open(fd, "w", buffering=1, encoding="utf-8", errors="backslashreplace", closefd=False)


def _join_process_group(seat: Seat) -> None:
    torch.set_num_threads(seat.threads)
    if "nccl" in seat.backend:
        torch.cuda.set_device(seat.rank)
    dist.set_debug_level_from_env()  # type: ignore[attr-defined]
    give_groups_one_thread()
    timeout = None if seat.collective_timeout_s is None else timedelta(seconds=seat.collective_timeout_s)
    # A file, not a port: nothing to race for.
    store = dist.FileStore(str(Path(seat.directory) / "store"), seat.n)  # type: ignore[attr-defined]
    dist.init_process_group(seat.backend, store=store, rank=seat.rank, world_size=seat.n, timeout=timeout)


def _perform(message: bytes) -> Outcome:
    try:
        fn, args, kwargs = loads(message)
    except Exception as error:
        lost = SendError(
            "The function cannot be rebuilt on the ranks.",
            error=f"{type(error).__name__}: {error}",
            fix="import what it needs inside the function; modules are found by the caller's sys.path",
        )
        lost.__cause__ = error
        return _raised(lost)
    try:
        value = fn(*args, **kwargs)
        _wait_for_devices()
    except SystemExit:
        raise
    except BaseException as error:
        return _raised(error)
    try:
        return Outcome(True, dumps(value), "", time.monotonic())
    except Exception as error:
        unsendable = SendError(
            "The function returned a value that cannot be sent back.",
            value=brief(value),
            error=f"{type(error).__name__}: {error}",
            fix="return plain tensors and numbers: value.full_tensor(), value.item()",
        )
        unsendable.__cause__ = error
        return _raised(unsendable)


def _wait_for_devices() -> None:
    """A rank that leaves with kernels in flight would break the collectives of its peers."""
    if torch.cuda.is_available() and torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        torch.cuda.synchronize()


def _raised(error: BaseException) -> Outcome:
    at_s = time.monotonic()
    own_frame = error.__traceback__
    below = own_frame.tb_next if own_frame is not None and own_frame.tb_next is not None else own_frame
    text = "".join(traceback.format_exception(type(error), error, below))
    return Outcome(False, dumps_exception(error), text, at_s)
