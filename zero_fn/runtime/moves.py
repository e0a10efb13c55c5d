"""The moves of a unit: what its legs do on its buffers, all groups together.

A move is made of the legs of all groups that go along an axis at the same time, with those on
this rank before and after:

    fill      this rank's own parts come to where the all-gather wants them: copies, casts, reads
              from a tier
    encode    they are coded
    sends     the all-gathers, one for each axis that a group goes along
    decode    what has come is decoded

Moves are made once for the same buffers. Those whose results are kept until the next step come
first.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from zero_fn.runtime.group import Group
from zero_fn.runtime.leg import Leg, Spot
from zero_fn.runtime.rooms import Room, rooms_of
from zero_fn.runtime.wire_gather import WireGather
from zero_fn.tiers.record import Record
from zero_fn.tiers.side_stream import SideStream, side_stream
from zero_fn.transport.line import Line
from zero_fn.transport.links import gather_hops
from zero_fn.transport.segment import Segment
from zero_fn.values.wire import Wire

__all__ = ["Arrivals", "Move", "moves_of"]

Arrivals = dict[SideStream, torch.Event]
"""Copies from the host to devices that are under way: of each stream the end of the last one."""

_CLOSE_NUMEL = 64  # as much may be between neighbours: padding, or pieces that an all-gather brings


@dataclass(slots=True)
class Move:
    """Legs of the groups of a unit that are made together."""

    what: str  # for errors
    is_kept: bool = False  # what it brings stays until the next step
    fill: list[Callable[[Arrivals], None]] = field(default_factory=list)
    encode: list[Callable[[], None]] = field(default_factory=list)
    sends: list[tuple[Line, Any]] = field(default_factory=list)  # each with its plan
    decode: list[Callable[[], None]] = field(default_factory=list)


def moves_of(
    wholes: Mapping[Group, Room], extended: Sequence[Segment], line: Line, unit: str
) -> tuple[list[Move], list[Move]]:
    """The moves of a unit from rest to its whole buffers: until all ranks hold the same of what
    travels as differences, and after that.

    Args:
        wholes: Where the whole parameters of each group lie.
        extended: What tensor subclasses send (fsdp_extensions.py).
        line: The axes that the unit is sharded over.
        unit: Its name, for errors.
    """
    rooms = {group: rooms_of(group, whole) for group, whole in wholes.items()}
    wires = {group: WireGather(group, rooms[group]) for group in wholes if group.kind.gather}
    both: list[list[Move]] = []
    for in_full in (True, False):
        kept, used = _Way(in_full=in_full), _Way(in_full=in_full)
        used.segments += extended
        for group in wholes:
            for way, is_kept in ((kept, True), (used, False)):
                legs = [leg for leg in group.kind.up if leg.is_kept is is_kept]
                way.add(legs, group, rooms[group], wires.get(group))
        moves = kept.moves(line, f"inner parameters of {unit}", is_kept=True)
        both.append([*moves, *used.moves(line, f"parameters of {unit}", is_kept=False)])
        if not any(wire.is_difference for wire in wires.values()):
            return both[0], both[0]
    return both[0], both[1]


class _Way:
    """The legs of all groups up to what is kept, or from there."""

    def __init__(self, *, in_full: bool) -> None:
        self._in_full = in_full  # differences do not travel: ranks do not hold the same yet
        self.segments: list[Segment] = []
        self._places: list[Tensor] = []
        self._sources: list[Tensor] = []
        self._fill: list[Callable[[Arrivals], None]] = []
        self._encode: list[Callable[[], None]] = []
        self._decode: list[Callable[[], None]] = []

    def add(
        self, legs: Sequence[Leg], group: Group, rooms: Mapping[Spot, Room], wire: WireGather | None
    ) -> None:
        """Adds the legs of a group. All its hops are planned together, from what the last of them
        completes."""
        is_coded = any(leg.target is Spot.CODES for leg in legs)
        is_full = self._in_full and is_coded and wire is not None and wire.is_difference
        hops = [leg for leg in legs if leg.hop is not None]
        for leg in legs:
            if leg.hop is not None:
                continue
            if leg.source is Spot.TIER and group.landed() is None:
                self._fill.append(Fetch(group, rooms[Spot.WHOLE]))
            if wire is not None and isinstance(leg.form, Wire):
                self._encode.append(wire.fill_own if is_full else wire.encode)
            elif wire is not None and leg.source is Spot.CODES:
                self._decode += [] if is_full else [wire.decode]
            elif leg.source is not Spot.TIER:
                place = Room.inner if leg.source is Spot.INNER else Room.own
                self._places += [place(rooms[leg.target], slot) for slot in group.slots]
                self._sources += _sources(leg.source, group, rooms)
        if not hops:
            return
        source, target = hops[-1].source, hops[-1].target
        if is_full:  # as they are, to where differences will be added
            source = target = Spot.WHOLE if group.inner is None else Spot.INNER
        elif wire is not None and (source, target) == (Spot.INNER, Spot.CODES):
            self._encode.append(wire.allocate)
        sources = [None] * len(group.slots) if source is target else _sources(source, group, rooms)
        self.segments += rooms[target].segments(group.slots, sources)

    def moves(self, line: Line, what: str, *, is_kept: bool) -> list[Move]:
        """The moves, one for each hop, the last axis first; one at least if nothing is kept."""
        with torch.inference_mode(False):  # a message's memory outlives the forward
            moves = [Move(what, is_kept, sends=sends) for sends in gather_hops(line, self.segments)]
        if not moves and not is_kept:
            moves = [Move(what)]
        if moves:
            moves[0].fill = [self._copy, *self._fill] if self._places else self._fill
            moves[0].encode = self._encode
            moves[-1].decode = self._decode
        return moves

    def _copy(self, _: Arrivals) -> None:
        torch._foreach_copy_(self._places, self._sources)


def _sources(spot: Spot, group: Group, rooms: Mapping[Spot, Room]) -> list[Tensor]:
    """What this rank has of each parameter at a spot, flat."""
    return [rooms[spot].whole(slot) if spot is Spot.INNER else slot.flat for slot in group.slots]


class Fetch:
    """This rank's own parts of a group, copied from where they have arrived from another tier.

    Parts that could not be read are left out: all ranks are told.
    """

    def __init__(self, group: Group, whole: Room) -> None:
        assert group.record is not None
        self._record = group.record
        records = [each for each in (group.record, group.record.copies) if each is not None]
        self._runs = {each: list(_runs(group, whole, each)) for each in records}

    def __call__(self, arrivals: Arrivals) -> None:
        read = self._record.read
        if read is self._record.codes or read.fetched is None:  # `WireGather` takes codes
            return
        places = [place for place, _, _ in self._runs[read]]
        values = [read.values(first, last) for _, first, last in self._runs[read]]
        if places[0].device.type == "cpu":
            torch._foreach_copy_(places, values)
        else:
            stream = side_stream(places[0].device)
            arrivals[stream] = read.leaving = stream.copy_all(places, values)


def _runs(group: Group, whole: Room, record: Record) -> Iterator[tuple[Tensor, int, int]]:
    """This rank's own parts of a buffer, as few as may be copied each as one: memory of the buffer,
    and the numbers of the first and the last tensor of the record that come there. They lie in both
    at the same distances, close together."""
    runs: list[tuple[int, int, int, int]] = []  # elements of the buffer, first and last tensor
    shift = None
    itemsize, dtype = whole.memory.itemsize, whole.memory.dtype
    for number, slot in enumerate(group.slots):
        start, before = whole.starts[slot] + slot.path.start, shift
        shift = start * itemsize - record.starts[number]
        is_close = bool(runs) and start - runs[-1][1] < _CLOSE_NUMEL
        joins = shift == before and record.forms[number].dtype == dtype and is_close
        begin, _, first, _ = runs.pop() if joins else (start, 0, number, number)
        runs.append((begin, start + slot.path.local_numel, first, number))
    for begin, end, first, last in runs:
        yield whole.memory.as_strided((end - begin,), (1,), begin), first, last
