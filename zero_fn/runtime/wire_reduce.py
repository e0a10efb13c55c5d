"""Gradients that travel in a format: how they are summed over ranks, hop by hop.

    local sum  ->  records of its rows  -- all-to-all -->  records of this rank's rows, from all
                                                           ranks  ->  their mean

The own records are decoded as those of others are, and added in the order of ranks, in
float32. So the mean is the same at every stage. Over a second axis it is coded once more. Of a
parameter that an axis does not cut each rank sums some of the rows, and gets the others from
their ranks, as they rest.

Source: ZeRO++, Wang et al. 2023 (qgZ).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import prod

import torch
from torch import Tensor

from zero_fn.kernels.wire_codes import decode_mean, encode
from zero_fn.runtime.slot import Slot
from zero_fn.transport.line import Line, Work
from zero_fn.transport.segment import Segment
from zero_fn.values.wire import is_coded

__all__ = ["CodedGradient", "exchanged"]


class CodedGradient:
    """The gradient of one parameter on its way to rest."""

    def __init__(self, slot: Slot, local: Tensor, room: Tensor) -> None:
        """`local`: what this rank contributes, as `Path.rows_of` gives it.

        `room`: flat memory for what its path leaves to this rank;
        where the first axis cuts nothing, for all.
        """
        scatter = slot.kind.scatter
        assert scatter is not None
        self.slot = slot
        self.records = scatter.records(slot.path.row_numel)
        local = local if is_coded(local.dtype) else local.float()
        self.rows = local.reshape(-1, slot.path.row_numel).contiguous()  # for the next hop
        self.hops = slot.path.hops
        self._room = room
        self._first = 0  # the first row of the room that is in the hands of this rank
        # For each hop that cuts nothing, the rows that its ranks sum together.
        self.shares: dict[int, Segment] = {}

    def pieces(self, number: int) -> list[Tensor]:
        """What this rank contributes at a hop, coded: the rows of each rank of the axis."""
        coded = self.rows.new_empty((len(self.rows), self.records.row_nbytes), dtype=torch.uint8)
        encode(self.rows, self.records, coded)
        hop = self.hops[number]
        most = hop.piece_of(self.rows.numel(), self.slot.path.row_numel) // self.slot.path.row_numel
        return [coded[rank * most : (rank + 1) * most] for rank in range(hop.axis.size)]

    def take(self, parts: Sequence[Tensor], number: int) -> None:
        """Takes the mean of what the ranks of a hop contribute to the rows of this one."""
        hops, numel, count = self.hops, self.slot.path.row_numel, len(self.rows)
        hop, is_last = hops[number], number == len(hops) - 1
        if hop.layout is None:
            start = self._room.storage_offset() + self._first * numel
            most = hop.piece_of(count * numel, numel)
            self.shares[number] = Segment(
                self._room, count * numel, most, hop.number, start=start, is_tight=True
            )
            self._first += min(hop.axis.rank * most // numel, count)
        place = (
            self._room.narrow(0, self._first * numel, len(parts[0]) * numel).view(-1, numel)
            if is_last
            else None
        )
        if place is not None and is_coded(place.dtype):
            self.rows = place
        else:
            self.rows = torch.empty(
                (len(parts[0]), numel), dtype=torch.float32, device=self._room.device
            )
        decode_mean(parts, self.records, self.rows)
        if place is not None and place is not self.rows:
            place.copy_(self.rows)

    def divide(self, ranks: int) -> None:
        """Makes the mean one over all data axes. [Note: a model axis of some]
        (zero_fn.values.grid)"""
        others = ranks // prod(hop.axis.size for hop in self.hops)
        if others > 1:
            self._room.div_(others)


def exchanged(
    gradients: Sequence[CodedGradient], number: int, line: Line, what: str
) -> Iterator[Work]:
    """The exchange along one axis, the hop `number` of these gradients: its ranks send one another
    the codes, and each takes the mean of its rows."""
    sent = [each.pieces(number) for each in gradients]
    arrived = [
        [own if rank == line.rank else torch.empty_like(own) for rank in range(line.size)]
        for own in (pieces[line.rank] for pieces in sent)
    ]
    if line.size > 1:
        numel = sum(each.rows.numel() for each in gradients)
        yield line.all_to_all(_to_each(sent, line), _to_each(arrived, line), numel, what)
    for each, parts in zip(gradients, arrived, strict=True):
        each.take(parts, number)


def _to_each(pieces: Sequence[Sequence[Tensor]], line: Line) -> list[list[Tensor]]:
    """By rank of the axis its pieces, of those that have rows; none for this rank."""
    return [
        [each[rank] for each in pieces if rank != line.rank and len(each[rank])]
        for rank in range(line.size)
    ]
