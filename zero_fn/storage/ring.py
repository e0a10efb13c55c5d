"""Host buffers that bytes pass through on the way to or from a disk: equal ranges of one slab, used in turn."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from zero_fn.storage.forked import Owned
from zero_fn.storage.slab import Slab, whole_pages
from zero_fn.values.tiers import Cpu, bytes_text

__all__ = ["BUFFERS", "NOTHING", "Ring", "ring_form", "ring_of"]

BUFFERS = 4
NOTHING = torch.empty(0, dtype=torch.uint8)


def ring_form(count: int, largest_nbytes: int) -> tuple[int, int]:
    """The number and the bytes of the buffers for so many byte strings, the largest of so many bytes."""
    return min(count, BUFFERS), whole_pages(largest_nbytes)


def ring_of(sizes: Sequence[int], what: str) -> Ring:
    """One buffer for each byte string of these sizes, but at most four; each as large as the largest.

    Raises:
        TierError: There is less memory.
    """
    return Ring(*ring_form(len(sizes), max(sizes, default=0)), f"buffers of {what}")


class Ring(Owned):
    """Some buffers of one size.

    Attributes:
        count: Number of buffers.
        size: Bytes of each, in whole pages.
        nbytes: Bytes of host memory.
    """

    def __init__(self, count: int = 0, nbytes: int = 0, what: str = "") -> None:
        """Takes memory for `count` buffers of `nbytes`. `what` says in errors what they are for.

        Raises:
            TierError: There is less memory.
        """
        super().__init__()
        self.count, self.size, self.nbytes = count, whole_pages(nbytes), 0
        self._views: tuple[Tensor, ...] = ()
        if self.count and self.size:
            slab = Slab(self.size * self.count, Cpu(True, None), what, forked=False)
            self.nbytes = slab.nbytes
            self._views = torch.split(slab.memory, self.size)

    @property
    def views(self) -> tuple[Tensor, ...]:
        """The buffers, uint8.

        Raises:
            StorageError: This is a forked process, which does not have them.
        """
        self.require_own()
        return self._views

    def buffer(self, turn: int, nbytes: int) -> Tensor:
        """The buffer of a turn, cut to so many bytes, in whole pages."""
        return self.views[turn % self.count][: whole_pages(nbytes)]

    def __str__(self) -> str:
        return f"{self.count} buffer{'s' * (self.count > 1)} of {bytes_text(self.size)}"
