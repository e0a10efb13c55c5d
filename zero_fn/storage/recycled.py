"""Large buffers for gathered units and chunks: memory that one buffer gives up is used by the next of its size.

[Note: not from the heap] A heap gives a block as large as a gathered unit, or its gradients, back to the system when it is
freed, which clears every page when the next unit asks: 15,000 page faults and an eighth of a step where 25 M parameters are
gathered twice. Or it cuts activations from the hole, takes new memory for the next unit, and so grows with the model.
Mappings of their own, that the next buffer of the same size takes over, do neither.

[Note: free, and there] Memory that waits for its next buffer is the system's to take (`MADV_FREE`), should any process need
it; until then no page of it has to be found and cleared again. On pages of 2 MiB that costs next to nothing.
"""

from __future__ import annotations

import weakref

import torch
from torch import Tensor

from zero_fn.storage.slab import MappedMemory, advise, map_memory, whole_pages

__all__ = ["Recurring"]

_RECYCLED_NBYTES = 1 << 20
"""Buffers from this size on are worth it."""


class _Free(list[MappedMemory]):
    """Mappings of one size that wait for their next buffer. They are unmapped when nobody has this any more."""


_free: weakref.WeakValueDictionary[int, _Free] = weakref.WeakValueDictionary()  # by size, for all who ask


class Recurring:
    """A flat buffer that is taken again and again.

    Attributes:
        numel, dtype, device: Of each.
    """

    __slots__ = ("_free", "device", "dtype", "numel")

    def __init__(self, numel: int, dtype: torch.dtype, device: torch.device) -> None:
        self.numel, self.dtype, self.device = numel, dtype, device
        nbytes = numel * dtype.itemsize
        self._free: _Free | None = None
        if device.type == "cpu" and nbytes >= _RECYCLED_NBYTES:
            self._free = _free.setdefault(whole_pages(nbytes), _Free())

    def take(self) -> Tensor:
        """A buffer of any values. Its memory serves the next one when no tensor on it is left.

        Raises:
            TierError: The machine or a limit of the process does not leave so much.
        """
        if self._free is None or torch._C._len_torch_dispatch_stack():  # modes make tensors of their own
            return torch.empty(self.numel, dtype=self.dtype, device=self.device)
        nbytes = self.numel * self.dtype.itemsize
        mapped = (
            self._free.pop() if self._free else map_memory(whole_pages(nbytes), "Parameters and gradients of units")
        )
        lease = memoryview(mapped)
        weakref.finalize(lease, _give_back, self._free, mapped).atexit = False
        return torch.frombuffer(lease, dtype=torch.uint8)[:nbytes].view(self.dtype)


def _give_back(free: _Free, mapped: MappedMemory) -> None:
    advise(mapped, "MADV_FREE")
    free.append(mapped)
