"""How many threads work on the host has where a launcher has left each rank one.

torchrun (and accelerate by it) sets `OMP_NUM_THREADS=1` for several local ranks where the user has
set nothing, so that each does not take all cores. Then the cores of a rank stand idle while it
steps a model on the host by one thread. Work whose bits do not depend on the number of threads
takes the rank's share of the cores: the kernel of Adam, norms by rows, and scaling.

[Note: who set it] The environment that a process began with stays readable in /proc. A variable
that this process has, and the one that started it did not begin with, was set by the launcher, and
by no user. A number that a user chose is kept.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path

import torch

__all__ = ["more_threads", "share", "threads_for"]

_LEAST_NUMEL = 1 << 17  # fewer elements are done in less time than it takes to start threads
_LIMIT = Path("/sys/fs/cgroup/cpu.max")


@cache
def share() -> int:
    """The cores of this rank, if it got one thread from a launcher and not from its user; else 1.
    [Note: who set it]

    Its share of the cores that the launcher may use, and at most those that it may use itself:
    a rank may be bound to some.
    """
    environ, launcher = os.environ, os.getppid()
    if environ.get("OMP_NUM_THREADS") != "1" or "TORCHELASTIC_RUN_ID" not in environ:
        return 1
    try:
        began = Path(f"/proc/{launcher}/environ").read_bytes()
        if not began or b"\0OMP_NUM_THREADS=" in b"\0" + began:
            return 1
        cores = len(os.sched_getaffinity(launcher))
    except (OSError, AttributeError):
        return 1  # nobody says
    quota, _, period = _LIMIT.read_text().partition(" ") if _LIMIT.exists() else ("max", "", "")
    cores = min(cores, int(quota) // int(period)) if quota.isdigit() else cores
    return max(
        1, min(cores // int(environ.get("LOCAL_WORLD_SIZE", "1")), len(os.sched_getaffinity(0)))
    )


def threads_for(numel: int) -> int:
    """Threads for work on so many elements, none of which looks at another:
    those of torch, if there are several."""
    known = torch.get_num_threads()
    if numel < _LEAST_NUMEL:
        return 1
    return known if known > 1 else min(share(), numel // _LEAST_NUMEL)


@contextmanager
def more_threads(numel: int) -> Iterator[None]:
    """Gives operations of torch inside the block these threads:
    for those whose bits do not depend on how many there are."""
    known, wanted = torch.get_num_threads(), threads_for(numel)
    if wanted <= known:
        yield
        return
    torch.set_num_threads(wanted)
    try:
        yield
    finally:
        torch.set_num_threads(known)
