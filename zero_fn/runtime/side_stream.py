"""Copies between the host and an accelerator, on streams beside the one that computes: one stream for each direction, as
devices have one copy engine for each.

Before a copy, its stream waits for what was issued so far, which may still use the memory that is written. Whoever reads the
result waits for the event of the copy. From and to pinned memory the host does not wait for a copy, and neither the allocator
of the device nor that of the host knows of these streams. So the memory must stay as it is until the event.

[Note: in its own place] A gradient in half precision arrives in the upper half of its place, and is widened from the
beginning, each time the first half of what is left: that is written to memory whose values are widened already.

    place     |  ...  ...  ...  ...  |  a b c d e f g h  |
    first     |  a a  b b  c c  d d  |  . . . . e f g h  |
    second    |  a a  b b  c c  d d  |  e e  f f . . g h |
"""

from __future__ import annotations

from collections import deque
from functools import cache

import torch
from torch import Tensor

__all__ = ["Arriving", "SideStream", "on_host", "side_stream"]

_SMALL_NUMEL = 1 << 15  # so few are widened through a copy of them


class SideStream:
    """The streams of one device."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._there, self._back = torch.Stream(device), torch.Stream(device)
        self._copying: deque[tuple[torch.Event, Tensor]] = deque()

    def copy(self, to: Tensor, source: Tensor, *, after: torch.Event | None = None) -> torch.Event:
        """Begins a copy, after what has been issued so far. The tensor on the device is kept alive until its end; the caller
        keeps the one on the host.

        Args:
            to: What is written.
            source: What is read.
            after: The end of a copy in the other direction that this one has to wait for.

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
        """Lets the device wait for a copy before what is issued from now on; the host does not wait."""
        torch.accelerator.current_stream(self._device).wait_event(event)


@cache
def side_stream(device: torch.device) -> SideStream:
    """The side streams of a device of this process."""
    return SideStream(device)


class Arriving:
    """A gradient on its way from an accelerator into memory of the host, while the device computes the next ones.

    A float32 gradient that was computed in bfloat16, and neither averaged nor added to since, is the same in bfloat16. Then
    only that half of its bytes travels. The device compares the values; its answer travels with the half, and if they differ
    the whole gradient follows. [Note: in its own place]
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
            self._is_same = place.view(torch.uint8)[
                :1
            ]  # unused until the half is widened, and pinned as all of the place
            stream.copy(self._half, narrow)
            self._end = stream.copy(self._is_same, is_same.reshape(1))
        else:
            self._end = stream.copy(place, values)

    def finish(self) -> None:
        """Waits until the gradient is there."""
        self._end.synchronize()
        if self._half is None:
            return
        if not self._is_same.item():
            self._place.copy_(self._values)
            return
        begin, numel = 0, self._place.numel()
        while begin < numel:
            left = numel - begin
            end = begin + left // 2 if left > _SMALL_NUMEL else numel
            source = self._half[begin:end]
            self._place[begin:end].copy_(source if end < numel else source.clone())
            begin = end


def on_host(values: Tensor, computed: torch.dtype) -> Tensor:
    """A dense gradient, or its copy in memory of the host. `computed` is the dtype in which it was computed."""
    if values.device.type == "cpu":
        return values
    copied = torch.empty_strided(values.shape, values.stride(), dtype=values.dtype)
    flat = (values.numel(),), (1,)
    Arriving(copied.as_strided(*flat), values.as_strided(*flat), computed).finish()
    return copied
