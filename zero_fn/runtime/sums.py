"""The way down: how the gradients of a unit are summed over axes, one after the other.

    local  ==first axis==>  sum of this rank's piece  ==second axis==>  mean, at rest

A leg along an axis is a reduce-scatter, or in a format an exchange of codes (wire_reduce.py). The
mean is the mean over the second axis of the means over the first, each summed in the order of its
ranks. What an axis does not cut its ranks sum in even parts, and gather again at the end.

The moves are made once for the same layout. The first collectives of a reduction are issued at
once, the others when it is waited for. All ranks wait in the same order, so they stay in step.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from zero_fn.runtime.wire_reduce import CodedGradient, exchanged
from zero_fn.transport.line import Line, Work
from zero_fn.transport.links import alike, gather_hops
from zero_fn.transport.segment import BufferPlace, Contribution, Segment
from zero_fn.transport.trip import Trip

__all__ = ["Sums", "reduced"]

_Send = tuple[Line, Any, list[int]]
"""A line along one axis, the plan of its reduce-scatter,
and the numbers of the rows that it sums."""


class Sums:
    """The moves of contributions that travel as they are."""

    def __init__(
        self, contributions: Sequence[Contribution], buffers: Sequence[Tensor], line: Line
    ) -> None:
        rooms = list(buffers)
        heads: list[Contribution] = []
        later: list[Contribution] = []
        # Buffers that become means along one axis, and how many ranks hold parts of each.
        self._means: list[tuple[BufferPlace, int]] = []
        # What the second axis does not cut: the number of the axis,
        # and elements of the largest part.
        self._shared: list[tuple[BufferPlace, int, int]] = []
        for each in contributions:
            first, total = line.along(each.axis), each.out
            own = each.numel_of(first.rank)
            if not each.later:
                if line.size != first.size:
                    self._means.append((BufferPlace(each.out, buffers), line.size // first.size))
            elif each.later[0][1] is not None or total.dtype != each.sum_dtype:
                total = torch.empty(own, dtype=each.sum_dtype, device=total.device)
                rooms.append(total)
            heads.append(Contribution(each.rows, each.piece_rows, total, each.sum_dtype, each.axis))
            if not each.later or not own:  # of nothing all ranks of the second axis have nothing
                continue
            second, cut_numel = each.later[0]
            size, rank = line.along(second).size, line.along(second).rank
            piece_numel, out = cut_numel or -(-own // size), each.out
            if cut_numel is None:
                self._shared.append((BufferPlace(out, buffers), second, piece_numel))
                out = Segment(out, own, piece_numel).piece(rank)
            later.append(Contribution(total, piece_numel, out, each.sum_dtype, second))
        # Between the axes sums are in memory of their own: as many elements of a dtype.
        self._between = [(room.numel(), room.dtype, room.device) for room in rooms[len(buffers) :]]
        self._totals = [BufferPlace(each.rows, rooms) for each in later]
        self._hops: list[list[_Send]] = [
            [
                (
                    line.along(axis),
                    line.along(axis).reduce_plan([hop[at] for at in chosen], rooms),
                    chosen,
                )
                for axis, chosen in alike([each.axis for each in hop])
            ]
            for hop in (heads, later)
        ]
        # The line and the plan, where one reduce-scatter into the buffers leaves means at rest.
        self.only: tuple[Line, Any] | None = None
        if len(self._hops[0]) == 1 and not (later or self._means or self._between):
            self.only = self._hops[0][0][:2]

    def rooms(self, buffers: Sequence[Tensor]) -> list[Tensor]:
        """These buffers, and memory for what is between the axes."""
        fresh = [
            torch.empty(numel, dtype=dtype, device=device) for numel, dtype, device in self._between
        ]
        return [*buffers, *fresh]

    def begin(
        self, number: int, rows: Sequence[Tensor], rooms: Sequence[Tensor], what: str
    ) -> list[Work]:
        """Begins the reduce-scatters along the first or the second axis;
        `rows` are the addends of the first."""
        if number:
            for place, ranks in self._means:
                place.of(rooms).div_(ranks)
            rows = [place.of(rooms) for place in self._totals]
        return [
            line.reduce_scatter(
                plan, rows if len(chosen) == len(rows) else [rows[at] for at in chosen], rooms, what
            )
            for line, plan, chosen in self._hops[number]
        ]

    def shared(self, rooms: Sequence[Tensor]) -> list[Segment]:
        """What is gathered again along the second axis."""
        outs = [(place.of(rooms), axis, piece_numel) for place, axis, piece_numel in self._shared]
        return [Segment(out, out.numel(), most, axis, is_tight=True) for out, axis, most in outs]


def reduced(
    sums: Sums,
    rows: Sequence[Tensor],
    coded: Sequence[CodedGradient],
    buffers: Sequence[Tensor],
    line: Line,
    what: str,
) -> Iterator[Work | Trip]:
    """The collectives of a reduction. The means are in the buffers when all were waited for."""
    rooms = sums.rooms(buffers)
    for number in range(2):
        works = sums.begin(number, rows, rooms, what)
        there = [each for each in coded if number < len(each.hops)]
        exchanges = [
            Trip(exchanged([there[at] for at in chosen], number, line.along(axis), f"coded {what}"))
            for axis, chosen in alike([each.hops[number].number for each in there])
        ]
        yield from works
        yield from exchanges
    for number in (1, 0):
        segments = [each.shares[number] for each in coded if number in each.shares]
        if number:
            segments += sums.shared(rooms)
        for along, plan in (send for hop in gather_hops(line, segments) for send in hop):
            yield along.all_gather(plan, what)
    for each in coded:
        each.divide(line.size)
