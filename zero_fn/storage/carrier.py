"""What carries requests: io_uring where the kernel lets it, threads elsewhere. Chosen once for the process."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from functools import cache
from typing import Protocol

from zero_fn.storage.request import Request
from zero_fn.storage.threads import Threads
from zero_fn.storage.uring import Uring

__all__ = ["Carrier", "chosen_carrier"]


class Carrier(Protocol):
    """What carries requests, and keeps them until they are done. Printed, it says what it is."""

    def submit(self, requests: Sequence[Request]) -> None:
        """Begins requests; returns at once."""

    def wait(self, requests: Sequence[Request]) -> None:
        """Returns when all of these are done or have failed."""


def chosen_carrier() -> Carrier:
    """The carrier of this process. A forked process makes its own: a ring belongs to the one that made it."""
    return _of_process(os.getpid())


@cache
def _of_process(_pid: int) -> Carrier:
    if sys.platform == "linux" and sys.byteorder == "little":
        try:
            return Uring()
        except OSError:  # no io_uring, or refused by seccomp or by the administrator
            pass
    return Threads()
