"""Host memory that bytes of a disk pass through: equal ranges of one slab, which the carrier of requests knows."""

from __future__ import annotations

import torch
from torch import Tensor

from zero_fn.storage.carrier import chosen_carrier
from zero_fn.storage.forked import Owned
from zero_fn.storage.slab import Slab, whole_pages
from zero_fn.tiers import Cpu, bytes_text

__all__ = ["Buffers"]


class Buffers(Owned):
    """Some buffers of one size. They go with the object, so nothing may be under way in them then.

    Attributes:
        count: How many.
        size: Bytes of each, in whole pages.
    """

    def __init__(self, count: int = 0, nbytes: int = 0, what: str = "") -> None:
        """Takes the memory.

        Args:
            count: How many.
            nbytes: Bytes of each; none takes no memory.
            what: What they are for, for errors.

        Raises:
            TierError: There is not so much memory.
        """
        super().__init__()
        self.count, self.size = count, whole_pages(nbytes)
        self._views: tuple[Tensor, ...] = ()
        self._carrier = chosen_carrier()
        self._slab: Slab | None = None
        if self.count and self.size:
            self._slab = Slab(self.size * self.count, Cpu(True, None), what, forked=False)
            self._views = torch.split(self._slab.memory, self.size)
            self._carrier.register(self._slab.memory)

    @property
    def views(self) -> tuple[Tensor, ...]:
        """The buffers, uint8.

        Raises:
            StorageError: In a forked process, where they are not.
        """
        self.require_own()
        return self._views

    def __del__(self) -> None:
        slab = getattr(self, "_slab", None)
        if slab is not None:
            self._carrier.forget(slab.memory)

    @property
    def nbytes(self) -> int:
        """Bytes of host memory."""
        return self._slab.nbytes if self._slab is not None else 0

    def __str__(self) -> str:
        return f"{self.count} buffer{'s' * (self.count > 1)} of {bytes_text(self.size)}"

    def number_of(self, memory: Tensor) -> int | None:
        """The number of the buffer that begins where this memory does; None if it lies elsewhere."""
        if self._slab is None or not self._slab.address <= memory.data_ptr() < self._slab.address + self._slab.nbytes:
            return None
        return (memory.data_ptr() - self._slab.address) // self.size
