"""Memory of several NUMA nodes at once.

Memory lies on the node of the thread that touches it first, so a slab that one thread fills lies on one node, and the
optimizer step, which all threads share, has the bandwidth of that node only. A process that may run on several nodes has
its slabs spread over them page by page. One that is bound to a node (`torchrun --numa-binding=node`, numactl) has them
there, and where a policy was chosen (`numactl --interleave`, `--membind`) it stands.
"""

from __future__ import annotations

import ctypes
import os
import platform
from contextlib import suppress
from pathlib import Path

__all__ = ["nodes_of_process", "spread"]

_MBIND, _GET_MEMPOLICY = {"x86_64": (237, 239), "aarch64": (235, 236)}.get(platform.machine(), (None, None))
_DEFAULT, _INTERLEAVE = 0, 3  # of linux/mempolicy.h
_MOST_NODES = 1024
_WORD_NBITS = 8 * ctypes.sizeof(ctypes.c_ulong)

_libc = ctypes.CDLL(None, use_errno=True)


def nodes_of_process(folder: Path = Path("/sys/devices/system/node")) -> list[int]:
    """The nodes with memory on whose processors this process may run; none where the system does not say."""
    try:
        allowed = os.sched_getaffinity(0)
        with_memory = _numbers((folder / "has_memory").read_text())
        return [
            node for node in sorted(with_memory) if allowed & _numbers((folder / f"node{node}/cpulist").read_text())
        ]
    except (OSError, AttributeError):  # AttributeError: no Linux
        return []


def spread(address: int, nbytes: int) -> None:
    """Spreads memory that nobody has touched over the nodes of the process; nothing where there is one, or somebody chose.

    A kernel that refuses (seccomp in a container) leaves it to the first touch: slower, the same bytes.
    """
    nodes = [node for node in nodes_of_process() if node < _MOST_NODES]
    if len(nodes) < 2 or _MBIND is None:
        return
    chosen = ctypes.c_int()
    words = [0] * (_MOST_NODES // _WORD_NBITS)
    for node in nodes:
        words[node // _WORD_NBITS] |= 1 << node % _WORD_NBITS
    mask = (ctypes.c_ulong * len(words))(*words)
    with suppress(OSError):
        _syscall(_GET_MEMPOLICY, ctypes.byref(chosen), None, 0, None, 0)
        if chosen.value == _DEFAULT:
            # The kernel takes a number of nodes that is one too large.
            _syscall(_MBIND, ctypes.c_void_p(address), nbytes, _INTERLEAVE, mask, _MOST_NODES + 1, 0)


def _numbers(text: str) -> set[int]:
    """The numbers in a list of the kernel: "0-3,8"."""
    found: set[int] = set()
    for part in filter(None, text.strip().split(",")):
        first, _, last = part.partition("-")
        found.update(range(int(first), int(last or first) + 1))
    return found


def _syscall(number: int | None, *args: object) -> None:
    wide = [ctypes.c_long(arg) if isinstance(arg, int) else arg for arg in (number, *args)]
    if _libc.syscall(*wide) < 0:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))
