"""By how much the resident memory of a process grows, in a process of its own.

In one where other tests have run, the allocator takes memory that they left free, or does not.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import TypeVar

__all__ = ["forget_peak", "in_new_process", "peak_nbytes"]

T = TypeVar("T")


def in_new_process(function: Callable[..., T], *args: object) -> T:
    """What a function of a module returns in a fresh interpreter."""
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
        return pool.submit(function, *args).result()


def forget_peak() -> None:
    """From now on the peak is that of what comes. Linux only."""
    Path("/proc/self/clear_refs").write_text("5")


def peak_nbytes() -> int:
    """The peak of resident memory."""
    match = re.search(r"VmHWM:\s+(\d+)", Path("/proc/self/status").read_text())
    assert match is not None
    return int(match[1]) * 1024
