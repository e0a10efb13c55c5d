"""Rooms: where the parameters of a group lie in memory of this rank,
at each spot of their way up."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from zero_fn.runtime.group import Group
from zero_fn.runtime.leg import Spot
from zero_fn.runtime.parameter_kind import ParameterKind
from zero_fn.runtime.path import Path
from zero_fn.runtime.slot import Slot
from zero_fn.transport.segment import Segment
from zero_fn.values.layout import aligned_offsets
from zero_fn.values.wire import Wire

__all__ = ["Room", "rooms_of", "whole_room"]

_ALL, _FIRST, _OTHERS = slice(None), slice(1), slice(1, None)


@dataclass(frozen=True, slots=True)
class Room:
    """The memory of one spot."""

    memory: Tensor  # flat
    starts: Mapping[Slot, int]  # the first element of each parameter, of bytes if it holds codes
    hops: slice  # of the paths: those whose all-gathers complete what is here
    # The kind whose format says how many bytes elements take; None: the room has elements.
    coded: ParameterKind | None = None

    @property
    def is_inner(self) -> bool:
        """Whether it has parts on the first axis, and no whole parameters."""
        return self.hops is _OTHERS

    def whole(self, slot: Slot) -> Tensor:
        """All that is here of a parameter, flat, without padding."""
        return self._range(slot, 0, slot.path.inner_numel if self.is_inner else slot.path.numel)

    def own(self, slot: Slot) -> Tensor:
        """What of it this rank has at rest."""
        path = slot.path
        return self._range(
            slot, path.inner_start if self.is_inner else path.start, path.local_numel
        )

    def inner(self, slot: Slot) -> Tensor:
        """What of a whole parameter this rank has on the first axis."""
        path = slot.path
        return self._range(slot, path.start - path.inner_start, path.inner_numel)

    def segments(
        self, slots: Sequence[Slot], sources: Sequence[Tensor | None]
    ) -> Iterator[Segment]:
        """What all-gathers complete here.

        `sources`: where this rank's parts are read; None: here.
        """
        for slot, source in zip(slots, sources, strict=True):
            path, count = slot.path, self._count(slot.path)
            route = [(axis, n and count(n)) for axis, n in path.route[self.hops]]
            (axis, piece_numel), *later = route
            numel = count(path.inner_numel if self.is_inner else path.numel)
            start = self.starts[slot]
            yield Segment(
                self.memory, numel, piece_numel or 0, axis, later, start=start, source=source
            )

    def _range(self, slot: Slot, start: int, numel: int) -> Tensor:
        count = self._count(slot.path)
        return self.memory.as_strided((count(numel),), (1,), self.starts[slot] + count(start))

    def _count(self, path: Path) -> Callable[[int], int]:
        """How many elements of the memory so many elements take."""
        return self.coded.records_of(path).nbytes_of if self.coded is not None else int


def whole_room(group: Group) -> Room:
    """Where whole parameters of a group lie for a gather:
    memory that they were read into, or that of its buffer."""
    return Room(group.memory_for_whole(), group.starts, _ALL if group.inner is None else _FIRST)


def rooms_of(group: Group, whole: Room) -> dict[Spot, Room]:
    """All rooms of a group. Codes have memory while a gather is under way."""
    kind, inner = group.kind, group.inner
    keeps_codes = isinstance(kind.inner, Wire)
    rooms = {Spot.WHOLE: whole}
    if inner is not None:
        assert inner.memory is not None
        rooms[Spot.INNER] = Room(inner.memory, inner.starts, _OTHERS, kind if keeps_codes else None)
    if kind.gather is not None:
        nbytes = [kind.records_nbytes(slot.path) for slot in group.slots]
        *starts, end = aligned_offsets(nbytes, 1)
        hops = whole.hops if inner is None or keeps_codes else _OTHERS
        memory = torch.empty(end, dtype=torch.uint8, device=whole.memory.device)
        rooms[Spot.CODES] = Room(memory, dict(zip(group.slots, starts, strict=True)), hops, kind)
    return rooms
