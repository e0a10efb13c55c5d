"""Requests through io_uring: the kernel carries them while this process computes, without a thread of ours.

[Note: rings in Python] The rings are memory shared with the kernel. The kernel reads the submission ring in
`io_uring_enter` only, which this thread calls after it has written; completions are read after a call of
`io_uring_enter`, too. The system call orders both sides on every processor, so no other barrier is needed. Layouts are
those of `linux/io_uring.h`, which never change.

[Note: giving the interpreter away] A call that releases the interpreter may wait 5 ms to have it back, when another thread
runs Python. So calls that do not wait for a disk keep it.

Buffers that are registered are pinned once and not for each request. Registering counts as locked memory (`ulimit -l`);
where that is too low, requests go without.
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import struct
import threading
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from torch import Tensor

from zero_fn.storage.forked import Owned
from zero_fn.storage.request import Request

__all__ = ["Uring"]

_SETUP, _ENTER, _REGISTER = 425, 426, 427  # the same numbers on every architecture
_ENTRIES = 128
_GETEVENTS = 1
_SQES_OFFSET = 0x10000000
_READ_FIXED, _WRITE_FIXED, _READ, _WRITE = 4, 5, 22, 23
_REGISTER_BUFFERS, _UNREGISTER_BUFFERS = 0, 1
_LARGEST_BUFFER_NBYTES = 1 << 30  # of one registered buffer
_SQE = struct.Struct("<BBHiQQIIQHHiQQ")
_CQE = struct.Struct("<Qii")

_libc = ctypes.CDLL(None, use_errno=True)
_libc_kept = ctypes.PyDLL(None, use_errno=True)


class Uring(Owned):
    """One ring. Calls may come from several threads.

    Raises, when it is made:
        OSError: The kernel has no io_uring or refuses it (seccomp, `io_uring_disabled`).
    """

    def __init__(self) -> None:
        super().__init__()
        params = bytearray(120)
        self._fd = _syscall(_SETUP, _ENTRIES, ctypes.byref((ctypes.c_char * 120).from_buffer(params)))
        words = struct.unpack("<30I", params)
        entries, cq_entries, features = words[0], words[1], words[5]
        sq, cq = words[10:20], words[20:30]
        if not features & 1:  # IORING_FEAT_SINGLE_MMAP, Linux 5.4
            os.close(self._fd)
            raise OSError(errno.ENOSYS, "this io_uring is too old")
        nbytes = max(sq[6] + entries * 4, cq[5] + cq_entries * _CQE.size)
        self._rings = mmap.mmap(self._fd, nbytes, offset=0)
        self._sqes = mmap.mmap(self._fd, entries * _SQE.size, offset=_SQES_OFFSET)
        self._sq_tail = ctypes.c_uint32.from_buffer(self._rings, sq[1])
        self._cq_head = ctypes.c_uint32.from_buffer(self._rings, cq[0])
        self._cq_tail = ctypes.c_uint32.from_buffer(self._rings, cq[1])
        self._mask, self._cq_mask, self._cqes_at = entries - 1, cq_entries - 1, cq[5]
        for index in range(entries):
            struct.pack_into("<I", self._rings, sq[6] + 4 * index, index)
        self._entries = entries
        self._waiting: deque[Request] = deque()
        self._under_way: dict[int, Request] = {}
        self._numbers = 0
        self._registered: list[Tensor] = []
        self._ranges: list[tuple[int, int]] = []
        self._refused: str | None = None
        self._lock = threading.Lock()
        self._dropped: deque[Tensor] = deque()

    def __str__(self) -> str:
        if self._refused is not None:
            return f"io_uring without registered buffers ({self._refused})"
        return "io_uring with registered buffers"

    def register(self, memory: Tensor) -> None:
        """Pins memory for the requests to come; without it they work, slower."""
        with self._held():
            self._register_all([*self._registered, memory])

    def forget(self, memory: Tensor) -> None:
        """Undoes `register`. The garbage collector may call it in the midst of anything; then it is done a little later."""
        if self.is_inherited:
            return
        self._dropped.append(memory)
        if self._lock.acquire(blocking=False):
            self._release()

    def submit(self, requests: Sequence[Request]) -> None:
        """Begins requests."""
        with self._held():
            for request in requests:
                self._waiting.append(request)
            self._enter(0)

    def wait(self, requests: Sequence[Request]) -> None:
        """Returns when all of these are done or have failed."""
        with self._held():
            self._enter(0)
            # As many answers as these lack have come, at the latest, when all of these are done.
            while lacking := sum(not request.is_done for request in requests):
                self._enter(lacking)

    def close(self) -> None:
        """Waits for what is under way and gives the ring back."""
        with self._held():
            while self._under_way or self._waiting:
                self._enter(1)
            del self._sq_tail, self._cq_head, self._cq_tail
            self._rings.close()
            self._sqes.close()
            os.close(self._fd)
            self._registered, self._ranges = [], []
            self._dropped.clear()

    @contextmanager
    def _held(self) -> Iterator[None]:
        self.require_own()
        self._lock.acquire()
        try:
            yield
        finally:
            self._release()

    def _release(self) -> None:
        """Gives the lock back, when memory that was dropped meanwhile is forgotten."""
        try:
            while self._dropped:
                dropped = [self._dropped.popleft() for _ in range(len(self._dropped))]
                self._register_all([m for m in self._registered if not any(m is gone for gone in dropped)])
        finally:
            self._lock.release()

    def _enter(self, least: int) -> None:
        """Hands waiting requests to the kernel and takes note of those that are done."""
        tail = self._sq_tail.value
        handed = 0
        while self._waiting and len(self._under_way) < self._entries:
            request = self._waiting.popleft()
            self._numbers += 1
            self._under_way[self._numbers] = request
            buffer = self._buffer_of(request)
            code = (_READ, _WRITE, _READ_FIXED, _WRITE_FIXED)[2 * (buffer is not None) + request.is_write]
            _SQE.pack_into(
                self._sqes,
                (tail & self._mask) * _SQE.size,
                *(
                    code,
                    0,
                    0,
                    request.file.fd,
                    request.offset,
                    request.address,
                    min(request.nbytes, _LARGEST_BUFFER_NBYTES),
                ),
                *(0, self._numbers, buffer or 0, 0, 0, 0, 0),
            )
            tail = tail + 1 & 0xFFFFFFFF
            self._sq_tail.value = tail
            handed += 1
        least = min(least, len(self._under_way))
        is_first = True
        while handed or least or is_first:
            is_first = False
            try:
                handed -= _syscall(_ENTER, self._fd, handed, least, _GETEVENTS, None, 0, waits=least > 0)
            except OSError as error:
                if error.errno not in (errno.EINTR, errno.EAGAIN, errno.EBUSY):
                    raise
            else:
                least = 0
            self._reap()

    def _reap(self) -> None:
        head, tail = self._cq_head.value, self._cq_tail.value
        while head != tail:
            number, result, _ = _CQE.unpack_from(self._rings, self._cqes_at + (head & self._cq_mask) * _CQE.size)
            head = head + 1 & 0xFFFFFFFF
            request = self._under_way.pop(number)
            request.advance(result)
            if not request.is_done:
                self._waiting.append(request)
        self._cq_head.value = head

    def _buffer_of(self, request: Request) -> int | None:
        """The registered buffer in which all of the memory of a request lies."""
        for index, (start, end) in enumerate(self._ranges):
            if start <= request.address and request.address + request.nbytes <= end:
                return index
        return None

    def _register_all(self, memories: list[Tensor]) -> None:
        while self._under_way or self._waiting:  # none of them may use what changes now
            self._enter(1)
        if self._ranges:
            _syscall(_REGISTER, self._fd, _UNREGISTER_BUFFERS, None, 0)
        self._ranges, self._registered = [], memories
        ranges = [
            (start, min(start + _LARGEST_BUFFER_NBYTES, memory.data_ptr() + memory.numel()))
            for memory in memories
            for start in range(memory.data_ptr(), memory.data_ptr() + memory.numel(), _LARGEST_BUFFER_NBYTES)
        ]
        if not ranges:
            return
        vectors = struct.pack(f"<{2 * len(ranges)}Q", *(n for start, end in ranges for n in (start, end - start)))
        try:
            _syscall(_REGISTER, self._fd, _REGISTER_BUFFERS, vectors, len(ranges))
        except OSError as error:
            self._refused = f"{error.strerror}; see ulimit -l"
        else:
            self._ranges, self._refused = ranges, None


def _syscall(number: int, *args: object, waits: bool = True) -> int:
    """Calls the kernel. What does not wait keeps the interpreter meanwhile. [Note: giving the interpreter away]"""
    wide = [ctypes.c_long(arg) if isinstance(arg, int) else arg for arg in args]
    library = _libc if waits else _libc_kept
    result: int = library.syscall(ctypes.c_long(number), *wide)
    if result < 0:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))
    return result
