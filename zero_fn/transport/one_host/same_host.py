"""Direct exchange through shared memory, for ranks of one host.

[Note: a copy is the limit] A rank writes the pieces its peers need into its arena and a header of two numbers into the
mailbox of each; the peer copies, or adds, from there. That is one copy in and one out in place of two through sockets, an
all-gather writes its piece once for all peers, and a reduce-scatter needs no receive buffers.

[Note: in step] All operations on a process group share one sequence of headers, and a header carries the mark of its
operation. So a rank that is at another operation than its peer is found by both, at once, before either has used a byte of
the other's.

Where any rank cannot map the arena of any other, all ranks use gloo.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from zero_fn.kernels.nontemporal import copy
from zero_fn.transport.exchange import CONTROL, GATHER, REDUCE, Exchange
from zero_fn.transport.one_host.shared import Shared, shared_by
from zero_fn.transport.segment import (
    Contribution,
    Pending,
    Segment,
    Sum,
    fill_own,
    flat,
    runs_of,
)
from zero_fn.transport.waiting import Failure, OutOfStep
from zero_fn.values.layout import ALIGNMENT_NBYTES

__all__ = ["SameHost"]

_CHANNELS = {GATHER: 0, REDUCE: 1, CONTROL: 2}

_Parts = Mapping[int | None, list[list[Tensor]]]
"""Runs of tensors, by the peer they are for; under None, the same for all."""


class SameHost(Exchange):
    """`Exchange` whose bytes go through shared memory where they can."""

    def __init__(self, group: dist.ProcessGroup, rank: int, size: int) -> None:
        super().__init__(group, rank, size)
        self._has_joined = False
        self._shared: Shared | None = None

    def all_gather(self, segments: Sequence[Segment], mark: int = 0) -> Pending:
        if self._join() is None:
            return super().all_gather(segments, mark)
        pending = self._gathered(GATHER, segments, mark)  # which reads this rank's pieces where they rest
        fill_own(segments, self._rank)
        return pending

    def reduce_scatter(self, contributions: Sequence[Contribution], mark: int = 0) -> Pending:
        shared = self._join()
        if shared is None:
            return super().reduce_scatter(contributions, mark)
        runs = runs_of(contributions)
        parts: _Parts = {peer: [[part.piece(peer) for part in run] for run in runs] for peer, _ in self._peers}
        message = _Message(self, shared, REDUCE, mark, parts)
        sums = [Sum(run, self._rank) for run in runs]
        sizes = [(run[0].rows.dtype, total.numel) for run, total in zip(runs, sums, strict=True)]

        def finish() -> None:
            arrived = {source: message.read(source, sizes) for _, source in self._peers}
            for i, total in enumerate(sums):
                total.finish({source: runs[i] for source, runs in arrived.items()})
            message.close()

        if message.is_answered:  # this rank came last: nothing to wait for
            finish()
            return Pending(nbytes=message.nbytes)
        return Pending(finish=finish, kept=message, nbytes=message.nbytes)

    def give_up(self, failure: Failure | None = None) -> None:
        if self._shared is not None:
            for box in self._shared.boxes.values():
                box.leave(failure)

    def _gathered(self, direction: int, segments: Sequence[Segment], mark: int) -> Pending:
        shared = self._join()
        if shared is None:
            return super()._gathered(direction, segments, mark)
        runs = runs_of(segments)
        own = [[segment.own(self._rank) for segment in run] for run in runs]
        message = _Message(self, shared, direction, mark, {None: own})

        def finish() -> None:
            for _, source in self._peers:
                pieces = [[segment.piece(source) for segment in run] for run in runs]
                sizes = [[piece.numel() for piece in run] for run in pieces]
                kinds = [(run[0].kind, sum(each)) for run, each in zip(runs, sizes, strict=True)]
                for run, each, elements in zip(pieces, sizes, message.read(source, kinds), strict=True):
                    copy(run, torch.split(elements, each))
            message.close()

        return Pending(finish=finish, kept=message, nbytes=message.nbytes)

    def _join(self) -> Shared | None:
        """What the ranks share. A collective for the first transport of a group, when it is first used."""
        if not self._has_joined:
            over_gloo = Exchange(self._group, self._rank, self._size)
            self._shared = shared_by(self._group, self._rank, self._size, over_gloo)
            self._has_joined = True
            if self._shared is not None:
                self._shared.used_by(self)
        return self._shared


class _Message:
    """One message of this rank to all peers, and the messages of the peers that answer it.

    Attributes:
        nbytes: What this rank sends, without padding.
    """

    def __init__(
        self,
        transport: SameHost,
        shared: Shared,
        direction: int,
        mark: int,
        parts: _Parts,
    ) -> None:
        """Writes the message, and tells the peers where it is.

        Args:
            transport: Whose ranks these are.
            shared: The arenas.
            direction: Which kind of message.
            mark: Of the operation. [Note: in step]
            parts: What it says.

        Raises:
            TierError: The arena has no room for it.
        """
        self._transport, self._shared, self._mark = transport, shared, mark
        self._unread: set[int] = set()
        rooms = {peer: sum(map(_room, runs)) for peer, runs in parts.items()}
        channel = _CHANNELS[direction]
        self._header, number, start = shared.write(channel, sum(rooms.values()))
        self._place = channel, number
        self._unread.update(shared.boxes)
        starts: dict[int | None, int] = {}
        for peer, runs in parts.items():
            starts[peer] = start
            _write(shared.arena.mapped.memory, start, runs)
            start += rooms[peer]
        self.nbytes = 0
        for target, _ in transport._peers:
            peer = target if target in parts else None
            shared.boxes[target].send(mark, starts[peer])
            self.nbytes += sum([piece.nbytes for run in parts[peer] for piece in run])

    def __del__(self) -> None:
        # Its model failed and was dropped: nobody will read what the peers send.
        for source in self._unread:
            self._shared.boxes[source].drop(self._header, *self._place)

    def read(self, source: int, kinds: list[tuple[torch.dtype, int]]) -> list[Tensor]:
        """The runs that a peer sent, by dtype and elements; in its arena, so to be read before `close`. Waits.

        Raises:
            OutOfStep: The peer was at another operation.
            PeerLost: It does not come.
        """
        mark, start = self._shared.boxes[source].take(self._header)
        if mark != self._mark:
            raise OutOfStep(source, seen_by=self._transport._rank)
        memory, runs = self._shared.peers[source].memory, []
        for dtype, numel in kinds:
            nbytes = numel * dtype.itemsize
            runs.append(memory.narrow(0, start, nbytes).view(dtype))
            start += _aligned(nbytes)
        return runs

    @property
    def is_answered(self) -> bool:
        """Whether the messages of all peers are here, so that `read` will not wait."""
        return all(box.has(self._header) for box in self._shared.boxes.values())

    def close(self) -> None:
        """The messages of all peers were read."""
        while self._unread:
            self._shared.boxes[self._unread.pop()].acknowledge(*self._place)


def _aligned(nbytes: int) -> int:
    return -(-nbytes // ALIGNMENT_NBYTES) * ALIGNMENT_NBYTES


def _room(run: list[Tensor]) -> int:
    return _aligned(sum([piece.nbytes for piece in run]))


def _write(memory: Tensor, start: int, runs: list[list[Tensor]]) -> None:
    for run in runs:
        nbytes = sum([piece.nbytes for piece in run])
        place = memory.narrow(0, start, nbytes).view(run[0].dtype)
        if len(run) == 1:
            copy([place.view(run[0].shape)], run)
        else:
            torch.cat([flat(piece) for piece in run], out=place)
        start += _aligned(nbytes)
