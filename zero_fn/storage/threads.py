"""Requests through a few threads, each in `preadv` or `pwritev`: where io_uring is refused.

As fast as io_uring while the interpreter is idle. Beside a busy main thread each request waits for the interpreter,
which costs up to two thirds of the speed; that is why this is second choice.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor

from zero_fn.storage.request import Request

__all__ = ["Threads"]

_THREADS = 4


class Threads:
    """Carries requests with `os.preadv` and `os.pwritev`."""

    def __init__(self) -> None:
        self._pool = ThreadPoolExecutor(_THREADS, thread_name_prefix="zero_fn_storage")

    def __str__(self) -> str:
        return f"{_THREADS} threads"

    def submit(self, requests: Sequence[Request]) -> None:
        """Begins requests."""
        for request in requests:
            request.ticket = self._pool.submit(_carry, request)

    def wait(self, requests: Sequence[Request]) -> None:
        """Returns when all of these are done or have failed."""
        for request in requests:
            if isinstance(request.ticket, Future):
                request.ticket.result()


def _carry(request: Request) -> None:
    while not request.is_done:
        memory = (ctypes.c_char * request.nbytes).from_address(request.address)
        move = os.pwritev if request.is_write else os.preadv
        try:
            result = move(request.file.fd, [memory], request.offset)
        except OSError as error:
            result = -(error.errno or 5)
        request.advance(result)
