"""Parameters that are read from a tier straight to where modules see them, and the memory for it.

Where nothing is gathered and the device is the CPU, what a fetch reads is what a forward sees: no staging buffer, no copy.
Such memory lives as long as a tensor on it, and then serves the next unit (`zero_fn.storage.pool.Landing`).
"""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from zero_fn.runtime.group import Group
from zero_fn.runtime.slot import Slot

__all__ = ["landed", "landing_nbytes", "memory_for_whole"]


def landing_nbytes(group: Group) -> int:
    """Bytes of what a fetch reads to where modules see it."""
    if group.record is None or group.record.landing is None or group.kind.gather is not None:
        return 0
    return (group.record.copies or group.record).nbytes


def landed(group: Group) -> tuple[Tensor, Mapping[Slot, int]] | None:
    """The memory where parameters have just been read, flat, in the compute dtype, and where each begins there; None if they
    are copied, cast or decoded from there into a buffer."""
    record = group.record.read if group.record is not None else None
    if record is None or record.landing is None or record.fetched is None or group.kind.gather is not None:
        return None
    dtype = group.kind.compute_dtype
    if any(form.dtype != dtype for form in record.forms):  # copies in the compute dtype were out of date
        return None
    starts = {slot: start // dtype.itemsize for slot, start in zip(group.slots, record.starts, strict=True)}
    return record.fetched.memory.view(dtype), starts


def memory_for_whole(group: Group) -> Tensor:
    """Memory for whole parameters, flat: that which disks are read into, where that is large."""
    assert group.whole is not None
    if group.record is None or group.record.landing is None:
        return group.whole.allocate()
    return group.record.landing.take(group.whole.nbytes)[: group.whole.nbytes].view(group.whole.dtype)
