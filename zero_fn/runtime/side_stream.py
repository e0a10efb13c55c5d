"""Copies between the host and an accelerator, on streams beside the one that computes: one for each way, as devices have one
engine for each.

A stream waits for what was issued before a copy, because that may still use the memory that is written; whoever reads what
was copied waits for its event. Host memory that is pinned is copied while the host goes on, so it must stay as it is until
then: neither the allocator of the device nor that of the host knows of our streams.
"""

from __future__ import annotations

from collections import deque
from functools import cache

import torch
from torch import Tensor

__all__ = ["SideStream", "side_stream"]


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
