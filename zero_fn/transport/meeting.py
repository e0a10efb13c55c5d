"""Messages of each rank to rank 0 and back, on a group of their own: for agreement outside training, as in checkpoints."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
import torch.distributed.distributed_c10d as c10d
from torch import Tensor

from zero_fn.errors import LostRankError
from zero_fn.transport.waiting import deadline

__all__ = ["LONGEST_S", "broadcast", "gather", "meeting_group", "scatter", "set_timeout"]

LONGEST_S = 3600.0
"""The most that ranks wait for one whose disk is slower than theirs."""

# torch 2.15 made it public.
set_timeout: Callable[..., None] = getattr(c10d, "set_timeout", None) or c10d._set_pg_timeout

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
        with _lost_ranks():
            made = dist.new_group(backend=backend, timeout=timedelta(seconds=deadline()))
        if backend == "gloo":
            set_timeout(timedelta(seconds=LONGEST_S), made)
        _groups[world] = made
    return _groups[world]


def gather(group: dist.ProcessGroup, message: Tensor, seconds: float) -> Tensor:
    """The messages of all ranks on rank 0, one row each; nothing on the others. Each sends one message; rank 0 waits.

    Args:
        group: What `meeting_group` returned.
        message: uint8 in memory of the host, of one length on all ranks.
        seconds: How long to wait for the others.

    Raises:
        LostRankError: A rank has ended, or did not come.
    """
    with _lost_ranks():
        if group.rank():
            _wait(group.send([message], 0, 0), seconds)
            return message.new_empty(0, message.numel())
        rows = message.repeat(group.size(), 1)
        works = {}
        failure: RuntimeError | None = None
        for rank in range(1, group.size()):
            try:
                works[rank] = group.recv([rows[rank]], rank, 0)
            except RuntimeError as error:
                failure = error
        for work in works.values():
            try:
                _wait(work, seconds)
            except RuntimeError as error:  # the others are heard first: who still sends would not hear an answer
                failure = error
        if failure is not None:
            raise failure
        return rows


def scatter(group: dist.ProcessGroup, rows: Tensor, seconds: float) -> Tensor:
    """The row of this rank of what rank 0 has for each. Rank 0 sends one message to each; the others wait.

    Args:
        group: What `meeting_group` returned.
        rows: On rank 0 uint8 in memory of the host; on the others only its number of columns counts.
        seconds: How long to wait for rank 0.

    Raises:
        LostRankError: Rank 0 has ended, or did not come. On rank 0: another has ended; those that have not were sent theirs.
    """
    with _lost_ranks():
        if group.rank():
            own = rows.new_empty(rows.shape[1])
            _wait(group.recv([own], 0, 0), seconds)
            return own
        failure: RuntimeError | None = None
        for rank in range(1, group.size()):
            try:
                _wait(group.send([rows[rank]], rank, 0), seconds)
            except RuntimeError as error:
                failure = error
        if failure is not None:
            raise failure
        return rows[0]


def _wait(work: dist.Work, seconds: float) -> None:
    work.wait(timedelta(seconds=seconds))


def broadcast(group: dist.ProcessGroup, values: Tensor) -> Tensor:
    """The same memory with the values of rank 0: a collective, that waits.

    Raises:
        LostRankError: A rank has ended, or did not come.
    """
    with _lost_ranks():
        dist.broadcast(values.view(-1).view(torch.uint8), group=group, group_src=0)
    return values


@contextmanager
def _lost_ranks() -> Iterator[None]:
    try:
        yield
    except RuntimeError as error:
        raise LostRankError(
            "Ranks that save or load a checkpoint have lost one of them.",
            why=str(error).splitlines()[0],
            fix="call save and load on every rank; see what the others say, and start all again from the last checkpoint",
        ) from error
