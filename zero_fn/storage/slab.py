"""One range of host memory of exact size, of which tensors are views.

The memory is anonymous and aligned to pages, so that direct I/O can use it, and it is registered with the accelerator as a
whole: pools that allocate pinned memory round every tensor up to a power of two, which costs up to half of it.

[Note: huge pages] A direct read into pages of 4 KiB pays for each page. With pages of 2 MiB (`MADV_HUGEPAGE`) direct reads
and writes were 1.5 times as fast. But beside a full page cache the system has to move other pages to make room for a huge
one: the first touch of 400 MB took 1.0 to 1.8 s, and 0.3 to 0.6 s with small pages.
"""

from __future__ import annotations

import ctypes
import importlib.util
import mmap
import warnings
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor

from zero_fn.storage.memory import available, too_small
from zero_fn.values.tiers import Cpu, bytes_text

__all__ = ["PAGE_NBYTES", "MappedMemory", "Slab", "advise", "map_memory", "whole_pages"]

PAGE_NBYTES = mmap.PAGESIZE
_HUGE_NBYTES = 2 << 20


def whole_pages(nbytes: int) -> int:
    """`nbytes` rounded up to whole pages."""
    return -(-nbytes // PAGE_NBYTES) * PAGE_NBYTES


class Slab:
    """Host memory of a fixed size.

    Attributes:
        memory: The memory, as bytes. Views keep it alive.
        nbytes: Its bytes: those that were asked for, in whole pages.
        is_pinned: Whether it is registered with the accelerator.
    """

    def __init__(self, nbytes: int, tier: Cpu, what: str, *, forked: bool = True, huge: bool = True) -> None:
        """Takes the memory, zeroed.

        Args:
            nbytes: Bytes needed.
            tier: The tier, which says the limit and whether to pin.
            what: What it is for, for errors.
            forked: Whether forked processes inherit it. Memory that a disk writes into must not be shared.
            huge: Whether to ask for huge pages, which do not pay for memory that is used once. [Note: huge pages]

        Raises:
            TierError: The limit of the tier, the machine or a cgroup leaves less.
        """
        self.nbytes = max(whole_pages(nbytes), PAGE_NBYTES)
        if tier.limit_nbytes is not None and self.nbytes > tier.limit_nbytes:
            raise too_small(what, self.nbytes, tier.limit_nbytes, "the limit of the tier")
        room = available()
        if self.nbytes > room.nbytes:
            raise too_small(what, self.nbytes, room.nbytes, room.bound)
        mapped = map_memory(self.nbytes, what, huge=huge)
        if not forked:
            advise(mapped, "MADV_DONTFORK")
        self.memory: Tensor = torch.frombuffer(mapped, dtype=torch.uint8)
        self.is_pinned = False
        if tier.pinned and torch.cuda.is_available():
            self.memory.zero_()  # by all threads: the driver takes pages one by one, 2.5 times as long (H200, 16 cores)
            self.is_pinned = _register(mapped, self.nbytes)


def map_memory(nbytes: int, what: str, *, huge: bool = True) -> MappedMemory:
    """Anonymous memory, zeroed. [Note: huge pages]

    Raises:
        TierError: There is less memory.
    """
    try:
        mapped = MappedMemory(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except OSError as error:
        raise too_small(what, nbytes, available().nbytes, str(error)) from error
    if huge and nbytes >= _HUGE_NBYTES:
        advise(mapped, "MADV_HUGEPAGE")
    return mapped


def advise(mapped: mmap.mmap, advice: str) -> None:
    """`madvise` by the name of the advice, where the system knows it."""
    value = getattr(mmap, advice, None)
    if value is not None:
        with suppress(OSError):  # a kernel without it: slower, the same bytes
            mapped.madvise(value)


class MappedMemory(mmap.mmap):
    """Memory that is unregistered with the driver before it is unmapped."""

    unregister: Callable[[], object] | None = None

    def __del__(self) -> None:  # runs before the memory is unmapped; a finalizer of `weakref` would run after
        if self.unregister is not None:
            self.unregister()


def _register(mapped: MappedMemory, nbytes: int) -> bool:
    """Pins the memory for the accelerator, through cupy, or where that is not installed through torch."""
    address = ctypes.addressof(ctypes.c_char.from_buffer(mapped))
    try:
        if importlib.util.find_spec("cupy") is not None:
            import cupy  # type: ignore[import-not-found,unused-ignore]

            runtime: Any = cupy.cuda.runtime
            runtime.hostRegister(address, nbytes, 0)
            mapped.unregister = lambda: runtime.hostUnregister(address)
        else:
            runtime = torch.cuda.cudart()  # type: ignore[no-untyped-call]
            code = int(runtime.cudaHostRegister(address, nbytes, 0))
            if code:
                raise RuntimeError(f"cudaHostRegister returned {code}")
            mapped.unregister = lambda: runtime.cudaHostUnregister(address)
    except Exception as error:  # the driver refuses: its own classes of errors
        warnings.warn(
            f"zero_fn could not pin {bytes_text(nbytes)} of host memory ({error}); copies to the device will be slower.",
            RuntimeWarning,
            stacklevel=3,
        )
        with suppress(Exception):  # the driver's error is pending: the next kernel of this thread would raise it
            torch.zeros(1, device="cuda")
        return False
    return True
