"""Sleeping until a word of shared memory changes: futex(2) of Linux, called through libc.

One process writes the word, others wait for it. The kernel looks at the word before it puts a
process to sleep, so no change is missed, and both calls are full memory barriers.
"""

from __future__ import annotations

import ctypes
import platform
import sys

__all__ = ["fence", "has_futexes", "wait", "wake"]

_WAIT, _WAKE = 0, 1  # shared between processes: no FUTEX_PRIVATE_FLAG
_EVERYONE = 2**31 - 1
_WORD = 0xFFFFFFFF
_SYSCALLS = {"x86_64": 202, "aarch64": 98}

_machine = platform.machine()
_number = _SYSCALLS.get(_machine)
# Stores are seen in their order, and loads are not moved past them.
_keeps_order = _machine == "x86_64"


class _Timespec(ctypes.Structure):
    _fields_ = (("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long))


if sys.platform == "linux":
    _sleeping = ctypes.CDLL(None).syscall  # without the interpreter lock
    _brief = ctypes.PyDLL(None).syscall


def has_futexes() -> bool:
    """Whether this system and machine have futexes, as this file calls them."""
    return sys.platform == "linux" and _number is not None and sys.byteorder == "little"


def wait(address: int, seen: int, seconds: float) -> None:
    """Sleeps until `wake` is called for the word at `address`, or for `seconds`.

    Does not sleep if the low 32 bits of the word differ from those of `seen`. May return early, so
    the caller looks at the word again.
    """
    limit = _Timespec(int(seconds), int(seconds % 1 * 1e9))
    word = ctypes.c_uint32(seen & _WORD)
    _sleeping(_number, ctypes.c_void_p(address), _WAIT, word, ctypes.byref(limit), None, 0)


def wake(address: ctypes.c_void_p) -> None:
    """Wakes all processes that wait for the word at `address`."""
    _brief(_number, address, _WAKE, _EVERYONE, None, None, 0)


def fence(address: ctypes.c_void_p) -> None:
    """A memory barrier: all processes see reads and writes before it
    as done before those after it."""
    if not _keeps_order:
        _brief(_number, address, _WAKE, 0, None, None, 0)
