"""What carries disk requests: io_uring where the kernel allows it, threads elsewhere. One carrier for each process."""

from __future__ import annotations

import ctypes
import os
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from typing import Protocol

from torch import Tensor

from zero_fn.storage.request import Request
from zero_fn.storage.uring import Uring

__all__ = ["Carrier", "Threads", "chosen_carrier"]

_THREADS = 4


class Carrier(Protocol):
    """What carries requests, and holds them until they are done. As text it says what it is."""

    def submit(self, requests: Sequence[Request]) -> None:
        """Begins requests; returns at once."""

    def wait(self, requests: Sequence[Request]) -> None:
        """Waits until all of these are done or have failed."""

    def settle(self, memory: Tensor) -> None:
        """Waits for what nobody waits for any more after an interrupt, and uses this memory."""


class Threads:
    """Carries requests with `os.preadv` and `os.pwritev` in a few threads.

    They are as fast as io_uring while the interpreter is idle. Beside a busy main thread each request waits for the
    interpreter, which costs up to two thirds of the speed; so they are the second choice.
    """

    def __init__(self) -> None:
        self._pool = ThreadPoolExecutor(_THREADS, thread_name_prefix="zero_fn_storage")
        self._begun: list[Request] = []

    def __str__(self) -> str:
        return f"{_THREADS} threads"

    def submit(self, requests: Sequence[Request]) -> None:
        """Begins requests."""
        self._begun = [request for request in self._begun if not request.is_done]
        self.wait([other for other in self._begun if any(map(other.meets, requests))])
        for request in requests:
            self._begun.append(request)
            request.ticket = self._pool.submit(_carry, request)

    def wait(self, requests: Sequence[Request]) -> None:
        """Waits until all of these are done or have failed."""
        for request in requests:
            request.ticket = request.ticket or self._pool.submit(_carry, request)
            request.ticket.result()

    def settle(self, memory: Tensor) -> None:
        """See `Carrier.settle`."""
        self.wait([request for request in self._begun if request.uses(memory)])


def _carry(request: Request) -> None:
    while not request.is_done:
        memory = (ctypes.c_char * request.nbytes).from_address(request.address)
        move = os.pwritev if request.is_write else os.preadv
        try:
            result = move(request.file.fd, [memory], request.offset)
        except OSError as error:
            result = -(error.errno or 5)
        request.advance(result)


def chosen_carrier() -> Carrier:
    """The carrier of this process. A forked process makes its own, as a ring belongs to the process that made it."""
    return _of_process(os.getpid())


@cache
def _of_process(_pid: int) -> Carrier:
    if sys.platform == "linux" and sys.byteorder == "little":
        try:
            return Uring()
        except OSError:  # no io_uring, or refused by seccomp or by the administrator
            pass
    return Threads()
