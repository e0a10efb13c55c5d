"""Parts of parameters that stay in memory between two axes.

[Note: hosted parts] Over two axes, a parameter that the first cuts at rest (PARAMS) and the second only for its gradient or
optimizer (GRADS, OPTIMIZER) has three sizes: its shard of both axes is at rest, its part on the first axis stays in memory
and is gathered over the second once the optimizer has stepped, and the whole is gathered over the first for each use.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from zero_fn.hierarchy import Links
from zero_fn.layout import aligned_offsets
from zero_fn.runtime.slot import Slot

__all__ = ["Hosts"]


class Hosts:
    """The hosted parts of one unit.

    Attributes:
        slots: The parameters that have one.
        are_current: Whether they hold what rests now.
    """

    __slots__ = ("are_current", "slots")

    def __init__(self, slots: Sequence[Slot] = (), devices: Sequence[torch.device] = ()) -> None:
        """Makes room for them.

        Args:
            slots: The parameters of a unit.
            devices: Of each.
        """
        self.slots, self.are_current = [slot for slot in slots if slot.is_hosted], False
        members: dict[tuple[torch.dtype, torch.device], list[Slot]] = {}
        for slot, device in zip(slots, devices, strict=True):
            if slot.is_hosted:
                members.setdefault((slot.compute_dtype, device), []).append(slot)
        for (dtype, device), hosted in members.items():
            numels = [slot.sublayout.padded_numel for slot in hosted if slot.sublayout is not None]
            *offsets, numel = aligned_offsets(numels, dtype.itemsize)
            buffer = torch.empty(numel, dtype=dtype, device=device)
            for slot, offset in zip(hosted, offsets, strict=True):
                assert slot.sublayout is not None
                slot.hosted = buffer.narrow(0, offset, slot.sublayout.padded_numel)
                if slot.compute_dtype == slot.dtype:
                    slot.flat = slot.owned_of_hosted(slot.hosted)

    def gather(self, transport: Links, unit: str) -> None:
        """Gathers them over the second axis. Waits."""
        segments = []
        for slot in self.slots:
            assert slot.hosted is not None
            own = slot.owned_of_hosted(slot.hosted)
            if own.data_ptr() != slot.flat.data_ptr():
                own.copy_(slot.flat)
            segments.append(slot.hosted_segment())
        transport.all_gather(segments, f"hosted parameters of {unit}").wait()
        self.are_current = True

    @property
    def buffers(self) -> list[Tensor]:
        """Their memory."""
        return [slot.hosted for slot in self.slots if slot.hosted is not None]
