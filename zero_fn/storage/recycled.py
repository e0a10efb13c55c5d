"""Large buffers that come and go, unit by unit and step by step, in memory that goes from one to the next.

[Note: not from the heap] A heap gives a block as large as a gathered unit, or its gradients, back to the system when it is
freed, which clears every page when the next unit asks: 15,000 page faults and an eighth of a step where 25 M parameters are
gathered twice. Or it cuts activations from the hole, takes new memory for the next unit, and so grows with the model.
Mappings of their own, that the next buffer of the same size takes over, do neither.

[Note: free, and there] Memory that waits for its next buffer is the system's to take (`MADV_FREE`), should any process need
it; until then no page of it has to be found and cleared again. On pages of 2 MiB that costs next to nothing.
"""

from __future__ import annotations

import mmap
import weakref

import torch
from torch import Tensor

from zero_fn.storage.memory import available
from zero_fn.storage.slab import advise, too_small, whole_pages

__all__ = ["Recurring", "Recycled", "recycled"]

_RECYCLED_NBYTES = 1 << 20
"""Buffers from this size on are worth it."""


class Recycled:
    """Buffers of one size."""

    def __init__(self, nbytes: int) -> None:
        self._nbytes = nbytes
        self._free: list[mmap.mmap] = []

    def take(self) -> Tensor:
        """A buffer, as bytes of any value. Its memory serves the next buffer when no tensor on it is left.

        Raises:
            TierError: The machine or a limit of the process does not leave so much.
        """
        mapped = self._free.pop() if self._free else self._map()
        lease = memoryview(mapped)
        weakref.finalize(lease, _give_back, self._free, mapped).atexit = False
        return torch.frombuffer(lease, dtype=torch.uint8)

    def _map(self) -> mmap.mmap:
        try:
            mapped = mmap.mmap(-1, self._nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        except OSError as error:
            raise too_small(
                self._nbytes, available().nbytes, str(error), "Parameters and gradients of units"
            ) from error
        advise(mapped, "MADV_HUGEPAGE")
        return mapped


class Recurring:
    """A flat buffer that is taken again and again.

    Attributes:
        numel, dtype, device: Of each.
    """

    __slots__ = ("_mappings", "device", "dtype", "numel")

    def __init__(self, numel: int, dtype: torch.dtype, device: torch.device) -> None:
        self.numel, self.dtype, self.device = numel, dtype, device
        nbytes = numel * dtype.itemsize
        is_large = device.type == "cpu" and nbytes >= _RECYCLED_NBYTES
        self._mappings = recycled(whole_pages(nbytes)) if is_large else None

    def take(self) -> Tensor:
        """A buffer of any values."""
        if self._mappings is None or torch._C._len_torch_dispatch_stack():  # modes make tensors of their own
            return torch.empty(self.numel, dtype=self.dtype, device=self.device)
        return self._mappings.take()[: self.numel * self.dtype.itemsize].view(self.dtype)


_by_size: weakref.WeakValueDictionary[int, Recycled] = weakref.WeakValueDictionary()


def recycled(nbytes: int) -> Recycled:
    """Buffers of `nbytes` bytes, the same for all who ask. What is free is unmapped when nobody has it any more."""
    found = _by_size.get(nbytes)
    if found is None:
        found = _by_size[nbytes] = Recycled(nbytes)
    return found


def _give_back(free: list[mmap.mmap], mapped: mmap.mmap) -> None:
    advise(mapped, "MADV_FREE")
    free.append(mapped)
