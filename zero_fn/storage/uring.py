"""Requests by io_uring: the kernel works on them while this process computes,
without a thread of ours.

[Note: rings in Python] The rings are memory shared with the kernel. The kernel reads the submission
ring in `io_uring_enter` only, which this thread calls after it has written; completions are read
after a call of `io_uring_enter`, too. The system call orders both sides on every processor, so no
other barrier is needed. Layouts are those of `linux/io_uring.h`, which never change.

[Note: interrupts of the ring] A KeyboardInterrupt may come between any two lines, and the ring
serves the whole process. So each thing is done by one store to the ring, and what comes before and
after it may be done again: a request is handed over by the new tail, and an answer is taken by the
new head. A transfer whose owner was interrupted goes on: whoever wants its memory, or its place in
the file, next waits for it.

[Note: giving the interpreter away] A call that releases the interpreter may wait 5 ms to have it
back if another thread runs Python. So calls that do not wait for a disk keep it. This is what
io_uring is for here: beside a busy interpreter it reads and writes blocks 1.3 to 1.8 times as fast
as threads do, beside an idle one as fast.
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import struct
import sys
import threading
import weakref
from collections import deque
from collections.abc import Sequence
from functools import cache

from torch import Tensor

from zero_fn.storage.io import IoBackend, Request, Threads

__all__ = ["Uring", "io_backend"]

_SETUP, _ENTER = 425, 426  # the same numbers on every architecture
_ENTRIES = 128
_PARAMS_NBYTES = 120
_SINGLE_MMAP = 1  # a feature of Linux 5.4
_GETEVENTS = 1
_SQES_OFFSET = 0x10000000
_READ, _WRITE = 22, 23
_SQE = struct.Struct("<BBHiQQIIQHHiQQ")
_CQE = struct.Struct("<Qii")
_MASK = 0xFFFFFFFF

_libc = ctypes.CDLL(None, use_errno=True)
_libc_kept = ctypes.PyDLL(None, use_errno=True)


class Uring:
    """One ring.

    It may be called from several threads, but not from finalizers,
    which run in the midst of other calls.

    Raises, when it is made:
        OSError: The kernel has no io_uring or refuses it (seccomp, `io_uring_disabled`).
    """

    def __init__(self) -> None:
        params = bytearray(_PARAMS_NBYTES)
        self._fd = _syscall(
            _SETUP, _ENTRIES, ctypes.byref((ctypes.c_char * _PARAMS_NBYTES).from_buffer(params))
        )
        weakref.finalize(self, os.close, self._fd).atexit = False
        words = struct.unpack("<30I", params)
        entries, cq_entries, features = words[0], words[1], words[5]
        sq, cq = words[10:20], words[20:30]
        if not features & _SINGLE_MMAP:
            raise OSError(errno.ENOSYS, "this io_uring is too old")
        nbytes = max(sq[6] + entries * 4, cq[5] + cq_entries * _CQE.size)
        self._rings = mmap.mmap(self._fd, nbytes, offset=0)
        self._sqes = mmap.mmap(self._fd, entries * _SQE.size, offset=_SQES_OFFSET)
        self._sq_head = ctypes.c_uint32.from_buffer(self._rings, sq[0])
        self._sq_tail = ctypes.c_uint32.from_buffer(self._rings, sq[1])
        self._cq_head = ctypes.c_uint32.from_buffer(self._rings, cq[0])
        self._cq_tail = ctypes.c_uint32.from_buffer(self._rings, cq[1])
        self._entries = entries
        self._cq_entries = cq_entries
        self._cqes_at = cq[5]
        for index in range(entries):
            struct.pack_into("<I", self._rings, sq[6] + 4 * index, index)
        self._waiting: deque[Request] = deque()
        # By the tail when it was handed over, with its answers then.
        self._under_way: dict[int, tuple[Request, int]] = {}
        self._lock = threading.RLock()

    def __str__(self) -> str:
        return "io_uring"

    def submit(self, requests: Sequence[Request]) -> None:
        with self._lock:
            left = [*self._waiting, *(request for request, _ in self._under_way.values())]
            self._finish([other for other in left if any(map(other.meets, requests))])
            self._waiting.extend(requests)
            self._enter(0)

    def wait(self, requests: Sequence[Request]) -> None:
        """Waits until all of these are done or have failed."""
        with self._lock:
            self._enter(0)
            self._waiting.extend(
                request for request in requests if not request.is_done and not self._has(request)
            )
            self._finish(requests)

    def settle(self, memory: Tensor) -> None:
        """Waits for what nobody waits for any more, and uses this memory."""
        with self._lock:
            left = [*self._waiting, *(request for request, _ in self._under_way.values())]
            self._finish([other for other in left if other.uses(memory)])

    def _has(self, request: Request) -> bool:
        return request in self._waiting or any(
            request is other for other, _ in self._under_way.values()
        )

    def _finish(self, requests: Sequence[Request]) -> None:
        # So many answers will come: each of these that is not done gets one at least.
        while lacking := sum(not request.is_done for request in requests):
            self._enter(lacking)

    def _enter(self, least: int) -> None:
        """Hands waiting requests to the kernel, and waits for at least so many answers."""
        tail = self._sq_tail.value
        # An interrupt came before the request was handed over, or right after that.
        self._under_way.pop(tail, None)
        if self._waiting and self._under_way.get(tail - 1 & _MASK, (None,))[0] is self._waiting[0]:
            self._waiting.popleft()
        while self._waiting and len(self._under_way) < self._entries:
            self._hand_over(self._waiting[0])
            self._waiting.popleft()
        least = min(least, len(self._under_way))
        is_first = True
        while (handed := self._sq_tail.value - self._sq_head.value & _MASK) or least or is_first:
            is_first = False
            try:
                _syscall(_ENTER, self._fd, handed, least, _GETEVENTS, None, 0, waits=least > 0)
            except OSError as error:
                if error.errno not in (errno.EINTR, errno.EAGAIN, errno.EBUSY):
                    raise
            else:
                least = 0
            self._reap()

    def _hand_over(self, request: Request) -> None:
        """Puts a request into the submission ring."""
        code, tail = _WRITE if request.is_write else _READ, self._sq_tail.value
        self._under_way[tail] = request, request.answers
        what = (code, 0, 0, request.file.fd, request.offset, request.address, request.nbytes)
        _SQE.pack_into(self._sqes, tail % self._entries * _SQE.size, *what, 0, tail, 0, 0, 0, 0, 0)
        self._sq_tail.value = tail + 1 & _MASK

    def _reap(self) -> None:
        """Takes the answers out of the completion ring."""
        while (head := self._cq_head.value) != self._cq_tail.value:
            place = self._cqes_at + head % self._cq_entries * _CQE.size
            number, result, _ = _CQE.unpack_from(self._rings, place)
            request, answers = self._under_way.get(number, (None, 0))
            if request is not None:
                if request.answers == answers:
                    request.advance(result)
                if not request.is_done and request not in self._waiting:
                    self._waiting.append(request)
                self._under_way.pop(number)
            self._cq_head.value = head + 1 & _MASK


def _syscall(number: int, *args: object, waits: bool = True) -> int:
    """Calls the kernel; a call that does not wait keeps the interpreter.
    [Note: giving the interpreter away]"""
    wide = [ctypes.c_long(arg) if isinstance(arg, int) else arg for arg in args]
    library = _libc if waits else _libc_kept
    result: int = library.syscall(ctypes.c_long(number), *wide)
    if result < 0:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))
    return result


def io_backend() -> IoBackend:
    """io_uring where the kernel allows it, else threads.

    A forked process makes its own, as a ring belongs to its process.
    """
    return _of_process(os.getpid())


@cache
def _of_process(_pid: int) -> IoBackend:
    if sys.platform == "linux" and sys.byteorder == "little":
        try:
            return Uring()
        except OSError:  # no io_uring, or refused by seccomp or by the administrator
            pass
    return Threads()
