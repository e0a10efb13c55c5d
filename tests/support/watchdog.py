"""A process beside each process of tests, which ends it when a test overstays: whatever that waits in.

pytest-timeout raises in the main thread, which hears of nothing while it waits in C++. The watchdog is told which test began,
and how long that may take. When the time is over it asks for the stacks of all threads (SIGABRT, which `faulthandler`
answers wherever the process is) and kills. Under pytest-xdist the test counts as failed, and a new process runs the rest.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator

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

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Iterator[None]:
        marker = item.get_closest_marker("timeout")
        limit_s = float(marker.args[0] if marker is not None and marker.args else item.config.getini("timeout") or 300)
        self._tell(f"{limit_s + _GRACE_S} {item.nodeid}")
        try:
            return (yield)
        finally:
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
