"""Copies between the host and an accelerator, on streams beside the one that computes: one stream for each direction, as
devices have one copy engine for each.

Before a copy, its stream waits for what was issued so far, which may still use the memory that is written. Whoever reads the
result waits for the event of the copy. From and to pinned memory the host does not wait for a copy, and neither the allocator
of the device nor that of the host knows of these streams. So the memory must stay as it is until the event.

[Note: pieces] The engine that copies in one direction takes one copy after the other, whatever the priority of their streams,
and goes on with the next one of the same stream if that is ready (torchrec pull request 4315; not measured here). So a large
copy is made in pieces with a small kernel between: there, small copies of other streams come in.

[Note: in its own place] A gradient in half precision arrives in the upper half of its place, and is widened from the
beginning, each time the first half of what is left: that is written to memory whose values are widened already.

    place     |  ...  ...  ...  ...  |  a b c d e f g h  |
    first     |  a a  b b  c c  d d  |  . . . . e f g h  |
    second    |  a a  b b  c c  d d  |  e e  f f . . g h |
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from functools import cache

import torch
from torch import Tensor

__all__ = ["Arriving", "SideStream", "on_host", "side_stream"]

_SMALL_NUMEL = 1 << 15  # so few are widened through a copy of them
_PIECE_NBYTES = 32 << 20  # [Note: pieces]


class SideStream:
    """The streams of one device. `there` is that of copies to the device."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.there, self._back = (torch.Stream(device, priority=-1) for _ in range(2))  # of what is between pieces
        self._copying: deque[tuple[torch.Event, list[Tensor]]] = deque()

    def copy(self, to: Tensor, source: Tensor, *, after: torch.Event | None = None) -> torch.Event:
        """Begins one copy, as `copy_all` does."""
        return self.copy_all([to], [source], after=after)

    def copy_all(self, to: list[Tensor], sources: list[Tensor], *, after: torch.Event | None = None) -> torch.Event:
        """Begins copies in one direction, after what has been issued so far. The tensors on the device are kept alive until
        their end; the caller keeps those on the host.

        Args:
            to: What is written; at least one tensor.
            sources: What is read, one for each.
            after: The end of a copy in the other direction that these have to wait for.

        Returns:
            The end of all copies: `wait_for` it before `to` is read or `sources` written.
        """
        is_there = sources[0].device.type == "cpu"
        stream = self.there if is_there else self._back
        stream.wait_stream(torch.accelerator.current_stream(self._device))
        if after is not None:
            stream.wait_event(after)
        with stream:
            for place, source in zip(to, sources, strict=True):
                self._copy(place, source)
        event = stream.record_event()
        while self._copying and self._copying[0][0].query():
            self._copying.popleft()
        self._copying.append((event, to if is_there else sources))
        return event

    def _copy(self, to: Tensor, source: Tensor) -> None:
        numel = _PIECE_NBYTES // source.itemsize
        if source.numel() <= numel or not (to.is_contiguous() and source.is_contiguous()):
            to.copy_(source, non_blocking=True)
            return
        for place, piece in zip(torch.split(to.view(-1), numel), torch.split(source.view(-1), numel), strict=True):
            place.copy_(piece, non_blocking=True)
            torch.ones(1, device=self._device)  # a kernel: see [Note: pieces]

    def wait_for(self, event: torch.Event) -> None:
        """Lets the device wait for a copy before what is issued from now on; the host does not wait."""
        torch.accelerator.current_stream(self._device).wait_event(event)


@cache
def side_stream(device: torch.device) -> SideStream:
    """The side streams of a device of this process."""
    return SideStream(device)


class Arriving:
    """Gradients on their way from an accelerator into memory of the host, while the device computes the next ones.

    A float32 gradient that was computed in bfloat16, and neither averaged nor added to since, is the same in bfloat16. Then
    only that half of its bytes travels. The device compares the values; its answer travels with the half, and if they differ
    the whole gradient follows. [Note: in its own place]
    """

    def __init__(self, places: Sequence[Tensor], values: Sequence[Tensor], computed: torch.dtype) -> None:
        """Begins to copy.

        Args:
            places: Memory of the host for each of them, flat, not to be touched until `finish`.
            values: On one device, flat, of the same numel and dtype.
            computed: The dtype they were computed in.
        """
        self._halves: list[tuple[Tensor, Tensor, Tensor, Tensor]] = []
        to, sources = list[Tensor](), list[Tensor]()
        for place, value in zip(places, values, strict=True):
            if 2 * computed.itemsize == place.dtype.itemsize and place.numel() > 1:
                narrow = value.to(computed)
                half = place.view(computed)[place.numel() :]
                is_same = place.view(torch.uint8)[:1]  # unused until the half is widened, and pinned as it is
                to += half, is_same
                sources += narrow, (narrow.to(value.dtype) == value).all().view(torch.uint8).reshape(1)
                self._halves.append((place, value, half, is_same))
            else:
                to.append(place)
                sources.append(value)
        self._end = side_stream(values[0].device).copy_all(to, sources)

    def finish(self) -> None:
        """Waits until the gradients are there."""
        self._end.synchronize()
        for place, value, half, is_same in self._halves:
            if not is_same.item():
                place.copy_(value)
                continue
            begin, numel = 0, place.numel()
            while begin < numel:
                left = numel - begin
                end = begin + left // 2 if left > _SMALL_NUMEL else numel
                source = half[begin:end]
                place[begin:end].copy_(source if end < numel else source.clone())
                begin = end


def on_host(values: Tensor, computed: torch.dtype) -> Tensor:
    """A dense gradient, or its copy in memory of the host. `computed` is the dtype in which it was computed."""
    if values.device.type == "cpu":
        return values
    copied = torch.empty_strided(values.shape, values.stride(), dtype=values.dtype, device="cpu")
    flat = (values.numel(),), (1,)
    Arriving([copied.as_strided(*flat)], [values.as_strided(*flat)], computed).finish()
    return copied
