"""What runs in the process of a rank."""

from __future__ import annotations

import faulthandler
import gc
import multiprocessing
import os
import pickle
import signal
import sys
import threading
import time
import traceback
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

import torch

from zero_fn.errors import LostRankError
from zero_fn.local.pickling import dumps, dumps_exception

__all__ = ["Report", "live", "place"]

_LINGER_S = 5.0

place: tuple[int, int] | None = None
"""Rank and number of ranks, if this process is a rank."""


@dataclass(frozen=True, slots=True)
class Report:
    """The result of one function on a rank: a value or an exception, pickled."""

    is_value: bool
    pickled: bytes
    traceback: str = ""
    guilt: tuple[bool, float] = (True, 0.0)
    """For an exception: whether it is a `LostRankError`, and when it was raised.

    The report with the least is to blame.
    """


def live(connection: Connection, rank: int, n: int, outputs: tuple[str, str]) -> None:
    """Runs functions as one of n ranks until the connection ends, and sends a `Report` on each.

    A message is a pickled function with its arguments, and whether it is the last one. The files
    `outputs` take what the rank writes to stdout and to stderr; on SIGUSR1 it writes the stacks of
    its threads to the second.
    """
    global place
    place = rank, n
    # Ctrl-C reaches the parent only, and processes that the rank starts can be killed with it.
    os.setpgid(0, 0)
    gc.freeze()  # modules of the server are never garbage: collections need not look at them
    threading.Thread(target=_end_with_parent, daemon=True).start()
    for fd, output in enumerate(outputs, 1):
        os.dup2(os.open(output, os.O_WRONLY | os.O_APPEND), fd)
    # By line, which may end with the "\r" of a progress bar.
    lines: dict[str, Any] = {"buffering": 1, "encoding": "utf-8", "errors": "backslashreplace"}
    sys.stdout = open(1, "w", closefd=False, **lines)  # noqa: SIM115
    sys.stderr = open(2, "w", closefd=False, **lines)  # noqa: SIM115
    faulthandler.enable()
    faulthandler.register(signal.SIGUSR1)
    is_last = False
    # After its last function a rank stays a while, so that its messages arrive.
    # A peer that still waits then gets an error.
    while connection.poll(_LINGER_S if is_last else None):
        try:
            message, is_last = connection.recv()
        except (EOFError, OSError):
            return
        report = _perform(message, is_last)
        is_last = is_last and report.is_value
        sys.stdout.flush()
        sys.stderr.flush()
        connection.send(report)


def _end_with_parent() -> None:
    """Waits until the parent has ended, however it did, then kills the rank and
    the processes that it started."""
    parent = multiprocessing.parent_process()
    assert parent is not None, "a rank has been started by somebody"
    parent.join()
    os.killpg(0, signal.SIGKILL)


def _perform(message: bytes, is_last: bool) -> Report:
    try:
        fn, args, kwargs = pickle.loads(message)
        value = fn(*args, **kwargs)
        if torch.cuda.is_available() and torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
            # A rank that leaves with kernels in flight would break collectives of its peers.
            torch.cuda.synchronize()
        report = Report(True, dumps(value, "What a rank returned"))
        if is_last:
            # Joins threads, as Python does at its end.
            threading._shutdown()  # type: ignore[attr-defined]
        return report
    except SystemExit:
        raise
    except BaseException as error:
        guilt = isinstance(error, LostRankError), time.monotonic()
        return Report(
            False, dumps_exception(error), "".join(traceback.format_exception(error)), guilt
        )
