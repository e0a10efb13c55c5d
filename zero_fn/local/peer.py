"""One rank, seen from the process that asked for it."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Mapping
from dataclasses import dataclass
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from typing import TextIO

from zero_fn.local.rank import Report

__all__ = ["Peer"]


@dataclass(slots=True)
class Peer:
    """A rank and what it has said so far."""

    rank: int
    process: BaseProcess
    connection: Connection  # functions go to it, reports come back
    files: Mapping[str, TextIO]  # what it prints and where it is, see `Seat.file`; read up to what is known
    report: Report | None = None  # on the function it runs, once it came
    exit_code: int | None = None  # once its process has ended and all it sent was taken

    @property
    def pid(self) -> int:
        assert self.process.pid is not None, f"rank {self.rank} was not started"
        return self.process.pid

    @property
    def is_done(self) -> bool:
        return self.report is not None or self.exit_code is not None

    @property
    def has_failed(self) -> bool:
        return self.is_done and (self.report is None or not self.report.is_value)

    def ask(self, message: bytes) -> None:
        """Sends a function, unless the rank is gone."""
        self.report = None
        for file in self.files.values():
            file.read()  # what earlier functions printed
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            self.connection.send_bytes(message)

    def hear(self) -> None:
        """Takes what has come."""
        exit_code = self.process.exitcode  # asked first: after its end nothing comes
        try:
            while self.connection.poll():
                self.report = self.connection.recv()
        except (EOFError, OSError):
            self.connection.close()
        self.exit_code = exit_code

    def kill(self) -> None:
        """Ends the rank and what it started, if it still runs."""
        if self.process.exitcode is None:
            self.process.kill()
            with contextlib.suppress(OSError):
                os.killpg(self.pid, signal.SIGKILL)

    def close(self) -> None:
        """Lets go of the rank."""
        self.connection.close()
        for file in self.files.values():
            file.close()
