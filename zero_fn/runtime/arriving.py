"""Gradients on their way from an accelerator into memory of the host, while the device computes the next ones.

A gradient that was computed in bfloat16, and neither averaged nor added to in float32, is half the bytes, and no digit is
lost. Whether it is, the device finds out; its answer travels with the half, and if it is no, the whole follows.

[Note: in its own place] The half comes into the upper half of the place of the whole, and is spread from the beginning on: a
block is written up to where the next one is still to be read, and not beyond.

    place     |  ...  ...  ...  ...  |  a b c d e f g h  |
    block 1   |  a a  b b  c c  ...  |  . . . d e f g h  |
"""

from __future__ import annotations

import torch
from torch import Tensor

from zero_fn.runtime.side_stream import side_stream

__all__ = ["Arriving"]

_BLOCK_NUMEL = 1 << 16


class Arriving:
    """One gradient, begun when it is made."""

    def __init__(self, place: Tensor, values: Tensor, computed: torch.dtype) -> None:
        """Begins to copy.

        Args:
            place: Memory of the host, flat, not to be touched until `finish`.
            values: On the device, flat, of the same numel and dtype.
            computed: The dtype it was computed in.
        """
        self._place, self._values = place, values
        stream = side_stream(values.device)
        self._half: Tensor | None = None
        if 2 * computed.itemsize == place.dtype.itemsize and place.numel() > 1:
            narrow = values.to(computed)
            is_same = (narrow.to(values.dtype) == values).all().view(torch.uint8)
            self._half = place.view(computed)[place.numel() :]
            self._is_same = place.view(torch.uint8)[:1]  # nothing else is there yet, and it is pinned as the place is
            stream.copy(self._half, narrow)
            self._end = stream.copy(self._is_same, is_same.reshape(1))
        else:
            self._end = stream.copy(place, values)

    def finish(self) -> None:
        """Waits until it is there."""
        self._end.synchronize()
        if self._half is None:
            return
        if not self._is_same.item():
            self._place.copy_(self._values)
            return
        for begin in range(0, self._place.numel(), _BLOCK_NUMEL):
            block = slice(begin, begin + _BLOCK_NUMEL)
            self._place[block].copy_(self._half[block].clone())
