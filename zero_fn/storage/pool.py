"""Large flat buffers that come and go, for gathered units and their gradients: the next buffer of a
size takes over the memory of the last one.

[Note: not from the heap] When a block as large as a gathered unit is freed, the heap either gives
it back to the system, which then clears every page again for the next unit: 15,000 page faults and
an eighth of a step where 25 M parameters are gathered twice. Or it cuts activations from the hole,
takes new memory for the next unit, and so grows with the model. Mappings of their own, taken over
by the next buffer of the same size, do neither.

[Note: why freed buffers stay mapped] The system may take memory that waits for its next buffer
(`MADV_FREE`) if any process needs it. Until then the next buffer finds the pages as they are. With
pages of 2 MiB that costs next to nothing.
"""

from __future__ import annotations

import weakref

import torch
from torch import Tensor

from zero_fn.storage.host_memory import MappedMemory, advise, map_memory, whole_pages

__all__ = ["BufferPool", "Landing"]

_RECYCLED_NBYTES = 1 << 20
"""Smaller buffers are taken from the heap."""


class _Free(list[MappedMemory]):
    """Mappings of one size that wait for their next buffer.

    They are unmapped once no `BufferPool` of that size is left.
    """


_free: weakref.WeakValueDictionary[int, _Free] = weakref.WeakValueDictionary()  # by size in bytes


class BufferPool:
    """Makes flat buffers of one form, one after another."""

    __slots__ = ("_free", "device", "dtype", "numel")

    def __init__(self, numel: int, dtype: torch.dtype, device: torch.device) -> None:
        self.numel = numel
        self.dtype = dtype
        self.device = device
        nbytes = numel * dtype.itemsize
        self._free: _Free | None = None
        if device.type == "cpu" and nbytes >= _RECYCLED_NBYTES:
            self._free = _free.setdefault(whole_pages(nbytes), _Free())

    def take(self) -> Tensor:
        """A buffer with any content.

        Once no tensor on it is left, its memory serves the next one.
        """
        # Under a dispatch mode, which makes tensors of its own.
        if self._free is None or torch._C._len_torch_dispatch_stack():
            return torch.empty(self.numel, dtype=self.dtype, device=self.device)
        nbytes = self.numel * self.dtype.itemsize
        mapped = (
            self._free.pop()
            if self._free
            else map_memory(whole_pages(nbytes), "Parameters and gradients of units")
        )
        return _leased(mapped, self._free)[:nbytes].view(self.dtype)


class Landing:
    """Memory that a disk fills directly, for one byte string after another; each keeps its own
    while a tensor on it is left.

    A mapping serves any byte string that fits, so there are as many mappings as
    byte strings were used at once.
    """

    def __init__(self) -> None:
        self._free: list[MappedMemory] = []

    def take(self, nbytes: int) -> Tensor:
        """Memory of whole pages, uint8, with any content."""
        fitting = [each for each in self._free if len(each) >= nbytes]
        if fitting:
            mapped = min(fitting, key=len)
            self._free.remove(mapped)
        else:
            self._free.clear()  # unmapped: else a larger one would be taken beside them
            mapped = map_memory(whole_pages(nbytes), "Parameters that are read from a disk")
            advise(mapped, "MADV_DONTFORK")  # a child would share pages that the disk still fills
        with torch.inference_mode(False):  # what modules see is no inference tensor
            return _leased(mapped, self._free)[: whole_pages(nbytes)]


def _leased(mapped: MappedMemory, free: list[MappedMemory]) -> Tensor:
    """The bytes of a mapping, which is free again once no tensor on them is left."""
    lease = memoryview(mapped)
    weakref.finalize(lease, _give_back, free, mapped).atexit = False
    return torch.frombuffer(lease, dtype=torch.uint8)


def _give_back(free: list[MappedMemory], mapped: MappedMemory) -> None:
    advise(mapped, "MADV_FREE")
    free.append(mapped)
