"""How much memory this process may still take, and what sets the bound."""

from __future__ import annotations

import os
import resource
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from zero_fn.errors import TierError
from zero_fn.values.tiers import bytes_text

__all__ = ["Available", "available", "too_small"]

_CGROUPS = Path("/sys/fs/cgroup")


@dataclass(frozen=True, slots=True)
class Available:
    """Memory that the process may still take under one bound.

    Attributes:
        nbytes: Its bytes.
        bound: What sets the bound, in words.
    """

    nbytes: int
    bound: str


def available() -> Available:
    """The smallest of what the machine has free, what cgroups leave, and what limits of the process allow."""
    bounds = [_machine(), *_cgroups(), *_limits()]
    return min(bounds, key=lambda bound: bound.nbytes)


def _machine() -> Available:
    try:
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return Available(int(line.split()[1]) * 1024, "memory of the machine")
    except OSError:  # no Linux
        pass
    return Available(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"), "memory of the machine")


def _cgroups(process: Path = Path("/proc/self/cgroup"), root: Path = _CGROUPS) -> list[Available]:
    """What each cgroup of the process leaves, up to the root, in both versions of cgroups."""
    try:
        lines = process.read_text().splitlines()
    except OSError:
        return []
    found: list[Available] = []
    for line in lines:
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
                found.append(Available(left, f"cgroup {at}"))
    return found


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


def _limits() -> list[Available]:
    """What the limits of the process on its memory leave (`ulimit -v`, `ulimit -d`)."""
    try:
        rows = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    except OSError:
        return []
    found: list[Available] = []
    for limit, row, bound in (
        (resource.RLIMIT_AS, "VmSize", "address space of the process (ulimit -v)"),
        (resource.RLIMIT_DATA, "VmData", "data of the process (ulimit -d)"),
    ):
        most = resource.getrlimit(limit)[0]
        if most != resource.RLIM_INFINITY:
            found.append(Available(max(most - int(rows[row].split()[0]) * 1024, 0), bound))
    return found


_FIXES = {
    "host memory": "raise that bound, use more ranks, or keep the states on disk: zf.nvme('/local_nvme')",
    "disk": "raise that bound or free that much, choose another disk: zf.nvme('/other_disk'), or use more ranks",
}


def too_small(
    what: str, nbytes: int, room_nbytes: int, bound: str, *, of: Literal["host memory", "disk"] = "host memory"
) -> TierError:
    """The error where `what` needs more memory, or more room on a disk, than `bound` leaves."""
    return TierError(
        f"{what} need {bytes_text(nbytes)} of {of}, {bytes_text(room_nbytes)} can be taken.",
        needs=f"{nbytes} B",
        can_be_taken=f"{room_nbytes} B",
        bound=bound,
        why="nothing was taken or moved",
        fix=_FIXES[of],
    )
