"""The shared memory of a process group whose ranks are on one host: their arenas and mailboxes.

All transports of a group share it. So their operations are one sequence, and ranks at collectives of two different models are
found like ranks at two collectives of one.

[Note: children] A process that a rank forks (a worker of a `DataLoader`) has the same memory and copies of all objects. If
the child drops these or ends, nothing may happen to the rank.
"""

from __future__ import annotations

import os
import weakref
from collections import deque
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist

from zero_fn.errors import TierError
from zero_fn.one_host.arena import Arena, Mapped, map_arena
from zero_fn.one_host.mailbox import CHANNELS, Mailbox, are_mailboxes_available, box_nbytes
from zero_fn.transport.line import Transport

__all__ = ["Shared", "shared_by"]


class Shared:
    """This rank's arena, and the arenas of the other ranks of a group and the mailboxes with them, by rank."""

    def __init__(self, arena: Arena, peers: dict[int, Mapped], boxes: dict[int, Mailbox]) -> None:
        self.arena = arena
        self.peers = peers
        self.boxes = boxes
        # Of messages that some peer has not read, with their numbers in the channel.
        self._blocks: list[deque[tuple[int, int]]] = [deque() for _ in range(CHANNELS)]
        self._sent = [0] * CHANNELS
        self._headers = self._users = 0
        self._pid = os.getpid()
        weakref.finalize(self, _leave, list(boxes.values()), self._pid).atexit = False  # peers see that a process ends

    def used_by(self, transport: object) -> None:
        """Notes a user. When the last one is gone, the pages of the arena go back to the system."""
        self._users += 1
        weakref.finalize(transport, self._unused).atexit = False

    def write(self, channel: int, nbytes: int) -> tuple[int, int, int]:
        """Takes a block for the next message. Returns the number of its header, its number in the channel, and the block.

        Raises:
            TierError: The arena has no room. Peers are told that this rank sends nothing more.
        """
        self._free_read()
        try:
            start = self.arena.allocate(nbytes)
        except TierError:
            for box in self.boxes.values():
                box.leave()
            raise
        number, header = self._sent[channel], self._headers
        self._blocks[channel].append((number, start))
        self._sent[channel], self._headers = number + 1, header + 1
        return header, number, start

    def _free_read(self) -> None:
        """Frees the blocks of messages that all peers have read."""
        for channel, blocks in enumerate(self._blocks):
            if blocks:
                read_by_all = min([box.read_by_peer(channel) for box in self.boxes.values()])
                while blocks and blocks[0][0] < read_by_all:
                    self.arena.free(blocks[0][1])
                    blocks.popleft()

    def _unused(self) -> None:
        self._users -= 1
        if not self._users and os.getpid() == self._pid:  # [Note: children]
            self._free_read()
            self.arena.trim()


_of_groups: WeakKeyDictionary[dist.ProcessGroup, Shared | None] = WeakKeyDictionary()


def shared_by(group: dist.ProcessGroup, rank: int, size: int, transport: Transport) -> Shared | None:
    """The shared memory of a group; None if any rank cannot map the memory of any other, watch its process, or use futexes.

    The first call for a group is a collective, over `transport`.
    """
    if group not in _of_groups:
        _of_groups[group] = _map_all(rank, size, transport)
    return _of_groups[group]


def _map_all(rank: int, size: int, transport: Transport) -> Shared | None:
    try:
        arena = Arena(box_nbytes(size)) if are_mailboxes_available() else None
    except (AttributeError, OSError, ValueError, OverflowError):  # this system has no memfd, or no room
        arena = None
    try:
        return _mapped(arena, rank, size, transport)
    finally:
        if arena is not None:
            arena.close_file()


def _mapped(arena: Arena | None, rank: int, size: int, transport: Transport) -> Shared | None:
    card = [os.getpid(), arena.fd, *arena.token] if arena is not None else [0] * 18
    cards = torch.zeros(size, len(card), dtype=torch.int64)
    cards[rank] = torch.tensor(card)
    transport.exchange(cards.view(torch.uint8)).wait()
    peers: dict[int, Mapped] = {}
    boxes: dict[int, Mailbox] = {}
    for source, (pid, fd, *token) in enumerate(cards.tolist()):
        peer = map_arena(pid, fd, bytes(token)) if pid and source != rank else None
        if arena is not None and peer is not None:
            try:
                boxes[source] = Mailbox(arena.mapped, rank, peer, source, pid)
            except OSError:  # the process of the peer may not be watched
                continue
            peers[source] = peer
    cannot = torch.tensor([len(boxes) < size - 1], dtype=torch.uint8)
    transport.any(cannot).wait()
    return Shared(arena, peers, boxes) if arena is not None and not cannot.item() else None


def _leave(boxes: list[Mailbox], pid: int) -> None:
    if os.getpid() == pid:  # [Note: children]
        for box in boxes:
            box.leave()
