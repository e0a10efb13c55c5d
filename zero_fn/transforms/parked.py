"""Activations that wait for their backward in another tier (P_a+cpu of ZeRO-R, and its sequel on a disk).

A tensor leaves when its forward has run and comes back when it is computed again. What was parked last comes back first, so
taking one begins to fetch the one parked before it.

On an accelerator, copies run on a stream of their own (`side_stream.py`): it waits for what the tensor is computed by, and
the computation waits for the copy that brings it back.

Source: ZeRO, Rajbhandari et al. 2020, section 6.1 (P_a+cpu).
"""

from __future__ import annotations

import weakref
from typing import Any, Protocol

import torch
from torch import Tensor

from zero_fn.runtime.side_stream import side_stream
from zero_fn.storage import Store
from zero_fn.values.tiers import Nvme, Tier, is_away

__all__ = ["Parked", "Parking"]


class Parked(Protocol):
    """One tensor that waits. Its room is free once this is dropped."""

    def fetch(self) -> None:
        """Begins to bring it back."""

    def take(self) -> Tensor:
        """The tensor, on its device. May be called again."""


class Parking:
    """Where tensors wait between forward and backward.

    Attributes:
        tier: The tier.
    """

    def __init__(self, tier: Tier) -> None:
        self.tier = tier
        self._store: _Activations | None = None
        self._last: weakref.ref[_Chained] | None = None

    def park(self, tensor: Tensor) -> Parked:
        """Begins to move a tensor there; it may be dropped at once.

        Raises:
            TierError: The tier has no room.
            StorageError: The path takes no files, or an earlier write failed.
        """
        if not is_away(self.tier, tensor.device.type):
            return _Here(tensor)
        if not torch.ops.aten.is_non_overlapping_and_dense(tensor):
            tensor = tensor.contiguous()  # dense ones keep their strides: a kernel may round differently on others
        if self._store is None:
            self._store = _Activations(self.tier, "activations")
        before = self._last() if self._last is not None else None
        parked = (_OnDisk if isinstance(self.tier, Nvme) else _OnHost)(self._store, tensor, before)
        self._last = weakref.ref(parked)
        return parked

    @property
    def nbytes(self) -> int:
        """Bytes that the tier has for them now: of host memory, or of the file."""
        return self._store.nbytes if self._store is not None else 0

    def __deepcopy__(self, memo: dict[int, Any]) -> Parking:
        return Parking(self.tier)


class _Here:
    """The tier is the device's own memory: nothing moves."""

    __slots__ = ("_tensor",)

    def __init__(self, tensor: Tensor) -> None:
        self._tensor = tensor

    def fetch(self) -> None:
        pass

    def take(self) -> Tensor:
        return self._tensor


class _Activations(Store):
    """Places of activations.

    Attributes:
        ends: Of the last copy into memory of the host and from it. Only after those may that go.
    """

    def __init__(self, tier: Tier, what: str) -> None:
        super().__init__(tier, what)
        self.ends: dict[str, torch.Event] = {}

    def __del__(self) -> None:
        for end in self.ends.values():
            end.synchronize()


class _Chained:
    """Knows what was parked before it. As `Stored`: its place in the store."""

    place = -1
    is_stored = False

    def __init__(self, store: _Activations, tensor: Tensor, before: _Chained | None) -> None:
        self._before = weakref.ref(before) if before is not None else None
        self._shape, self._stride, self._dtype = tensor.shape, tensor.stride(), tensor.dtype
        self._device = tensor.device
        self._store = store
        self.nbytes = tensor.numel() * tensor.element_size()
        if self.nbytes:
            store.reserve([self], tensor.device)
            self._put(_bytes_of(tensor), store.fetch(self)[0])

    def fetch(self) -> None:
        """Begins to bring it back."""

    def _put(self, content: Tensor, memory: Tensor) -> None:
        """Begins to move it to its place."""

    def _fetch_before(self) -> None:
        before = self._before() if self._before is not None else None
        if before is not None:
            before.fetch()

    def _empty(self) -> Tensor:
        return torch.empty_strided(self._shape, self._stride, dtype=self._dtype, device=self._device)


class _OnDisk(_Chained):
    def _put(self, content: Tensor, memory: Tensor) -> None:
        memory[: self.nbytes].copy_(content)
        self._store.keep(self, memory)

    def fetch(self) -> None:
        if self.nbytes:
            self._store.fetch(self)

    def take(self) -> Tensor:
        tensor = self._empty()
        if self.nbytes:
            _bytes_of(tensor).copy_(self._store.get(self))
            self._fetch_before()
        return tensor

    def __del__(self) -> None:
        if self.place >= 0:
            self._store.free(self)


class _OnHost(_Chained):
    _arriving: tuple[Tensor, torch.Event] | None = None

    def _put(self, content: Tensor, memory: Tensor) -> None:
        self._memory = memory
        self._there = self._store.ends["into"] = side_stream(self._device).copy(memory, content)

    def fetch(self) -> None:
        if self._arriving is None and self.nbytes:
            tensor = self._empty()
            arrived = side_stream(self._device).copy(_bytes_of(tensor), self._memory, after=self._there)
            self._arriving = tensor, arrived
            self._store.ends["from"] = arrived

    def take(self) -> Tensor:
        self.fetch()
        if self._arriving is None:
            return self._empty()
        (tensor, event), self._arriving = self._arriving, None
        side_stream(self._device).wait_for(event)
        self._fetch_before()
        return tensor

    def __del__(self) -> None:
        if self._arriving is not None:  # fetched, and never taken
            self._arriving[1].synchronize()
        if self.place >= 0:
            self._store.free(self)  # what is still on its way into its memory comes before the next


def _bytes_of(tensor: Tensor) -> Tensor:
    return tensor.as_strided((tensor.numel(),), (1,)).view(torch.uint8)
