"""By how much the resident memory of a process grows, in a process of its own.

In one where other tests have run, the allocator takes memory that they left free, or does not.
"""

from __future__ import annotations

import ctypes
import re
import sys
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import TypeVar

from zero_fn.local.launcher import _ensure_server

__all__ = ["forget_peak", "give_memory_back", "in_new_process", "peak_nbytes"]

T = TypeVar("T")

_MMAP_THRESHOLD = -3  # M_MMAP_THRESHOLD of malloc.h


def in_new_process(function: Callable[..., T], *args: object) -> T:
    """What a function of a module returns in a process in which nothing ran, and which gives memory back that is freed.

    Left alone, glibc raises the size from which it does that to what was freed last, and the heap keeps holes of a unit.
    """
    _ensure_server()
    with ProcessPoolExecutor(1, mp_context=get_context("forkserver"), initializer=give_memory_back) as pool:
        return pool.submit(function, *args).result()


def give_memory_back() -> None:
    """From now on, memory that is freed goes back. Of glibc."""
    if sys.platform == "linux":
        ctypes.CDLL(None).mallopt(_MMAP_THRESHOLD, 64 * 1024)


def forget_peak() -> None:
    """From now on the peak is that of what comes. Linux only."""
    Path("/proc/self/clear_refs").write_text("5")


def peak_nbytes() -> int:
    """The peak of resident memory."""
    match = re.search(r"VmHWM:\s+(\d+)", Path("/proc/self/status").read_text())
    assert match is not None
    return int(match[1]) * 1024
