"""Where the parameters of a unit lie in one buffer, at rest: large ones on aligned boundaries, small ones back to back.

What travels in one message should rest as it travels. The pieces of small parameters then leave from where they rest, and the
sums of their gradients are made where the gradients rest, without a copy on either side.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

from zero_fn.layout import aligned_offsets
from zero_fn.runtime.slot import Slot
from zero_fn.transport.segment import PACKED_NBYTES

__all__ = ["dense_offsets"]


def dense_offsets(slots: Sequence[Slot], numels: Sequence[int], itemsize: int) -> tuple[dict[Slot, int], int]:
    """Where each slot begins in a buffer of their own, and the elements of the buffer. The same on every rank.

    Args:
        slots: Of one dtype.
        numels: Elements of each.
        itemsize: Bytes per element.
    """
    sizes = dict(zip(slots, numels, strict=True))
    small = [slot for slot in slots if _is_even_and_small(slot)]
    apart = [slot for slot in slots if not _is_even_and_small(slot)]
    *starts, total = aligned_offsets([*(sizes[slot] for slot in apart), sum(sizes[slot] for slot in small)], itemsize)
    run = accumulate((sizes[slot] for slot in small), initial=starts.pop())
    return dict(zip((*apart, *small), (*starts, *run), strict=False)), total


def _is_even_and_small(slot: Slot) -> bool:
    """Whether its piece is as large on every rank, and travels packed with others."""
    is_even = slot.path.sublayout is None and slot.path.numel == slot.path.piece_numel * slot.path.size
    return (
        not slot.path.keeps_whole_gradient and is_even and slot.path.piece_numel * slot.dtype.itemsize < PACKED_NBYTES
    )
