"""The process groups of `torch.distributed`, one set per rank in place of one per process.

`torch.distributed` keeps its groups in one object; while simulated ranks run, that object looks them up by thread. The
groups of the main thread come back untouched when the case is over.
"""

from __future__ import annotations

import sys
import threading
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from torch._C._distributed_c10d import _set_thread_isolation_mode as _look_up_by_thread  # for functional collectives
from torch.distributed import distributed_c10d

__all__ = ["own_world", "worlds_by_thread"]


@dataclass
class _World:
    """What `torch.distributed` knows in one rank."""

    default_pg: Any = None
    pg_map: dict[Any, Any] = field(default_factory=dict)
    pg_names: dict[Any, str] = field(default_factory=dict)
    pg_group_ranks: dict[Any, dict[int, int]] = field(default_factory=dict)
    pg_backend_config: dict[Any, str] = field(default_factory=dict)
    group_count: int = 0
    tags_to_pg: dict[str, list[Any]] = field(default_factory=dict)
    pg_to_tag: dict[Any, str] = field(default_factory=dict)
    pg_coalesce_state: dict[Any, list[Any]] = field(default_factory=dict)
    comms: list[Any] = field(default_factory=list)
    pg_config_info: list[Any] = field(default_factory=list)


_own = threading.local()


def own_world():
    """Gives this thread groups of its own."""
    _own.world = _World()


class _Worlds:
    """Stands for `torch.distributed.distributed_c10d._world`."""

    def __getattr__(self, name):
        return getattr(_own.world, name)

    def __setattr__(self, name, value):
        setattr(_own.world, name, value)


_worlds = _Worlds()


@contextmanager
def worlds_by_thread():
    """In this block every thread that called `own_world` sees its own groups; the calling thread must wait for them."""
    before, hook = distributed_c10d._world, sys.excepthook
    distributed_c10d._world = _worlds
    _look_up_by_thread(True)
    try:
        yield
    finally:
        _look_up_by_thread(False)
        distributed_c10d._world, sys.excepthook = before, hook  # a new group makes a hook of its own
