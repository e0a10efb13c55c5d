"""Bytes of memory by tier: in use, at most, free."""

from __future__ import annotations

import os
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

import torch

from zero_fn.inspect.memory import MemoryUse
from zero_fn.profiling.clock import resident_nbytes
from zero_fn.storage.host_memory import available
from zero_fn.values.tiers import is_accelerator

__all__ = ["memory_numbers"]

_CONTAINER = Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory/memory.limit_in_bytes")


def memory_numbers(device_type: str, held: MemoryUse, paths: Iterable[str]) -> dict[str, float]:
    """`memory_bytes`, `memory_limit_bytes` and `memory_free_bytes` of the host, of an accelerator
    and of disks with these `paths`.

    Free is what this process may still take.
    """
    found: dict[str, float] = {}

    def note(tier: str, used: float, limit: float, free: float) -> None:
        for name, nbytes in (("memory", used), ("memory_limit", limit), ("memory_free", free)):
            found[f'zero_fn_{name}_bytes{{tier="{tier}"}}'] = float(nbytes)

    note("host", resident_nbytes(), _limit_of_host(), available().nbytes)
    if is_accelerator(device_type):
        with suppress(RuntimeError):  # a device may not tell
            free, limit = torch.accelerator.get_memory_info()
            note("device", torch.accelerator.memory_allocated(), limit, free)
    disks = {os.stat(path).st_dev: os.statvfs(path) for path in paths}
    if disks:
        used = sum(nbytes for tier, nbytes in held.tiers.items() if tier.startswith("nvme("))
        limit = sum(disk.f_blocks * disk.f_frsize for disk in disks.values())
        note("disk", used, limit, sum(disk.f_bavail * disk.f_frsize for disk in disks.values()))
    return found


def _limit_of_host() -> int:
    """Bytes of memory of the host, or of its container if these are less."""
    found = [os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")]
    for path in _CONTAINER:
        with suppress(OSError, ValueError):  # no such file, or "max"
            found.append(int(path.read_text()))
    return min(found)
