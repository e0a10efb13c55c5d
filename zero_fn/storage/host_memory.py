"""Host memory: how much of it the process may still take,
and ranges of exact size, of which tensors are views.

The memory is anonymous and aligned to pages, so that direct I/O can use it, and it is registered
with the accelerator as a whole: pools that allocate pinned memory round every tensor up to a power
of two, which costs up to half of it.

[Note: huge pages] A direct read into pages of 4 KiB pays for each page. With pages of 2 MiB
(`MADV_HUGEPAGE`) direct reads and writes were 1.5 times as fast. But beside a full page cache the
system has to move other pages to make room for a huge one: the first touch of 400 MB took 1.0 to
1.8 s, and 0.3 to 0.6 s with small pages.
"""

from __future__ import annotations

import ctypes
import importlib.util
import mmap
import os
import resource
import warnings
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from zero_fn.errors import TierError
from zero_fn.values.tiers import Cpu, bytes_text

__all__ = [
    "PAGE_NBYTES",
    "Available",
    "MappedMemory",
    "Slab",
    "advise",
    "available",
    "bounds",
    "map_memory",
    "too_small",
    "whole_pages",
]

PAGE_NBYTES = mmap.PAGESIZE
_HUGE_NBYTES = 2 << 20
_CGROUPS = Path("/sys/fs/cgroup")


class Available(NamedTuple):
    """Bytes that the process may still take under one bound, and what sets the bound, in words."""

    nbytes: int
    bound: str


def available() -> Available:
    """The smallest of the bounds."""
    return min(bounds())


def bounds() -> list[Available]:
    """What the machine has free, what cgroups leave, and what limits of the process allow."""
    return [_machine(), *_cgroups(), *_limits()]


def _machine() -> Available:
    rows = (line.split() for line in _lines(Path("/proc/meminfo")))
    kilobytes = next((int(row[1]) for row in rows if row[0] == "MemAvailable:"), None)
    if kilobytes is None:  # no Linux
        return Available(
            os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"), "memory of the machine"
        )
    return Available(kilobytes * 1024, "memory of the machine")


def _cgroups(
    process: Path = Path("/proc/self/cgroup"), root: Path = _CGROUPS
) -> Iterator[Available]:
    """What each cgroup of the process leaves, up to the root, in both versions of cgroups."""
    for line in _lines(process):
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            folder, limit, used, cache = root, "memory.max", "memory.current", "inactive_file"
        elif "memory" in controllers.split(","):
            folder, limit, used = root / "memory", "memory.limit_in_bytes", "memory.usage_in_bytes"
            cache = "total_inactive_file"
        else:
            continue
        # In a container the path may be the one on the host: then only the root can be read.
        for depth in range(len(Path(path).parts)):
            at = folder.joinpath(*Path(path).parts[1 : 1 + depth])
            left = _left(at, limit, used, cache)
            if left is not None:
                yield Available(left, f"cgroup {at}")


def _left(folder: Path, limit: str, used: str, cache: str) -> int | None:
    try:
        most = (folder / limit).read_text().strip()
        if most == "max":
            return None
        rows = (line.split() for line in (folder / "memory.stat").read_text().splitlines())
        reclaimable = next((int(value) for name, value in rows if name == cache), 0)
        return max(int(most) - int((folder / used).read_text()) + reclaimable, 0)
    except (OSError, ValueError):
        return None


def _limits() -> Iterator[Available]:
    """What the limits of the process on its memory leave (`ulimit -v`, `ulimit -d`)."""
    rows = dict(line.split(":", 1) for line in _lines(Path("/proc/self/status")))
    for limit, row, bound in (
        (resource.RLIMIT_AS, "VmSize", "address space of the process (ulimit -v)"),
        (resource.RLIMIT_DATA, "VmData", "data of the process (ulimit -d)"),
    ):
        most = resource.getrlimit(limit)[0]
        if most != resource.RLIM_INFINITY and row in rows:
            yield Available(max(most - int(rows[row].split()[0]) * 1024, 0), bound)


def _lines(path: Path) -> list[str]:
    """Lines of a file of the system; none where there is no such file."""
    try:
        return path.read_text().splitlines()
    except OSError:
        return []


def too_small(
    what: str, nbytes: int, room_nbytes: int, bound: str, *, of: str = "host memory"
) -> TierError:
    """The error where `what` needs more host memory, or more room `of="disk"`,
    than `bound` leaves."""
    fix = "raise that bound, use more ranks, or keep the states on disk: zf.nvme('/local_nvme')"
    if of == "disk":
        fix = (
            "raise that bound or free that much, choose another disk: "
            "zf.nvme('/other_disk'), or use more ranks"
        )
    return TierError(
        f"{what} need {bytes_text(nbytes)} of {of}, {bytes_text(room_nbytes)} can be taken.",
        needs=f"{nbytes} B",
        can_be_taken=f"{room_nbytes} B",
        bound=bound,
        why="nothing was taken or moved",
        fix=fix,
    )


def whole_pages(nbytes: int) -> int:
    """`nbytes` rounded up to whole pages."""
    return -(-nbytes // PAGE_NBYTES) * PAGE_NBYTES


class Slab:
    """Host memory of a fixed size."""

    def __init__(
        self, nbytes: int, tier: Cpu, what: str, *, forked: bool = True, huge: bool = True
    ) -> None:
        """Takes the memory, zeroed."""
        self.nbytes = max(whole_pages(nbytes), PAGE_NBYTES)
        if tier.limit_nbytes is not None and self.nbytes > tier.limit_nbytes:
            raise too_small(what, self.nbytes, tier.limit_nbytes, "the limit of the tier")
        room = available()
        if self.nbytes > room.nbytes:
            raise too_small(what, self.nbytes, room.nbytes, room.bound)
        mapped = map_memory(self.nbytes, what, huge=huge)
        if not forked:
            advise(mapped, "MADV_DONTFORK")
        self.memory: Tensor = torch.frombuffer(mapped, dtype=torch.uint8)  # views keep it alive
        self.is_pinned = False
        if tier.pinned and torch.cuda.is_available():
            # By all threads: the driver takes pages one by one, 2.5 times as long (H200, 16 cores).
            self.memory.zero_()
            self.is_pinned = _register(mapped, self.nbytes)


def map_memory(nbytes: int, what: str, *, huge: bool = True) -> MappedMemory:
    """Anonymous memory, zeroed. [Note: huge pages]"""
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

    # This runs before the memory is unmapped; a finalizer of `weakref` would run after.
    def __del__(self) -> None:
        if self.unregister is not None:
            self.unregister()


def _register(mapped: MappedMemory, nbytes: int) -> bool:
    """Pins the memory for the accelerator, through cupy,
    or where that is not installed through torch."""
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
            f"zero_fn could not pin {bytes_text(nbytes)} of host memory ({error}); "
            "copies to the device will be slower.",
            RuntimeWarning,
            stacklevel=3,
        )
        # The driver's error is pending: the next kernel of this thread would raise it.
        with suppress(Exception):
            torch.zeros(1, device="cuda")
        return False
    return True
