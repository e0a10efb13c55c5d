"""Bits that ranks or together, and that the host reads.

[Note: beside the computation] Beside an accelerator the bits travel on a stream of their own: to the device, over the ranks,
and back to the host. A host that reads them waits for that stream, not for what the device was given to compute before: a
copy of the ordinary kind would leave the device without work at the beginning of each forward and backward.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from functools import cache

import torch
from torch import Tensor

from zero_fn.transport.line import Line, Work

__all__ = ["Ored"]


class Ored:
    """The result of one such message, under way. [Note: beside the computation]"""

    __slots__ = ("_beside", "_bits", "_pending")

    def __init__(self, links: Line, bits: Sequence[bool], what: str, *, check: str = "") -> None:
        """Sends the message: a byte for each bit, to each peer. All ranks send one of the same length.

        Args:
            links: Where it is sent.
            bits: The bits of this rank.
            what: For errors.
            check: A text that must be the same on every rank.
        """
        self._pending: Work | None = None
        self._beside: _Beside | None = None
        if links.device.type == "cpu":
            self._bits = torch.tensor(bits, dtype=torch.uint8, device="cpu")
            self._pending = links.any(self._bits, what, check=check)
        else:
            pinned = links.device.type == "cuda"
            self._bits = torch.tensor(bits, dtype=torch.uint8, device="cpu", pin_memory=pinned)
            self._beside = _Beside(links, self._bits, what, check)

    def settle(self) -> None:
        """Nobody reads it: a message of the host is waited for, because the next one would be taken for it."""
        if self._pending is not None:
            self._pending.wait()

    def read(self) -> list[bool]:
        """Waits. The bits of all ranks."""
        self.settle()
        if self._beside is not None:
            self._beside.end.synchronize()
        return [bool(bit) for bit in self._bits.tolist()]


class _Beside:
    """A message that goes to the device and comes back.

    Attributes:
        end: It is back.
    """

    __slots__ = ("_bits", "_there", "end")

    def __init__(self, links: Line, bits: Tensor, what: str, check: str) -> None:
        stream = _stream_of(links.device)
        with stream:
            self._bits, self._there = bits, bits.to(links.device, non_blocking=True)
            links.any(self._there, what, check=check).wait()
            bits.copy_(self._there, non_blocking=True)
        self.end: torch.Event = stream.record_event()

    def __del__(self) -> None:
        # The copy back reads and writes this memory. A host that waited for it here would not run ahead.
        if hasattr(self, "end") and _leaving is not None:  # it is None while the interpreter ends
            while _leaving and _leaving[0][0].query():
                _leaving.popleft()
            _leaving.append((self.end, self._bits, self._there))


_leaving: deque[tuple[torch.Event, Tensor, Tensor]] = deque()
"""Memory of messages that nobody reads, until they are back."""


@cache
def _stream_of(device: torch.device) -> torch.Stream:
    """The stream of messages of a device."""
    return torch.Stream(device)
