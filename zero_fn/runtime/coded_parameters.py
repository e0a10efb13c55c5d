"""Parameters that travel in a format: of a group, what this rank sends of them, and what it makes of what has come.

    own part at rest  ->  records of its rows  -- all-gather -->  records of all rows  ->  whole, in the compute dtype

All ranks compute with what the records say, the owner too. So what a forward sees does not depend on who owns what. Coded is
what would have travelled: resting values in the compute dtype, wherever they rest.

[Note: what the others hold] In a format of differences the owner codes its part less what all ranks hold of it, and all
ranks add what the codes say. What coding has rounded away is part of the next difference. The copies that are held are those
that ranks keep anyway: whole parameters, or over two axes the part on the first axis (hpZ). Until ranks hold the same, they
get all in full: at first, after loading and saving, and after an interrupt.

[Note: a part in records] Over two axes a part on the first axis that is kept (hpZ) is kept as records, unless the format is
one of differences. The first axis gathers them as they are.
"""

from __future__ import annotations

import torch
from torch import Tensor

from zero_fn.errors import LayoutError
from zero_fn.kernels.wire_codes import decode, encode
from zero_fn.runtime.group import Group
from zero_fn.runtime.slot import Slot
from zero_fn.tiers.record import Record
from zero_fn.tiers.side_stream import side_stream
from zero_fn.transport.segment import Route, Segment
from zero_fn.values.layout import aligned_offsets
from zero_fn.values.wire import Records

__all__ = ["CodedParameters", "require_held"]


class CodedParameters:
    """The parameters of a group that travel in a format, beside the buffer in which they are whole.

    A gather goes by `begin`, the all-gather of `segments`, and `end`; where a part on the first axis is kept, that of
    `inner_segments` is before it, once a step, between `begin_inner` and `end_inner`. Two lists of each: those that travel
    until all ranks hold the same, and those after it.
    """

    def __init__(self, group: Group, buffer: Tensor) -> None:
        """Cuts the buffer, and the records. Raises what `require_held` raises."""
        require_held(group)
        kind, self._group = group.kind, group
        assert kind.gather is not None
        self.is_difference, self._keeps_records = kind.gather.is_difference, kind.keeps_records
        self.is_of_inner = kind.adds_to_inner  # what it makes is the part on the first axis
        self.segments: tuple[list[Segment], list[Segment]] = ([], [])
        self.inner_segments: tuple[list[Segment], list[Segment]] = ([], [])
        # Of each parameter what this rank codes, or holds, and its records; all records, and what they are decoded into.
        self._sent: list[tuple[Slot, Tensor, Tensor, Records]] = []
        self._got: list[tuple[Tensor, Tensor, Records]] = []
        self._numbers = [number for number, slot in enumerate(group.slots) if slot.path.numel]  # of these in records
        self._landed: list[Tensor] = []  # all records, where they were read from a disk and nothing comes from others
        *starts, self._nbytes = aligned_offsets([kind.records_nbytes(slot.path) for slot in group.slots], 1)
        self._memory = torch.empty(self._nbytes, dtype=torch.uint8, device=buffer.device)
        for slot, start in zip(group.slots, starts, strict=True):
            if slot.path.numel:
                self._cut(slot, buffer, start, kind.records_of(slot.path))

    def _cut(self, slot: Slot, buffer: Tensor, start: int, records: Records) -> None:
        path, group, memory = slot.path, self._group, self._memory
        assert group.whole is not None
        values, begin, numel, own, route = buffer, group.whole.starts[slot], path.numel, path.start, path.route
        if self.is_of_inner:
            assert group.inner is not None and group.inner.memory is not None
            values, begin = group.inner.memory, group.inner.starts[slot]
            numel, own, route = path.inner_numel, path.inner_start, path.route[1:]
        self._got.append((_records(memory, start, numel, records), _rows(values, begin, numel, records), records))
        coded, coded_start, source = memory, start + records.nbytes_of(own), None
        if self._keeps_records:  # [Note: a part in records]
            assert group.inner is not None and group.inner.memory is not None
            coded, inner_start = group.inner.memory, group.inner.starts[slot]
            coded_start = inner_start + records.nbytes_of(path.inner_start)
            for segments in self.inner_segments:
                segments.append(_segment(coded, inner_start, path.inner_numel, path.route[1:], records))
            source, route = coded.narrow(0, inner_start, records.nbytes_of(path.inner_numel)), path.route[:1]
        own_coded = _records(coded, coded_start, path.local_numel, records)
        self._sent.append((slot, _rows(values, begin + own, path.local_numel, records), own_coded, records))
        if path.layout is not None:
            in_full, later = self.inner_segments if self.is_of_inner else self.segments
            segment = _segment(memory, start, numel, route, records, source)
            later.append(segment)
            in_full.append(_full(values, begin, numel, route) if self.is_difference else segment)

    def begin_inner(self, *, is_held: bool) -> None:
        """Codes this rank's part of the part on the first axis, or writes it there in full."""
        if self.is_of_inner:
            self._begin(is_held=is_held)
        elif self._keeps_records:
            self._encode()

    def end_inner(self, *, is_held: bool) -> None:
        """Adds the differences that have come to the part on the first axis."""
        if self.is_of_inner and is_held:
            self._decode()

    def begin(self, *, is_held: bool) -> None:
        """Codes this rank's part, or writes it where it is held, in full."""
        if self._keeps_records:
            self._allocate()
        elif not self.is_of_inner:
            self._begin(is_held=is_held)

    def end(self, *, is_held: bool) -> None:
        """Makes whole parameters of the records that have come."""
        if not self.is_of_inner and (is_held or not self.is_difference):
            self._decode()

    def _begin(self, *, is_held: bool) -> None:
        if self.is_difference and not is_held:
            self._free()
            for slot, own, _, _ in self._sent:
                own.copy_(slot.flat.view(own.shape))
        elif (record := self._group.record) is not None and record.codes is not None and record.read is record.codes:
            self._take(record.codes)
        else:
            self._allocate()
            if record is None or record.read.fetched is not None:  # else a disk has failed, and all ranks are told
                self._encode()

    def _encode(self) -> None:
        record = self._group.record
        for slot, own, coded, records in self._sent:
            if record is not None:  # its values are there
                encode(own, records, coded)
            else:
                values = slot.flat.to(own.dtype).view(own.shape)
                encode(values, records, coded, held=own if self.is_difference else None)
        if record is not None and record.codes is not None:
            record.write_codes(
                {n: coded.view(-1) for n, (_, _, coded, _) in zip(self._numbers, self._sent, strict=True)}
            )

    def _take(self, codes: Record) -> None:
        """Takes what this rank sends from where it was read to; a copy, unless that memory is its own. [Note: codes at rest]
        (compute_copies.py)"""
        values = [codes.values(number) for number in self._numbers]
        if codes.landing is not None:  # else it lies in a staging buffer, which the next fetch takes
            self._landed = [each.view(coded.shape) for each, (_, _, coded, _) in zip(values, self._sent, strict=True)]
            return
        self._allocate()
        places = [coded.view(-1) for _, _, coded, _ in self._sent]
        if places[0].device.type == "cpu":
            torch._foreach_copy_(places, values)
            return
        stream = side_stream(places[0].device)
        codes.leaving = stream.copy_all(places, values)
        stream.wait_for(codes.leaving)

    def _decode(self) -> None:
        landed, self._landed = self._landed, []
        for coded, (_, values, records) in zip(landed or [coded for coded, *_ in self._got], self._got, strict=True):
            decode(coded, records, values, add=self.is_difference)
        self._free()

    def _allocate(self) -> None:
        self._memory.untyped_storage().resize_(self._nbytes)

    def _free(self) -> None:
        self._memory.untyped_storage().resize_(0)


def require_held(group: Group) -> None:
    """Requires a copy to which differences can be added.

    Raises:
        LayoutError: Differences were asked for, and no rank keeps any.
    """
    kind = group.kind
    if kind.gather is not None and kind.gather.is_difference and not (kind.is_kept or kind.keeps_inner):
        raise LayoutError(
            "No rank keeps the parameters to which differences could be added.",
            parameter=group.slots[0],
            gather=kind.gather,
            why="they are freed after each use, or rest in another tier",
            fix="gather=zf.int8(); or shard_grads in place of shard_params; or over two axes shard_params inside a node "
            "and shard_grads between nodes; in memory of the device",
        )


def _rows(memory: Tensor, start: int, numel: int, records: Records) -> Tensor:
    """The rows of so many elements, which begin at an element of the memory."""
    return memory.as_strided((numel // records.row_numel, records.row_numel), (records.row_numel, 1), start)


def _records(memory: Tensor, start: int, numel: int, records: Records) -> Tensor:
    """The records of the rows of so many elements, which begin at a byte of the memory."""
    return memory.as_strided((numel // records.row_numel, records.row_nbytes), (records.row_nbytes, 1), start)


def _full(memory: Tensor, start: int, numel: int, route: Route) -> Segment:
    return Segment(memory, numel, route[0][1] or 0, route, start=start)


def _segment(
    memory: Tensor, start: int, numel: int, route: Route, records: Records, source: Tensor | None = None
) -> Segment:
    """The records of so many elements, for an all-gather. The axes cut them as they cut the elements."""
    in_bytes = [(axis, None if piece is None else records.nbytes_of(piece)) for axis, piece in route]
    piece_nbytes = in_bytes[0][1]
    assert piece_nbytes is not None, "no axis cuts it"
    return Segment(memory, records.nbytes_of(numel), piece_nbytes, in_bytes, start=start, source=source)
