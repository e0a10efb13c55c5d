"""One message of each rank to every rank, on a group of its own: what ranks agree by that are not training."""

from __future__ import annotations

from datetime import timedelta
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
import torch.distributed.distributed_c10d as c10d
from torch import Tensor

from zero_fn.errors import LostRankError
from zero_fn.transport.waiting import deadline

__all__ = ["LONGEST_S", "broadcast", "meet", "meeting_group"]

LONGEST_S = 3600.0
"""The most that ranks wait for one whose disk is slower than theirs."""

_groups: WeakKeyDictionary[dist.ProcessGroup, dist.ProcessGroup] = WeakKeyDictionary()


def meeting_group() -> dist.ProcessGroup | None:
    """A group of all ranks that nothing else uses, so that a thread may wait in it; None of one rank alone. Made at first
    use, which all ranks have to take part in.

    Raises:
        LostRankError: A rank did not come before the deadline of collectives.
    """
    world = dist.group.WORLD if dist.is_available() and dist.is_initialized() else None
    if world is None or world.size() == 1:
        return None
    if world not in _groups:
        backend = str(dist.get_backend(world))
        backend = "gloo" if dist.is_gloo_available() and "nccl" in backend else backend
        try:
            made = dist.new_group(backend=backend, timeout=timedelta(seconds=deadline()))
        except RuntimeError as error:
            raise _lost(error) from error
        if backend == "gloo":
            c10d._set_pg_timeout(timedelta(seconds=LONGEST_S), made)
        _groups[world] = made
    return _groups[world]


def meet(group: dist.ProcessGroup, message: Tensor, seconds: float) -> Tensor:
    """The messages of all ranks, one row each: a collective, that waits.

    Args:
        group: What `meeting_group` returned.
        message: uint8 in memory of the host, of one length on all ranks.
        seconds: How long to wait for the others.

    Raises:
        LostRankError: A rank has ended, or did not come.
    """
    rows = message.repeat(group.size(), 1)
    try:
        gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor  # torch 2.13 has renamed it
        work = gather(rows.view(-1), message, group=group, async_op=True)
        work.wait(timedelta(seconds=seconds))
    except RuntimeError as error:
        raise _lost(error) from error
    return rows


def broadcast(group: dist.ProcessGroup, values: Tensor) -> Tensor:
    """The same memory with the values of rank 0: a collective, that waits.

    Raises:
        LostRankError: A rank has ended, or did not come.
    """
    try:
        dist.broadcast(values.view(-1).view(torch.uint8), group=group, group_src=0)
    except RuntimeError as error:
        raise _lost(error) from error
    return values


def _lost(error: RuntimeError) -> LostRankError:
    return LostRankError(
        "Ranks that save or load a checkpoint have lost one of them.",
        why=str(error).splitlines()[0],
        fix="call save and load on every rank; see what the others say, and start all again from the last checkpoint",
    )
