"""A process beside each process of tests, which ends it when a test overstays: whatever that waits in.

pytest-timeout raises in the main thread, which hears of nothing while it waits in C++. The watchdog is told which test began,
and how long pytest-timeout gives it. When that and a grace are over it asks for the stacks of all threads (SIGABRT, which
`faulthandler` answers wherever the process is) and kills. Under pytest-xdist the test counts as failed, and a new process
runs the rest.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest

__all__ = ["Watchdog", "leave"]

_GRACE_S = 60.0  # pytest-timeout comes first where it can, and tears down
_PROGRAM = """
import os, select, signal, sys, time
watched, end_s, test, unread = int(sys.argv[1]), None, "", b""
while True:
    left_s = None if end_s is None else max(0.0, end_s - time.monotonic())
    if select.select([0], [], [], left_s)[0]:
        read = os.read(0, 1 << 16)
        if not read:  # the process is over
            break
        *lines, unread = (unread + read).split(b"\\n")
        for line in lines:
            seconds, _, test = line.decode().partition(" ")
            end_s = time.monotonic() + float(seconds) if test else None
    else:
        sys.stderr.write(f"\\n{test} overstays, and its process is ended.\\n")
        sys.stderr.flush()
        for number in (signal.SIGABRT, signal.SIGKILL):
            try:
                os.kill(watched, number)
            except ProcessLookupError:
                break
            time.sleep(2)
        break
"""


class Watchdog:
    """A plugin of pytest."""

    def __init__(self) -> None:
        # A session of its own, so that what ends the tests' process group leaves it to look after the process.
        self._process = subprocess.Popen(
            [sys.executable, "-S", "-E", "-c", _PROGRAM, str(os.getpid())],
            stdin=subprocess.PIPE,
            start_new_session=True,
        )

    @pytest.hookimpl(wrapper=True)
    def pytest_timeout_set_timer(self, item: pytest.Item, settings: Any) -> Iterator[None]:
        self._tell(f"{settings.timeout + _GRACE_S} {item.nodeid}")
        return (yield)

    @pytest.hookimpl(wrapper=True)
    def pytest_timeout_cancel_timer(self) -> Iterator[None]:
        self._tell("0 ")
        return (yield)

    def pytest_enter_pdb(self) -> None:
        self._tell("0 ")

    def pytest_unconfigure(self) -> None:
        if self._process.stdin is not None:
            self._process.stdin.close()
        self._process.wait()

    def _tell(self, line: str) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(line.encode() + b"\n")
        self._process.stdin.flush()


def leave(why: str) -> None:
    """Ends this process of tests, in which nothing could be trusted any more."""
    sys.stderr.write(f"\n{why}: this process of tests ends.\n")
    sys.stderr.flush()
    os.kill(os.getpid(), signal.SIGKILL)
