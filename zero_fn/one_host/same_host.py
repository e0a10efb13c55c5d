"""Direct exchange through shared memory, for ranks of one host.

[Note: a copy is the limit] A rank writes the pieces that its peers need into its arena, and a header of two numbers into the
mailbox of each peer. The peer copies from the arena, or adds. So a piece is copied once in and once out, an all-gather writes
its piece once for all peers, and a reduce-scatter needs no memory to receive in.

[Note: in step] All operations on a process group share one sequence of headers, and a header carries the mark of its
operation. If two ranks are at different operations, both find out at once, before they use a byte of the other's.

If any rank cannot map the arena of any other, all ranks use gloo.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property

import torch
from torch import Tensor

from zero_fn.kernels.nontemporal import copy
from zero_fn.one_host.shared import Shared, shared_by
from zero_fn.transport.exchange import CONTROL, GATHER, REDUCE, Exchange
from zero_fn.transport.segment import Contribution, Pending, Segment, Sum, fill_own, flat, runs_of
from zero_fn.transport.waiting import Failure, OutOfStep
from zero_fn.values.layout import ALIGNMENT_NBYTES

__all__ = ["SameHost"]

_CHANNELS = {GATHER: 0, REDUCE: 1, CONTROL: 2}

_Parts = Mapping[int | None, list[list[Tensor]]]
"""Runs of tensors, by the peer that they are for; under None those that are for all peers."""


class SameHost(Exchange):
    """`Exchange` through shared memory, if all ranks of the group can map that of all others; else over gloo."""

    def prepared(self, segments: Sequence[Segment]) -> Sequence[Segment]:
        return _CutSegments(segments, self._rank, self._peers)

    def all_gather(self, segments: Sequence[Segment], mark: int = 0) -> Pending:
        pending = self._gathered(GATHER, segments, mark)  # sends this rank's pieces from where they rest
        if isinstance(segments, _CutSegments):
            copy(segments.own_places, segments.own_sources)
        else:
            fill_own(segments, self._rank)
        return pending

    def reduce_scatter(self, contributions: Sequence[Contribution], mark: int = 0) -> Pending:
        shared = self._shared
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
        shared: Shared | None = self.__dict__.get("_shared")  # the failure may be one of joining
        if shared is not None:
            for box in shared.boxes.values():
                box.leave(failure)

    def _gathered(self, direction: int, segments: Sequence[Segment], mark: int) -> Pending:
        shared = self._shared
        if shared is None:
            return super()._gathered(direction, segments, mark)
        cut = segments if isinstance(segments, _CutSegments) else _CutSegments(segments, self._rank, self._peers)
        message = _Message(self, shared, direction, mark, {None: cut.own})

        def finish() -> None:
            for source, runs in cut.of_peers:
                for (pieces, sizes), elements in zip(runs, message.read(source, cut.kinds[source]), strict=True):
                    copy(pieces, elements.split_with_sizes(sizes))
            message.close()

        return Pending(finish=finish, kept=message, nbytes=message.nbytes)

    @cached_property
    def _shared(self) -> Shared | None:
        """The shared memory of the group, or None. The first use of the first transport of a group is a collective."""
        shared = shared_by(self._group, self._rank, self._size, Exchange(self._group, self._rank, self._size))
        if shared is not None:
            shared.used_by(self)
        return shared


class _CutSegments(list[Segment]):
    """The segments of an all-gather, with the pieces that are cut from them: once for memory that is gathered many times.

    Attributes:
        own: This rank's pieces where they rest, by runs: what travels in one message each.
        own_places, own_sources: Those of them that are copied into their place, and from where.
        of_peers: For each peer, the pieces of each run where they go, with their elements.
        kinds: For each peer, dtype and elements of each run.
    """

    __slots__ = ("kinds", "of_peers", "own", "own_places", "own_sources")

    def __init__(self, segments: Sequence[Segment], rank: int, peers: Sequence[tuple[int, int]]) -> None:
        super().__init__(segments)
        runs = runs_of(segments)
        self.own = [[segment.own(rank) for segment in run] for run in runs]
        self.own_places = [segment.piece(rank) for segment in segments if segment.source is not None]
        self.own_sources = [segment.source for segment in segments if segment.source is not None]
        self.of_peers: list[tuple[int, list[tuple[list[Tensor], list[int]]]]] = []
        self.kinds: dict[int, list[tuple[torch.dtype, int]]] = {}
        for _, source in peers:
            pieces = [[segment.piece(source) for segment in run] for run in runs]
            sizes = [[piece.numel() for piece in run] for run in pieces]
            self.of_peers.append((source, list(zip(pieces, sizes, strict=True))))
            self.kinds[source] = [(run[0].kind, sum(each)) for run, each in zip(runs, sizes, strict=True)]


class _Message:
    """One message of this rank to its peers, and the messages of the peers that answer it.

    Attributes:
        nbytes: Bytes that this rank sends, without padding.
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
            transport: The transport of the ranks.
            shared: Their shared memory.
            direction: The kind of the operation.
            mark: The mark of the operation. [Note: in step]
            parts: The tensors to send.

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
        # The model failed and was dropped: this rank will not read the messages of its peers.
        for source in self._unread:
            self._shared.boxes[source].drop(self._header, *self._place)

    def read(self, source: int, kinds: list[tuple[torch.dtype, int]]) -> list[Tensor]:
        """The runs that a peer sent, as tensors in its arena, which are valid until `close`. Waits.

        Args:
            source: The peer.
            kinds: The dtype and the elements of each run.

        Raises:
            OutOfStep: The peer was at another operation.
            PeerLost: The message will not come.
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
        """Whether the messages of all peers have come, so that `read` does not wait."""
        return all(box.has(self._header) for box in self._shared.boxes.values())

    def close(self) -> None:
        """Tells all peers that their messages were read."""
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
