"""A bit that any rank raises, and all ranks see raised at the same call."""

from __future__ import annotations

from datetime import timedelta

import torch
import torch.distributed as dist

from zero_fn.errors import LostRankError
from zero_fn.transport.waiting import deadline

__all__ = ["Flag"]


class Flag:
    """Made by all ranks, with a process group of its own, in which nothing else waits."""

    def __init__(self) -> None:
        world = dist.group.WORLD if dist.is_available() and dist.is_initialized() else None
        self._group: dist.ProcessGroup | None = None
        if world is not None and world.size() > 1:
            backend = "gloo" if dist.is_gloo_available() else None
            self._group = dist.new_group(backend=backend, timeout=timedelta(seconds=deadline()))
        self._bit, self._work = torch.zeros(1, dtype=torch.uint8), None

    def is_raised(self, here: bool) -> bool:
        """Whether any rank had `here` at its call before this one. A collective of 1 byte, for which the next call waits.

        Raises:
            LostRankError: A rank has ended, or did not call before the deadline of collectives.
        """
        try:
            if self._work is not None:
                self._work.wait()
            raised = bool(self._bit.item())
            self._bit = torch.tensor([here or raised], dtype=torch.uint8)
            if self._group is not None:
                self._work = dist.all_reduce(self._bit, dist.ReduceOp.MAX, self._group, async_op=True)
        except RuntimeError as error:
            raise LostRankError(
                "Ranks that ask one another whether to leave have lost one.",
                why=str(error).splitlines()[0],
                fix="call is_due() on every rank, in every step; see what the others say",
            ) from error
        return raised
