"""Activations that wait for their backward in another tier (P_a+cpu of ZeRO-R,
and its sequel on a disk).

A tensor leaves when its forward has run and comes back when it is computed again. What was parked
last comes back first, so taking one begins to fetch the one parked before it. On an accelerator,
copies run on a stream of their own (`side_stream.py`).

[Note: two copies] A tensor on the device is kept until its copy is done. The host issues all layers
before a busy device has computed the first of them, so the device would keep the inputs of all. So
the host waits until at most two copies are left.

Source: ZeRO, Rajbhandari et al. 2020, section 6.1 (P_a+cpu).
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from zero_fn.storage import InMemory, Store, Stored
from zero_fn.tiers.side_stream import side_stream
from zero_fn.values.tiers import Cpu, Tier, is_away

__all__ = ["Parked", "Parking", "bytes_of"]


class Parking:
    """Where activations wait between forward and backward."""

    def __init__(self, tier: Tier | None) -> None:
        self.tier = tier  # None is the memory of their device
        self._store: _Activations | None = None
        self._last: Callable[[], _ParkedAway | None] = lambda: None

    def park(self, tensor: Tensor) -> Parked:
        """Begins to move a tensor to the tier. The tensor may be dropped at once."""
        if self.tier is None or not is_away(self.tier, tensor.device.type) or not tensor.numel():
            return Parked(tensor)
        if not torch.ops.aten.is_non_overlapping_and_dense(tensor):
            # Dense tensors keep their strides: a kernel may round differently on others.
            tensor = tensor.contiguous()
        if self._store is None:
            self._store = _Activations(self.tier, "activations")
        parked = (_OnHost if isinstance(self.tier, Cpu) else _ParkedAway)(
            self._store, tensor, self._last
        )
        self._last = weakref.ref(parked)
        return parked

    @property
    def nbytes(self) -> int:
        """Bytes that the tier has for activations now: of host memory, or of the file."""
        return self._store.nbytes if self._store is not None else 0

    def __deepcopy__(self, memo: dict[int, Any]) -> Parking:
        return Parking(self.tier)


class Parked:
    """One tensor that waits for its backward: here, in the memory of its device."""

    def __init__(self, tensor: Tensor) -> None:
        self._tensor = tensor

    def take(self) -> Tensor:
        """The tensor, on its device. May be called again."""
        return self._tensor


class _Activations(Store):
    """The store of parked activations."""

    def __init__(self, tier: Tier, what: str) -> None:
        super().__init__(tier, what)
        # Of the last copies into host memory, and of those from it, after which that memory may go.
        self._ends: tuple[deque[torch.Event], deque[torch.Event]] = deque(), deque()

    def copy(self, to: Tensor, source: Tensor, *, after: torch.Event | None = None) -> torch.Event:
        """Begins a copy into host memory, or from it, when one at most is under way.
        [Note: two copies]"""
        is_there = source.device.type == "cpu"
        ends = self._ends[is_there]
        if len(ends) == 2:
            ends.popleft().synchronize()
        ends.append(side_stream((to if is_there else source).device).copy(to, source, after=after))
        return ends[-1]

    def __del__(self) -> None:
        for end in (*self._ends[0], *self._ends[1]):
            end.synchronize()


class _ParkedAway(Parked, Stored):
    """A tensor with elements that waits on a disk, and knows the one parked before it."""

    def __init__(
        self, store: _Activations, tensor: Tensor, before: Callable[[], _ParkedAway | None]
    ) -> None:
        self._store = store
        self._before = before
        self.nbytes = tensor.nbytes
        self._form = (tensor.shape, tensor.stride())
        self._dtype = tensor.dtype
        self._device = tensor.device
        store.reserve([self], tensor.device)
        self._put(bytes_of(tensor), store.fetch(self))

    def take(self) -> Tensor:
        tensor = self._brought()
        before = self._before()
        if before is not None:
            before.fetch()
        return tensor

    def fetch(self) -> None:
        """Begins to bring it back."""
        self._store.fetch(self)

    def _put(self, content: Tensor, room: InMemory) -> None:
        """Begins to move its bytes to their place."""
        room.memory[: self.nbytes].copy_(content)
        self._store.keep(self, room)

    def _brought(self) -> Tensor:
        tensor = self._empty()
        bytes_of(tensor).copy_(self._store.get(self))
        return tensor

    def _empty(self) -> Tensor:
        return torch.empty_strided(*self._form, dtype=self._dtype, device=self._device)

    def __del__(self) -> None:
        if self.place >= 0:
            self._store.free(self)  # what is still on its way into its memory comes before the next


class _OnHost(_ParkedAway):
    _arriving: tuple[Tensor, torch.Event] | None = None

    def fetch(self) -> None:
        if self._arriving is None:
            tensor = self._empty()
            self._arriving = (
                tensor,
                self._store.copy(bytes_of(tensor), self._memory, after=self._there),
            )

    def _put(self, content: Tensor, room: InMemory) -> None:
        self._memory = room.memory
        self._there = self._store.copy(room.memory, content)

    def _brought(self) -> Tensor:
        self.fetch()
        assert self._arriving is not None
        (tensor, event), self._arriving = self._arriving, None
        side_stream(self._device).wait_for(event)
        return tensor

    def __del__(self) -> None:
        if self._arriving is not None:  # fetched, and never taken
            self._arriving[1].synchronize()
        super().__del__()


def bytes_of(tensor: Tensor) -> Tensor:
    """The memory of a dense tensor, as bytes."""
    return tensor.detach().as_strided((tensor.numel(),), (1,)).view(torch.uint8)
