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
from zero_fn.one_host.group_memory import Shared, shared_by
from zero_fn.transport.direct_exchange import CONTROL, GATHER, REDUCE, TO_ALL, Exchange, GatherPlan, ReducePlan, flat
from zero_fn.transport.line import Work
from zero_fn.transport.segment import ByRank
from zero_fn.transport.waiting import Failure, OutOfStep
from zero_fn.values.layout import ALIGNMENT_NBYTES

__all__ = ["SameHost"]

_CHANNELS = {GATHER: 0, REDUCE: 1, CONTROL: 2, TO_ALL: 1}

_Parts = Mapping[int | None, list[list[Tensor]]]
"""Runs of tensors, by the peer that they are for; under None those that are for all peers."""


class SameHost(Exchange):
    """`Exchange` through shared memory, if all ranks of the group can map that of all others; else over gloo."""

    def reduce_scatter(
        self, plan: ReducePlan, rows: Sequence[Tensor], buffers: Sequence[Tensor], mark: int = 0
    ) -> Work:
        shared = self._shared
        if shared is None:
            return super().reduce_scatter(plan, rows, buffers, mark)
        parts: _Parts = {peer: plan.pieces(rows, peer) for peer, _ in self._peers}
        message = _Message(self, shared, REDUCE, mark, parts)
        if message.is_answered:  # this rank came last: nothing to wait for
            self._add(message, plan, rows, buffers)
            return Work(nbytes=message.nbytes)
        return Work(finish=self._add, kept=(message, plan, rows, buffers), nbytes=message.nbytes)

    def _add(self, message: _Message, plan: ReducePlan, rows: Sequence[Tensor], buffers: Sequence[Tensor]) -> None:
        try:
            plan.add(rows, buffers, {source: message.read(source, plan.kinds) for _, source in self._peers})
        finally:
            message.close()

    def all_to_all(self, sends: ByRank, places: ByRank, device: torch.device, mark: int = 0) -> Work:
        shared = self._shared
        if shared is None:
            return super().all_to_all(sends, places, device, mark)
        parts: _Parts = {peer: [[tensor.detach()] for tensor in sends[peer]] for peer, _ in self._peers}
        message = _Message(self, shared, TO_ALL, mark, parts)
        if message.is_answered:  # as in reduce_scatter
            self._fill(message, places)
            return Work(nbytes=message.nbytes)
        return Work(finish=self._fill, kept=(message, places), nbytes=message.nbytes)

    def _fill(self, message: _Message, places: ByRank) -> None:
        try:
            for _, source in self._peers:
                into = [place.detach() for place in places[source]]
                arrived = message.read(source, [(place.dtype, place.numel()) for place in into])
                copy(into, [piece.view(place.shape) for piece, place in zip(arrived, into, strict=True)])
        finally:
            message.close()

    def give_up(self, failure: Failure | None = None) -> None:
        shared: Shared | None = self.__dict__.get("_shared")  # the failure may be one of joining
        if shared is not None:
            for box in shared.boxes.values():
                box.leave(failure)

    def _gathered(self, direction: int, plan: GatherPlan, mark: int) -> Work:
        shared = self._shared
        if shared is None:
            return super()._gathered(direction, plan, mark)
        message = _Message(self, shared, direction, mark, {None: plan.own})
        return Work(finish=_read, kept=(message, plan), nbytes=message.nbytes)

    @property
    def shares_memory(self) -> bool:
        """Whether bytes move through shared memory. A collective, if it is the first use of the group."""
        return self._shared is not None

    @cached_property
    def _shared(self) -> Shared | None:
        """The shared memory of the group, or None. The first use of the first transport of a group is a collective."""
        shared = shared_by(self._group, self._rank, self._size, Exchange(self._group, self._rank, self._size))
        if shared is not None:
            shared.used_by(self)
        return shared


class _Message:
    """One message of this rank to its peers, and the messages of the peers that answer it."""

    def __init__(self, transport: SameHost, shared: Shared, direction: int, mark: int, parts: _Parts) -> None:
        """Writes the message, and tells the peers where it is. `mark`: [Note: in step].

        Raises:
            TierError: The arena has no room for it.
        """
        self._transport = transport
        self._shared = shared
        self._mark = mark
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
        self.nbytes = 0  # that this rank sends, without padding
        for target, _ in transport._peers:
            peer = target if target in parts else None
            shared.boxes[target].send(mark, starts[peer])
            self.nbytes += sum([piece.nbytes for run in parts[peer] for piece in run])

    def __del__(self) -> None:
        # The model failed and was dropped: this rank will not read the messages of its peers.
        for source in self._unread:
            self._shared.boxes[source].drop(self._header, *self._place)

    def read(self, source: int, kinds: list[tuple[torch.dtype, int]]) -> list[Tensor]:
        """The runs that a peer sent, of these dtypes and elements, as tensors in its arena, valid until `close`. Waits.

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
        for source in [*self._unread]:
            self._shared.boxes[source].acknowledge(*self._place)
            self._unread.discard(source)


def _read(message: _Message, plan: GatherPlan) -> None:
    try:
        for source, kinds in plan.kinds.items():
            for run, elements in enumerate(message.read(source, kinds)):
                plan.place(source, run, elements)
    finally:
        message.close()


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
