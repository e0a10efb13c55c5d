"""Tensors on their way: their parts to the owners, and whole ones back to all that hold parts.

[Note: leg by leg] Along each axis all ranks exchange what they have. A rank takes part for a tensor
if it is where the owner is along the axes that were passed before. So two axes move each element
twice, and the slow one no more than it would alone.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from zero_fn.owners.assignment import Dealt
from zero_fn.transport.line import Line, Work
from zero_fn.transport.links import line_over
from zero_fn.values.mesh import Axis

__all__ = ["Carried", "LinesByAxis", "collected", "spread"]


class Carried(NamedTuple):
    """One tensor on its way."""

    dealt: Dealt
    part: Tensor  # what this rank holds, or is to hold
    # Memory for the whole on its owner; None elsewhere, and where the part is all of it.
    whole: Tensor | None


class LinesByAxis:
    """The collectives along the axes, opened when they are first used."""

    def __init__(self) -> None:
        self._lines: dict[Axis, Line] = {}

    def over(self, axis: Axis) -> Line:
        """The collectives along one axis."""
        line = self._lines.get(axis)
        if line is None:
            line = self._lines[axis] = line_over([axis])
        return line

    def agree(self, axes: Iterable[Axis], check: str) -> None:
        """Requires that all ranks along these axes are at the same text,
        for a step in which nothing travels.

        Waits.
        """
        for line in map(self.over, axes):
            bit = torch.zeros(1, dtype=torch.uint8, device=line.device)
            line.any(bit, "gradients", check=check).wait()

    def give_up(self) -> None:
        """Tells all ranks that this one sends nothing more."""
        for line in self._lines.values():
            line.give_up()


def collected(carried: Sequence[Carried], lines: LinesByAxis, check: str = "") -> Iterator[Work]:
    """The legs of the ways to the owners.

    Ways of one family; `part` is only read, `whole` is filled on the owner.
    """
    if not carried:
        return
    held: list[Tensor] = [parcel.part for parcel in carried]
    first = carried[0].dealt.route.legs
    for number in reversed(range(len(first))):
        if first[number].layout is None:  # ranks hold the same
            continue
        axis, numel = first[number].axis, 0
        sends: list[list[Tensor]] = [[] for _ in range(axis.size)]
        places: list[list[Tensor]] = [[] for _ in range(axis.size)]
        for at, (dealt, _, whole) in enumerate(carried):
            if not dealt.is_on_way(number):
                continue
            leg, owner = dealt.route.legs[number], dealt.owner[number]
            numel += leg.numel
            if owner != axis.rank:
                sends[owner].append(held[at])
                continue
            assert leg.layout is not None, "ways of two families"
            room = held[at].new_empty(leg.layout.shape) if number or whole is None else whole
            leg.rows(room, owner).copy_(held[at])
            held[at] = room
            for rank in range(axis.size):
                if rank != owner:
                    places[rank].append(leg.rows(room, rank))
        yield lines.over(axis).all_to_all(
            sends, places, numel, "gradients to their owners", check=check
        )


def spread(
    carried: Sequence[Carried], lines: LinesByAxis, what: str = "new values", check: str = ""
) -> Iterator[Work]:
    """The legs of the ways back. Ways of one family; `part` is filled on every rank."""
    if not carried:
        return
    held: list[Tensor] = [
        parcel.part if parcel.whole is None else parcel.whole for parcel in carried
    ]
    last = len(carried[0].dealt.route.legs) - 1
    for number in range(last + 1):
        axis = carried[0].dealt.route.legs[number].axis
        sends: list[list[Tensor]] = [[] for _ in range(axis.size)]
        places: list[list[Tensor]] = [[] for _ in range(axis.size)]
        numel = 0
        for at, (dealt, part, _) in enumerate(carried):
            if not dealt.is_on_way(number):
                continue
            leg, owner = dealt.route.legs[number], dealt.owner[number]
            numel += leg.numel
            if owner == axis.rank:
                for rank in range(axis.size):
                    if rank != owner:
                        sends[rank].append(leg.rows(held[at], rank))
                held[at] = leg.rows(held[at], axis.rank)
            else:
                room = part
                if number < last:
                    room = torch.empty(
                        dealt.route.local_shape(number + 1), dtype=part.dtype, device=part.device
                    )
                places[owner].append(room)
                held[at] = room
        yield lines.over(axis).all_to_all(sends, places, numel, f"{what} from owners", check=check)
    for (_, part, _), own in zip(carried, held, strict=True):
        if own is not part:
            part.copy_(own)
