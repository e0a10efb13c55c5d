"""Copies between the host and an accelerator, on streams beside the one that computes: one for each way, as devices have one
engine for each.

A stream waits for what was issued before a copy, because that may still use the memory that is written; whoever reads what
was copied waits for its event. Host memory that is pinned is copied while the host goes on, so it must stay as it is until
then: neither the allocator of the device nor that of the host knows of our streams.

[Note: in its own place] The half comes into the upper half of the place of the whole, and is spread from the beginning on: a
block is written up to where the next one is still to be read, and not beyond.

    place     |  ...  ...  ...  ...  |  a b c d e f g h  |
    block 1   |  a a  b b  c c  ...  |  . . . d e f g h  |
"""

from __future__ import annotations

from collections import deque
from functools import cache

import torch
from torch import Tensor

__all__ = ["Arriving", "SideStream", "side_stream"]

_BLOCK_NUMEL = 1 << 16


class SideStream:
    """The streams of one device."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._there, self._back = torch.Stream(device), torch.Stream(device)
        self._copying: deque[tuple[torch.Event, Tensor]] = deque()

    def copy(self, to: Tensor, source: Tensor, *, after: torch.Event | None = None) -> torch.Event:
        """Copies after what has been issued so far. The tensor on the device lives until then; the caller keeps the other.

        Args:
            to: What is written.
            source: What is read.
            after: The end of a copy the other way that this one has to wait for.

        Returns:
            The end of the copy: `wait_for` it before `to` is read or `source` written.
        """
        is_there = source.device.type == "cpu"
        stream = self._there if is_there else self._back
        stream.wait_stream(torch.accelerator.current_stream(self._device))
        if after is not None:
            stream.wait_event(after)
        with stream:
            to.copy_(source, non_blocking=True)
        event = stream.record_event()
        while self._copying and self._copying[0][0].query():
            self._copying.popleft()
        self._copying.append((event, to if is_there else source))
        return event

    def wait_for(self, event: torch.Event) -> None:
        """Lets what is issued from now on wait for a copy; the host goes on."""
        torch.accelerator.current_stream(self._device).wait_event(event)


@cache
def side_stream(device: torch.device) -> SideStream:
    """The side streams of a device of this process."""
    return SideStream(device)


class Arriving:
    """A gradient on its way from an accelerator into memory of the host, while the device computes the next ones.

    One that was computed in bfloat16, and neither averaged nor added to in float32, is half the bytes, and no digit is lost.
    Whether it is, the device finds out; its answer travels with the half, and if it is no, the whole follows.
    [Note: in its own place]
    """

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
