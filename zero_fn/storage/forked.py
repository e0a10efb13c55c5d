"""What a forked process must leave alone: transfers and buffers are those of the process that made them.

A child shares the ring of io_uring with its parent, and has none of its threads. Buffers are not copied into children at all
(`MADV_DONTFORK`), so to read one would end it.
"""

from __future__ import annotations

import os

from zero_fn.errors import StorageError

__all__ = ["Owned"]


class Owned:
    """Belongs to the process that makes it."""

    def __init__(self) -> None:
        self._pid = os.getpid()

    def require_own(self) -> None:
        """For whatever begins a read or a write, or waits for one.

        Raises:
            StorageError: This process was forked from the one that made it.
        """
        if os.getpid() != self._pid:
            raise StorageError(
                "A forked process used what its parent has on a disk.",
                why="reads, writes and the memory they pass through belong to the process that began them",
                fix="read values before the fork (a state_dict of clones), or start processes with the method 'spawn'",
            )
