"""Direct exchange through shared memory, for ranks of one host.

[Note: a copy is the limit] A rank writes the pieces its peers need into its arena and sends each peer a header of a few
bytes over gloo; the peer copies, or adds, from there. That is one copy in and one out in place of two through sockets, an
all-gather writes its piece once for all peers, and a reduce-scatter needs no receive buffers. The headers keep what
sockets give: order, time limits, and an error when a peer dies.

[Note: in step] All operations share one sequence of headers, and a header carries the mark of its operation. So a rank that
is at another operation than its peer is found by both, at once, before either has used a byte of the other's.

A header also says how many messages its sender has read of each channel, so a block is given out again once all peers
have read it. A message that finds no room goes over gloo. Where any rank cannot map the arena of any other, all ranks
use gloo for everything.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from zero_fn.collectives.arena import Arena, map_arena
from zero_fn.collectives.exchange import Exchange, Work
from zero_fn.collectives.segment import Contribution, Pending, Segment, Sum, fill_own, flat, joined, nbytes_of, runs_of
from zero_fn.collectives.waiting import OutOfStep, PeerLost
from zero_fn.layout import ALIGNMENT_NBYTES
from zero_fn.traffic import count

__all__ = ["SameHost"]

_FAREWELL = -1  # in place of a mark: the sender has given up
_FAREWELLS = 32  # more headers than a peer may be waiting for
_OVER_GLOO = -1  # in place of an address: the bytes follow as a message
_GATHERS, _REDUCTIONS, _CONTROL = _CHANNELS = range(3)  # messages of one channel may be read before those of another
_HEADER, _DATA = 0x40000000, 0x50000000  # tags; data are messages that found no room, by channel
_HEADER_WORDS = 2 + len(_CHANNELS)  # mark, address, messages read by channel


class _Shared:
    """The arenas of all ranks, and what was read of them. Messages of a channel are numbered from 0 on every rank."""

    def __init__(self, arena: Arena, peers: dict[int, Tensor]) -> None:
        self.arena, self.peers = arena, peers
        self.read = {
            source: [0 for _ in _CHANNELS] for source in peers
        }  # by channel: messages of a peer below this number were read
        self._read_early: dict[int, list[set[int]]] = {source: [set() for _ in _CHANNELS] for source in peers}
        self._read_by = {target: [0 for _ in _CHANNELS] for target in peers}  # of this rank's messages, by each peer
        self._blocks: list[deque[int | None]] = [deque() for _ in _CHANNELS]  # not yet read by all
        self._numbers = [0 for _ in _CHANNELS]
        self._freed = [0 for _ in _CHANNELS]

    def write(self, channel: int, nbytes: int) -> tuple[int, int | None]:
        """Number and block of the next message of a channel; no block if it must go over gloo."""
        start = self.arena.allocate(nbytes)
        self._blocks[channel].append(start)
        self._numbers[channel] += 1
        return self._numbers[channel] - 1, start

    def acknowledge(self, source: int, channel: int, number: int) -> None:
        """This rank has read a message of a peer. Messages may be read out of order."""
        early, read = self._read_early[source][channel], self.read[source]
        early.add(number)
        while read[channel] in early:
            early.remove(read[channel])
            read[channel] += 1

    def note_read(self, peer: int, counts: list[int]) -> None:
        """A header says which messages of this rank the peer has read."""
        self._read_by[peer] = [max(pair) for pair in zip(counts, self._read_by[peer], strict=True)]
        for channel, blocks in enumerate(self._blocks):
            read_by_all = min(read[channel] for read in self._read_by.values())
            while self._freed[channel] < read_by_all:
                self._freed[channel] += 1
                start = blocks.popleft()
                if start is not None:
                    self.arena.free(start)


class SameHost(Exchange):
    """`Exchange` whose bytes go through shared memory where they can."""

    def __init__(self, group: dist.ProcessGroup, rank: int, size: int) -> None:
        super().__init__(group, rank, size)
        self._has_joined = False
        self._shared: _Shared | None = None
        self._farewells: list[Work] = []  # under way: nobody waits for these

    def all_gather(self, segments: Sequence[Segment], mark: int = 0) -> Pending:
        shared = self._join()
        if shared is None:
            return super().all_gather(segments, mark)
        runs = runs_of(segments)
        own = [[segment.own(self._rank) for segment in run] for run in runs]
        message = _Message(self, shared, _GATHERS, mark, [own])
        for target, source in self._peers:
            message.announce(target, source, 0)
        fill_own(segments, self._rank)
        count("all-gather", sum(nbytes_of(piece) for run in own for piece in run) * (self._size - 1))

        def finish() -> None:
            for _, source in self._peers:
                pieces = [[segment.piece(source) for segment in run] for run in runs]
                arrived = message.read(source, [(run[0].dtype, sum(p.numel() for p in run)) for run in pieces])
                for run, elements in zip(pieces, arrived, strict=True):
                    if len(run) == 1:
                        run[0].copy_(elements)
                    else:
                        torch._foreach_copy_(run, torch.split(elements, [piece.numel() for piece in run]))
                message.acknowledge(source)
            message.close()

        return Pending(message.works, finish, own)

    def reduce_scatter(self, contributions: Sequence[Contribution], mark: int = 0) -> Pending:
        shared = self._join()
        if shared is None:
            return super().reduce_scatter(contributions, mark)
        runs = runs_of(contributions)
        parts_for = [[[c.addend.piece(target) for c in run] for run in runs] for target, _ in self._peers]
        message = _Message(self, shared, _REDUCTIONS, mark, parts_for)
        for i, (target, source) in enumerate(self._peers):
            message.announce(target, source, i)
        count("reduce-scatter", sum(nbytes_of(p) for parts in parts_for for run in parts for p in run))
        sums = [Sum(run, self._rank) for run in runs]
        sizes = [(run[0].addend.dtype, total.numel) for run, total in zip(runs, sums, strict=True)]

        def finish() -> None:
            arrived = {source: message.read(source, sizes) for _, source in self._peers}
            for i, total in enumerate(sums):
                total.finish([arrived[rank][i] for rank in sorted(arrived)])
            for source in arrived:
                message.acknowledge(source)
            message.close()

        return Pending(message.works, finish)

    def any(self, bits: Tensor, mark: int = 0) -> Pending:
        shared = self._join()
        if shared is None:
            return super().any(bits, mark)
        message = self._control(shared, bits, mark)

        def finish() -> None:
            for _, source in self._peers:
                bits.bitwise_or_(message.read(source, [(bits.dtype, bits.numel())])[0])
                message.acknowledge(source)
            message.close()

        return Pending(message.works, finish)

    def exchange(self, message: Tensor, mark: int = 0) -> Tensor:
        shared = self._join()
        if shared is None:
            return super().exchange(message, mark)
        rows = message.new_empty((self._size, message.numel()))
        rows[self._rank] = message
        sent = self._control(shared, message, mark)
        Pending(sent.works).wait()
        for _, source in self._peers:
            rows[source] = sent.read(source, [(message.dtype, message.numel())])[0]
            sent.acknowledge(source)
        sent.close()
        return rows

    def give_up(self) -> None:
        if self._shared is not None:
            farewell = torch.tensor([_FAREWELL, *(0 for _ in range(_HEADER_WORDS - 1))])
            for target, _ in self._peers:
                for _ in range(_FAREWELLS):
                    self._send(farewell, target, _HEADER, self._farewells)

    def _control(self, shared: _Shared, message: Tensor, mark: int) -> _Message:
        sent = _Message(self, shared, _CONTROL, mark, [[[message]]])
        for target, source in self._peers:
            sent.announce(target, source, 0)
        count("control", nbytes_of(message) * (self._size - 1))
        return sent

    def _join(self) -> _Shared | None:
        """Maps the arenas of all ranks, once. A collective: the first of this transport on every rank."""
        if not self._has_joined:
            self._has_joined = True
            self._shared = self._map_all()
        return self._shared

    def _map_all(self) -> _Shared | None:
        try:
            arena = Arena()
        except (AttributeError, OSError, ValueError, OverflowError):  # no memfd on this system, or no room for it
            arena = None
        card = [os.getpid(), arena.fd, *arena.token] if arena is not None else [0] * 18
        cards = super().exchange(torch.tensor(card, dtype=torch.int64).view(torch.uint8)).view(torch.int64).tolist()
        peers = {
            rank: map_arena(pid, fd, bytes(token))
            for rank, (pid, fd, *token) in enumerate(cards)
            if rank != self._rank and pid
        }
        mapped = {rank: memory for rank, memory in peers.items() if memory is not None}
        is_joined = arena is not None and len(mapped) == self._size - 1
        votes = super().exchange(torch.tensor([is_joined], dtype=torch.uint8))
        if arena is not None:
            arena.close_file()
        return _Shared(arena, mapped) if arena is not None and bool(votes.all()) else None


class _Message:
    """One message of this rank to all peers, and the messages of the peers that answer it.

    Attributes:
        works: The headers of the peers under way.
    """

    def __init__(
        self, transport: SameHost, shared: _Shared, channel: int, mark: int, parts: list[list[list[Tensor]]]
    ) -> None:
        """Writes the message.

        Args:
            transport: Whose ranks these are.
            shared: The arenas.
            channel: Which kind of message.
            mark: Of the operation. [Note: in step]
            parts: For each address, runs of tensors: one address for all peers, or one for each.
        """
        self._transport, self._shared, self._channel, self._mark = transport, shared, channel, mark
        self._parts: list[list[list[Tensor]]] | None = None  # kept only if they must go over gloo
        self.works: list[Work] = []
        self._sends: list[Work] = []
        self._headers: dict[int, Tensor] = {}
        sizes = [sum(_room(run) for run in runs) for runs in parts]
        self._number, start = shared.write(channel, sum(sizes))
        self._starts: list[int | None] = []
        if start is None:
            self._parts = parts
        for runs, size in zip(parts, sizes, strict=True):
            self._starts.append(start)
            if start is not None:
                _write(shared.arena.memory, start, runs)
                start += size

    def announce(self, target: int, source: int, address: int) -> None:
        """Tells a peer where its part is, and expects to be told by another."""
        start = self._starts[address]
        header = torch.tensor([self._mark, _OVER_GLOO if start is None else start, *self._shared.read[target]])
        answer = torch.empty_like(header)
        self._headers[source] = answer
        self._transport._receive(answer, source, _HEADER, self.works)
        self._transport._send(header, target, _HEADER, self._sends)
        if self._parts is not None:
            for run in self._parts[address]:
                self._transport._send(joined(run), target, _DATA + self._channel, self._sends)

    def read(self, source: int, sizes: list[tuple[torch.dtype, int]]) -> list[Tensor]:
        """The runs that a peer sent, by dtype and elements; in its arena, so to be read before `acknowledge`.

        Raises:
            OutOfStep: The peer was at another operation.
            PeerLost: What comes over gloo does not come.
        """
        mark, start, *counts = self._headers[source].tolist()
        if mark == _FAREWELL:
            raise PeerLost(source, is_late=False, text="the peer has given up")
        if mark != self._mark:
            raise OutOfStep(source)
        self._shared.note_read(source, counts)
        if start == _OVER_GLOO:
            runs = [torch.empty(numel, dtype=dtype) for dtype, numel in sizes]
            works: list[Work] = []
            for run in runs:
                self._transport._receive(run, source, _DATA + self._channel, works)
            Pending(works).wait()
            return runs
        memory, runs = self._shared.peers[source], []
        for dtype, numel in sizes:
            nbytes = numel * dtype.itemsize
            runs.append(memory.narrow(0, start, nbytes).view(dtype))
            start += _aligned(nbytes)
        return runs

    def acknowledge(self, source: int) -> None:
        """The message of a peer was read."""
        self._shared.acknowledge(source, self._channel, self._number)

    def close(self) -> None:
        """Waits until headers and what went over gloo have left: gloo holds what its peer has not asked for yet."""
        Pending(self._sends).wait()


def _aligned(nbytes: int) -> int:
    return -(-nbytes // ALIGNMENT_NBYTES) * ALIGNMENT_NBYTES


def _room(run: list[Tensor]) -> int:
    return _aligned(sum(map(nbytes_of, run)))


def _write(memory: Tensor, start: int, runs: list[list[Tensor]]) -> None:
    for run in runs:
        numel = sum(piece.numel() for piece in run)
        place = memory.narrow(0, start, numel * run[0].element_size()).view(run[0].dtype)
        if len(run) == 1:
            place.view(run[0].shape).copy_(run[0])
        else:
            torch.cat([flat(piece) for piece in run], out=place)
        start += _room(run)
