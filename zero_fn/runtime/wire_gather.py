"""Parameters that travel in a format: of a group, what this rank codes, and what it decodes.

    own part at rest  ->  codes of its rows  == all-gather ==>  codes of all rows  ->  whole

All ranks compute with what the codes say, the owner too. So what a forward sees does not depend on
who owns what. Coded is what would have travelled: resting values in the compute dtype, wherever
they rest.

[Note: what the others hold] In a format of differences the owner codes its part less what all ranks
hold of it, and all ranks add what the codes say. What coding has rounded away is part of the next
difference. The copies that are held are those that ranks keep anyway: whole parameters, or over two
axes the part on the first axis (hpZ). Until ranks hold the same, they get all in full: at first,
after loading and saving, and after an interrupt.

[Note: a part in codes] Over two axes a part on the first axis that is kept (hpZ) is kept as codes,
unless the format is one of differences. The first axis gathers them as they are.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from zero_fn.errors import LayoutError
from zero_fn.kernels.wire_codes import decode, encode
from zero_fn.runtime.group import Group
from zero_fn.runtime.leg import Spot
from zero_fn.runtime.rooms import Room
from zero_fn.runtime.slot import Slot
from zero_fn.tiers.record import Record
from zero_fn.tiers.side_stream import side_stream
from zero_fn.values.wire import Records

__all__ = ["WireGather", "require_held"]


class WireGather:
    """The codes of the parameters of a group."""

    def __init__(self, group: Group, rooms: Mapping[Spot, Room]) -> None:
        """Cuts codes and values into rows. Raises what `require_held` raises."""
        require_held(group)
        kind = group.kind
        assert kind.gather is not None
        self.is_difference = kind.gather.is_difference
        self._group = group
        self._storage = rooms[Spot.CODES].memory.untyped_storage()
        self._nbytes = self._storage.nbytes()
        self._landed: list[Tensor] = []  # all codes, where they were read from a disk and none come
        # Of each parameter the rows that this rank codes, the codes of these, and how.
        self._own: list[tuple[Slot, Tensor, Tensor, Records]] = []
        # All codes, and the rows that they are decoded into.
        self._all: list[tuple[Tensor, Tensor, Records]] = []
        self._numbers: list[int] = []  # of these parameters in records of a tier
        decoded = next(
            rooms[leg.target] for leg in kind.up if leg.source is Spot.CODES and leg.hop is None
        )
        # [Note: a part in codes]
        self._keeps_codes = Spot.INNER in rooms and rooms[Spot.INNER].coded is not None
        coded = rooms[Spot.INNER if self._keeps_codes else Spot.CODES]
        for number, slot in enumerate(group.slots):
            if slot.path.numel:
                records = kind.records_of(slot.path)
                values, codes = (-1, records.row_numel), (-1, records.row_nbytes)
                own = decoded.own(slot).view(values), coded.own(slot).view(codes)
                both = rooms[Spot.CODES].whole(slot).view(codes), decoded.whole(slot).view(values)
                self._own.append((slot, *own, records))
                self._all.append((*both, records))
                self._numbers.append(number)

    def fill_own(self) -> None:
        """Writes this rank's part in full to where it is held. [Note: what the others hold]"""
        self._storage.resize_(0)
        for slot, own, _, _ in self._own:
            own.copy_(slot.flat.view(own.shape))

    def encode(self) -> None:
        """Codes this rank's part, or takes its codes from the tier."""
        record = self._group.record
        if record is not None and record.codes is not None and record.read is record.codes:
            self._take(record.codes)
            return
        if not self._keeps_codes:
            self.allocate()
        if record is not None and record.read.fetched is None:
            return  # a disk has failed, and all ranks are told
        for slot, own, codes, records in self._own:
            if record is not None:  # its values are there
                encode(own, records, codes)
            else:
                values = slot.flat.to(own.dtype).view(own.shape)
                encode(values, records, codes, held=own if self.is_difference else None)
        if record is not None and record.codes is not None:
            codes_of = [codes.view(-1) for _, _, codes, _ in self._own]
            record.write_codes(dict(zip(self._numbers, codes_of, strict=True)))

    def _take(self, codes: Record) -> None:
        """Takes what this rank sends from where it was read to; a copy, unless that memory is its
        own. [Note: codes at rest] (compute_copies.py)"""
        values = [codes.values(number) for number in self._numbers]
        places = [own for _, _, own, _ in self._own]
        if codes.landing is not None:  # else a staging buffer, which the next fetch takes
            self._landed = [each.view(own.shape) for each, own in zip(values, places, strict=True)]
            return
        self.allocate()
        places = [own.view(-1) for own in places]
        if places[0].device.type == "cpu":
            torch._foreach_copy_(places, values)
            return
        stream = side_stream(places[0].device)
        codes.leaving = stream.copy_all(places, values)
        stream.wait_for(codes.leaving)

    def decode(self) -> None:
        """Makes values of all codes, or adds differences to those that are held."""
        landed, self._landed = self._landed, []
        all_codes = landed or [codes for codes, *_ in self._all]
        for codes, (_, values, records) in zip(all_codes, self._all, strict=True):
            decode(codes, records, values, add=self.is_difference)
        self._storage.resize_(0)

    def allocate(self) -> None:
        """Gives the codes memory, until they are decoded."""
        self._storage.resize_(self._nbytes)


def require_held(group: Group) -> None:
    """Requires a copy to which differences can be added.

    Raises:
        LayoutError: Differences were asked for, and no rank keeps any.
    """
    kind = group.kind
    if (
        kind.gather is not None
        and kind.gather.is_difference
        and not (kind.is_kept or kind.inner is not None)
    ):
        raise LayoutError(
            "No rank keeps the parameters to which differences could be added.",
            parameter=group.slots[0],
            gather=kind.gather,
            why="they are freed after each use, or rest in another tier",
            fix="gather=zf.wire.int8(); or shard_grads in place of shard_params; or over two axes "
            "shard_params inside a node and shard_grads between nodes; in memory of the device",
        )
