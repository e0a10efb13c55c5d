"""Refuses use in a forked process: transfers and buffers belong to the process that made them.

A child shares the ring of io_uring with its parent, and has none of the parent's threads. Buffers are not copied into
children (`MADV_DONTFORK`), so a child that read one would be killed.
"""

from __future__ import annotations

import os

from zero_fn.errors import StorageError

__all__ = ["Owned"]


class Owned:
    """What may be used only by the process that made it."""

    def __init__(self) -> None:
        self._pid = os.getpid()

    def require_own(self) -> None:
        """Called before each read, write or wait.

        Raises:
            StorageError: This process was forked from the one that made this.
        """
        if os.getpid() != self._pid:
            raise StorageError(
                "A forked process used what its parent has on a disk.",
                why="reads, writes and the memory they pass through belong to the process that began them",
                fix="read values before the fork (a state_dict of clones), or start processes with the method 'spawn'",
            )
