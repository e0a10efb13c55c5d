"""Messages from each rank to rank 0 and back, on a process group of their own:
for saves and loads of checkpoints.

And single ones from rank to rank.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from datetime import timedelta
from functools import partial
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
import torch.distributed.distributed_c10d as c10d
from torch import Tensor

from zero_fn.errors import LostRankError
from zero_fn.transport.agree import exchange_bytes
from zero_fn.transport.waiting import deadline

__all__ = [
    "LONGEST_S",
    "all_of",
    "begin_send",
    "broadcast",
    "gather",
    "meeting_group",
    "meeting_threads",
    "receive",
    "scatter",
    "set_timeout",
]

LONGEST_S = 3600.0
"""Most seconds that ranks wait for a rank with a slower disk."""

# torch 2.15 made it public.
set_timeout: Callable[..., None] = getattr(c10d, "set_timeout", None) or c10d._set_pg_timeout

_groups: WeakKeyDictionary[dist.ProcessGroup, dist.ProcessGroup] = WeakKeyDictionary()

meeting_threads: list[threading.Thread] = []
"""The last one that saves in the background, and meets other ranks when it has written."""


def meeting_group() -> dist.ProcessGroup | None:
    """A process group of all ranks for whoever meets next; None for one rank alone.

    Messages in it have no names, so this waits for a thread that saves in the background: it would
    take the messages of the others for its own.

    The first call makes the group: a collective, before which each rank sends rank 0 a byte,
    and gets one back.

    Raises:
        LostRankError: A rank has ended, or did not come before the deadline of collectives.
    """
    world = dist.group.WORLD if dist.is_available() and dist.is_initialized() else None
    if world is None or world.size() == 1:
        return None
    for thread in meeting_threads:
        thread.join()
    if world not in _groups:
        backend = str(dist.get_backend(world))
        if "gloo" in backend:
            _meet(world)
        backend = "gloo" if dist.is_gloo_available() and "nccl" in backend else backend
        with lost_ranks():
            made = dist.new_group(backend=backend, timeout=timedelta(seconds=deadline()))
        if backend == "gloo":
            set_timeout(timedelta(seconds=LONGEST_S), made)
        _groups[world] = made
    return _groups[world]


def _meet(world: dist.ProcessGroup) -> None:
    """Waits for all ranks: to make a group waits until the deadline for one that has ended,
    and its connections tell."""
    try:
        gather(world, torch.zeros(1, dtype=torch.uint8), deadline(), _TAG)
    except LostRankError:
        if not world.rank():
            with suppress(LostRankError):  # those that are left need not wait
                scatter(world, torch.ones(world.size(), 1, dtype=torch.uint8), deadline(), _TAG)
        raise
    if scatter(world, torch.zeros(world.size(), 1, dtype=torch.uint8), 2 * deadline(), _TAG).item():
        with lost_ranks():
            raise RuntimeError("rank 0 has lost a rank")


_TAG = 0x7A66
"""Of messages in the group of the user, who may send others there."""


def gather(group: dist.ProcessGroup, message: Tensor, seconds: float, tag: int = 0) -> Tensor:
    """The messages of all ranks on rank 0, one row each; no rows on the others.

    Each rank sends one message; rank 0 waits. Messages are uint8 in host memory, of one length on
    all ranks; `tag` tells them from others in the group.

    Raises:
        LostRankError: A rank has ended, or did not come.
    """
    if group.rank():
        _all({0: partial(group.send, [message], 0, tag)}, seconds, group)
        return message.new_empty(0, message.numel())
    rows = message.repeat(group.size(), 1)
    _all(
        {rank: partial(group.recv, [rows[rank]], rank, tag) for rank in range(1, group.size())},
        seconds,
        group,
    )
    return rows


def scatter(group: dist.ProcessGroup, rows: Tensor, seconds: float, tag: int = 0) -> Tensor:
    """This rank's row of the rows on rank 0.

    Rank 0 sends one message to each of the others, which wait.
    Rows are uint8 in host memory; on the others only the number of columns counts.

    Raises:
        LostRankError: Rank 0 has ended, or did not come. On rank 0: another has ended,
            and the rest were sent their rows.
    """
    if group.rank():
        own = rows.new_empty(rows.shape[1])
        _all({0: partial(group.recv, [own], 0, tag)}, seconds, group)
        return own
    _all(
        {rank: partial(group.send, [rows[rank]], rank, tag) for rank in range(1, group.size())},
        seconds,
        group,
    )
    return rows[0]


def _all(
    messages: Mapping[int, Callable[[], dist.Work]], seconds: float, group: dist.ProcessGroup
) -> None:
    """Begins messages, by rank of the peer, and waits for each.

    Raises a failure only then, so that messages of the other ranks pass. It is the first: after a
    wait that took too long gloo closes the connections to all.
    """
    works, failures = dict[int, dist.Work](), dict[int, RuntimeError]()
    for peer, begin in messages.items():
        try:
            works[peer] = begin()
        except RuntimeError as error:
            failures[peer] = error
    for peer, work in works.items():
        try:
            work.wait(timedelta(seconds=seconds))
        except RuntimeError as error:
            failures[peer] = error
    for peer, failure in failures.items():
        with lost_ranks(here=f"rank {group.rank()}, waiting for rank {peer}"):
            raise failure


def broadcast(group: dist.ProcessGroup, values: Tensor) -> Tensor:
    """Overwrites values by those of rank 0, and returns them. A collective; waits.

    Raises:
        LostRankError: A rank has ended, or did not come.
    """
    with lost_ranks():
        dist.broadcast(values.view(-1).view(torch.uint8), group=group, group_src=0)
    return values


def all_of(group: dist.ProcessGroup, message: bytes) -> list[bytes]:
    """The messages of all ranks, of any lengths.

    Each rank sends rank 0 its message, and gets all of them; waits.

    Raises:
        LostRankError: A rank has ended, or did not come.
    """

    def exchange(own: Tensor) -> Tensor:
        rows = gather(group, own, deadline())
        return broadcast(group, rows if not group.rank() else own.repeat(group.size(), 1))

    return exchange_bytes(exchange, message)


def begin_send(
    group: dist.ProcessGroup, message: Tensor, peer: int, tag: int
) -> Callable[[], None]:
    """Begins to send a message to a rank, which receives it.

    What is returned waits until it was sent.

    Raises:
        LostRankError: The rank has ended, or did not come.
    """
    here = f"rank {group.rank()}, sending to rank {peer}"
    with lost_ranks(here=here):
        work = group.send([message], peer, tag)

    def wait(kept: Tensor = message) -> None:
        with lost_ranks(here=here):
            work.wait(timedelta(seconds=deadline()))

    return wait


def receive(group: dist.ProcessGroup, message: Tensor, peer: int, tag: int) -> Tensor:
    """Overwrites a message by the one that a rank sends, and returns it; waits.

    Raises:
        LostRankError: The rank has ended, or did not come.
    """
    with lost_ranks(here=f"rank {group.rank()}, waiting for rank {peer}"):
        group.recv([message], peer, tag).wait(timedelta(seconds=deadline()))
    return message


@contextmanager
def lost_ranks(**facts: str) -> Iterator[None]:
    try:
        yield
    except RuntimeError as error:
        raise LostRankError(
            "Ranks that save or load a checkpoint have lost one of them.",
            **facts,
            why=str(error).splitlines()[0],
            fix="call save and load on every rank; see what the others say, "
            "and start all again from the last checkpoint",
        ) from error
