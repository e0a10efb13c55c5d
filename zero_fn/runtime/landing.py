"""Parameters that are read from a tier straight to where modules see them, and the memory for it.

Where nothing is gathered and the device is the CPU, what a fetch reads is what a forward sees: no staging buffer, no copy.
Such memory lives as long as a tensor on it, and then serves the next unit (`zero_fn.storage.pool.Landing`).
"""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from zero_fn.runtime.group import Group
from zero_fn.runtime.slot import Slot
from zero_fn.tiers.record import Record

__all__ = ["landed", "landing_nbytes", "memory_for_whole", "starts_of"]


def landing_nbytes(group: Group) -> int:
    """Bytes of what a fetch reads to where modules see it."""
    record = _landing(group)
    return record.nbytes if record is not None else 0


def starts_of(group: Group) -> Mapping[Slot, int]:
    """Where each parameter begins in the gathered memory, in elements: in each gather the same, whether it is read there or
    copied, as autograd remembers places."""
    assert group.whole is not None
    record, itemsize = _landing(group), group.kind.compute_dtype.itemsize
    if record is None:
        return group.whole.starts
    return {slot: start // itemsize for slot, start in zip(group.slots, record.starts, strict=True)}


def landed(group: Group) -> Tensor | None:
    """The memory where parameters have just been read, flat, in the compute dtype; None if they are copied, cast or decoded
    from there into a buffer."""
    record = _landing(group)
    if record is None or record.fetched is None:  # copies in the compute dtype were out of date, or a disk has failed
        return None
    return record.fetched.memory.view(group.kind.compute_dtype)


def memory_for_whole(group: Group) -> Tensor:
    """Memory for whole parameters, flat: that which disks are read into, where that is large."""
    assert group.whole is not None
    if group.record is None or group.record.landing is None:
        return group.whole.allocate()
    nbytes = landing_nbytes(group) or group.whole.nbytes
    return group.record.landing.take(nbytes)[:nbytes].view(group.whole.dtype)


def _landing(group: Group) -> Record | None:
    """The record that is read to where modules see it, where it is up to date; None if there is none."""
    record = group.record
    if record is None or record.landing is None or group.kind.gather is not None:
        return None
    source = record.copies or record
    return source if all(form.dtype == group.kind.compute_dtype for form in source.forms) else None
