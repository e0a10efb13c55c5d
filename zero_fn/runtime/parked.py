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
from zero_fn.storage import Lot, Slab
from zero_fn.tiers import Cpu, Nvme, Tier, is_away

__all__ = ["Parked", "Parking"]

_WHAT = "activations"


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
        self._lot: Lot | None = None
        self._host: _Host | None = None
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
        before = self._last() if self._last is not None else None
        parked: _Chained
        if isinstance(self.tier, Nvme):
            if self._lot is None:
                self._lot = Lot(self.tier, _WHAT)
            parked = _OnDisk(self._lot, tensor, before)
        else:
            if self._host is None:
                self._host = _Host(self.tier)
            parked = _OnHost(self._host, tensor, before)
        self._last = weakref.ref(parked)
        return parked

    @property
    def nbytes(self) -> int:
        """Bytes that the tier has for them now: of host memory, or of the file."""
        if self._lot is not None:
            return self._lot.nbytes
        return self._host.nbytes if self._host is not None else 0

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


class _Chained:
    """Knows what was parked before it."""

    def __init__(self, tensor: Tensor, before: _Chained | None) -> None:
        self._before = weakref.ref(before) if before is not None else None
        self._shape, self._stride, self._dtype = tensor.shape, tensor.stride(), tensor.dtype
        self._device = tensor.device
        self._nbytes = tensor.numel() * tensor.element_size()

    def fetch(self) -> None:
        """Begins to bring it back."""

    def _fetch_before(self) -> None:
        before = self._before() if self._before is not None else None
        if before is not None:
            before.fetch()

    def _empty(self) -> Tensor:
        return torch.empty_strided(self._shape, self._stride, dtype=self._dtype, device=self._device)


class _OnDisk(_Chained):
    def __init__(self, lot: Lot, tensor: Tensor, before: _Chained | None) -> None:
        super().__init__(tensor, before)
        self._lot = lot
        self._place = lot.put(_bytes_of(tensor)) if self._nbytes else None

    def fetch(self) -> None:
        if self._place is not None:
            self._lot.fetch(self._place, self._nbytes)

    def take(self) -> Tensor:
        tensor = self._empty()
        if self._place is not None:
            self._lot.get(self._place, _bytes_of(tensor))
            self._fetch_before()
        return tensor

    def __del__(self) -> None:
        place = getattr(self, "_place", None)
        if place is not None:
            self._lot.free(place, self._nbytes)


class _Host:
    """Pinned memory of the host, of exact sizes, used again.

    Attributes:
        nbytes: All of it.
        ends: Of the last copy into it and from it. Only after those may it go.
    """

    def __init__(self, tier: Cpu) -> None:
        self._tier, self.nbytes = tier, 0
        self._free: dict[int, list[Tensor]] = {}
        self.ends: dict[str, torch.Event] = {}

    def __del__(self) -> None:
        for end in self.ends.values():
            end.synchronize()

    def memory(self, nbytes: int) -> Tensor:
        """A free range, or a new one."""
        free = self._free.get(nbytes)
        if free:
            return free.pop()
        limit = self._tier.limit_nbytes
        slab = Slab(nbytes, Cpu(self._tier.pinned, None if limit is None else limit - self.nbytes), _WHAT)
        self.nbytes += slab.nbytes
        return slab.memory[:nbytes]

    def free(self, memory: Tensor) -> None:
        """Takes a range back, from which nothing is on its way. What is still on its way into it comes before the next."""
        self._free.setdefault(memory.numel(), []).append(memory)


class _OnHost(_Chained):
    def __init__(self, host: _Host, tensor: Tensor, before: _Chained | None) -> None:
        super().__init__(tensor, before)
        self._host = host
        self._arriving: tuple[Tensor, torch.Event] | None = None
        self._memory: Tensor | None = host.memory(self._nbytes) if self._nbytes else None
        if self._memory is not None:
            self._there = side_stream(self._device).copy(self._memory, _bytes_of(tensor))
            host.ends["into"] = self._there

    def fetch(self) -> None:
        if self._arriving is None and self._memory is not None:
            tensor = self._empty()
            arrived = side_stream(self._device).copy(_bytes_of(tensor), self._memory, after=self._there)
            self._arriving = tensor, arrived
            self._host.ends["from"] = arrived

    def take(self) -> Tensor:
        self.fetch()
        if self._arriving is None:
            return self._empty()
        (tensor, event), self._arriving = self._arriving, None
        side_stream(self._device).wait_for(event)
        self._fetch_before()
        return tensor

    def __del__(self) -> None:
        memory = getattr(self, "_memory", None)
        if memory is not None:
            if self._arriving is not None:  # fetched, and never taken
                self._arriving[1].synchronize()
            self._host.free(memory)


def _bytes_of(tensor: Tensor) -> Tensor:
    return tensor.as_strided((tensor.numel(),), (1,)).view(torch.uint8)
