"""Bytes of memory by tier: in use, at most, free."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path

import torch

from zero_fn.looking.held import Held
from zero_fn.profiling.clock import resident_nbytes

__all__ = ["memory_numbers"]

_CGROUP = Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory/memory.limit_in_bytes")


def memory_numbers(device_type: str, held: Held, paths: Iterable[str]) -> dict[str, float]:
    """`memory_bytes`, `memory_limit_bytes` and `memory_free_bytes` of the host, of a CUDA device and of disks with these
    `paths`. What the system does not tell is left out."""
    found: dict[str, float] = {}

    def note(tier: str, used: float, limit: float, free: float) -> None:
        for name, nbytes in (("memory", used), ("memory_limit", limit), ("memory_free", free)):
            found[f'zero_fn_{name}_bytes{{tier="{tier}"}}'] = float(nbytes)

    limit, free = _host()
    if limit:
        note("host", resident_nbytes(), limit, free)
    if device_type == "cuda":
        free, limit = torch.cuda.mem_get_info()
        note("device", torch.cuda.memory_allocated(), limit, free)
    disks = {os.stat(path).st_dev: os.statvfs(path) for path in paths}
    if disks:
        used = sum(nbytes for tier, nbytes in held.tiers.items() if tier.startswith("nvme("))
        limit = sum(disk.f_blocks * disk.f_frsize for disk in disks.values())
        note("disk", used, limit, sum(disk.f_bavail * disk.f_frsize for disk in disks.values()))
    return found


def _host() -> tuple[int, int]:
    """Bytes of memory of the host, or the limit of its control group if that is less; and those that are free."""
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
    except OSError:
        return 0, 0
    rows = {name: int(value.split()[0]) * 1024 for name, value in (line.split(":") for line in lines)}
    limit, free = rows["MemTotal"], rows["MemAvailable"]
    for path in _CGROUP:
        try:
            most, used = path.read_text().strip(), int(path.with_name(_USED[path.name]).read_text())
        except OSError:
            continue
        if most != "max" and int(most) < limit:
            limit, free = int(most), min(free, int(most) - used)
    return limit, free


_USED = {"memory.max": "memory.current", "memory.limit_in_bytes": "memory.usage_in_bytes"}
