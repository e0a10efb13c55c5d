"""The memory of gathered parameters: one buffer per compute dtype of a unit, and the views that are cut from it.

[Note: memory that comes and goes] Cutting the buffers of a unit into parameters and into the pieces that travel costs the
host more than an all-gather of small parameters. So it is done once: when a unit is resharded its buffers lose their memory,
not their views, and the next gather gives them memory again (`UntypedStorage.resize_`, as FSDP does). That is sound
only if nobody else holds a view, who would be left without memory. The views here are never handed out, tensors on the same
storage are, and torch counts the references to a storage: if there are more than those of the views cut here, the unit drops
the buffers as they are, and whoever holds a part of them keeps an ordinary tensor. On CUDA memory is freed in the order of
the stream, as when a tensor dies.

[Note: tensors that are lent] For activation checkpoints inside a unit, modules see gathered parameters in every backward, on
an autograd node of their own. These tensors are made once, too, and kept from step to step, unless somebody holds or has
changed one of them.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from operator import attrgetter
from sys import getrefcount
from typing import Any

import torch
from torch import Tensor

from zero_fn.runtime.coded_parameters import CodedParameters
from zero_fn.runtime.extended import Travelling
from zero_fn.runtime.group import Group
from zero_fn.runtime.kind import Rests
from zero_fn.runtime.landing import landed, memory_for_whole, starts_of
from zero_fn.runtime.saved import remember_buffer
from zero_fn.runtime.slot import Slot
from zero_fn.tiers.compute_copies import ParameterRecord
from zero_fn.tiers.record import Record
from zero_fn.tiers.side_stream import SideStream, side_stream
from zero_fn.transport.line import Line
from zero_fn.transport.segment import Segment

__all__ = ["Gathered", "Lent"]

_Run = tuple[Tensor, int, int]
_CLOSE_NUMEL = 64  # as much may be between neighbours: padding, or pieces that the all-gather brings
_references = torch._C._storage_Use_Count
_use_count: Callable[[Tensor], int] = torch._C.TensorBase._use_count  # type: ignore[attr-defined]
_version, _hooks = attrgetter("_version"), attrgetter("_backward_hooks")


class Lent:
    """Gathered parameters with an autograd history, kept from one backward to the next. [Note: tensors that are lent]"""

    __slots__ = ("_state", "is_shown", "tensors", "trained", "use")

    def __init__(self, tensors: list[Tensor], trained: list[bool], use: Any) -> None:
        self.tensors, self.trained = tensors, trained  # one of each for each slot
        self.use = use  # that of their autograd node. It must not hold the unit, which holds this
        self._state = self._state_now()
        self.is_shown = False  # whether modules have seen the tensors since `is_untouched` last returned True

    def is_untouched(self) -> bool:
        """Whether nobody else holds one of the tensors, and nobody has changed one. To be asked while no module sees them."""
        if self.is_shown and self._state_now() == self._state:
            self.is_shown = False
        return not self.is_shown

    def _state_now(self) -> tuple[list[int], list[int], list[int], list[object]]:
        # A tensor may be held from Python, or from C++ alone, by the graph that a recomputation made.
        tensors = self.tensors
        return (
            [*map(getrefcount, tensors)],
            [*map(_use_count, tensors)],
            [*map(_version, tensors)],
            [*map(_hooks, tensors)],
        )


class Gathered:
    """The gathered parameters of a unit. [Note: memory that comes and goes]"""

    def __init__(self, unit: object, slots: Sequence[Slot], groups: Sequence[Group], line: Line) -> None:
        """Allocates the buffers that have memory during a use only, and cuts all buffers. `unit` gathers them again."""
        self.buffers: list[Tensor] = []  # one for each group
        # Parameters, by slot number, whose tensor subclass decides which bytes are sent (`fsdp_pre_all_gather`).
        self.travelling = {i: Travelling(slot) for i, slot in enumerate(slots) if slot.kind.travels}
        # The stream on which this rank's own parts arrive from the host, if they do and nothing has waited for it yet.
        self.beside: torch.Stream | None = None
        self.lent: Lent | None = None  # tensors that the next backward may show again, if there are any
        self._unit = weakref.ref(unit)  # which owns this
        self._copied: tuple[list[Tensor], list[Tensor]] = ([], [])
        self._away: list[tuple[ParameterRecord, dict[Record, list[_Run]]]] = []
        self._arriving: dict[SideStream, torch.Event] = {}  # the last copy from the host to each device
        self.coded: list[CodedParameters] = []  # groups whose parameters travel in a format
        segments: list[Segment] = []
        views: dict[Slot, Tensor] = {}
        transient: list[tuple[Tensor, int]] = []  # buffers, and how many parameters each has
        with torch.inference_mode(False):  # the buffers outlive the forward that asks for them
            for group in groups:
                if group.whole is None or group.kind.travels:
                    continue
                arrived, starts = landed(group), starts_of(group)
                buffer = arrived if arrived is not None else group.whole.memory
                if buffer is None:
                    buffer = memory_for_whole(group)
                if group.is_transient:
                    remember_buffer(buffer, self, unit, len(self.buffers))
                    transient.append((buffer, len(group.slots)))
                self.buffers.append(buffer)
                if (own := group.record) is not None and group.inner is None and arrived is None:
                    records = [record for record in (own, own.copies) if record is not None]
                    self._away.append((own, {each: _runs(group, buffer, starts, each) for each in records}))
                coded = CodedParameters(group, buffer) if group.kind.gather is not None else None
                if coded is not None:
                    self.coded.append(coded)
                for slot in group.slots:
                    start = starts[slot]
                    views[slot] = buffer.as_strided(slot.path.shape, slot.path.stride, start)
                    if coded is not None and not coded.is_of_inner:
                        continue
                    if group.kind.is_cut:
                        segments.append(_segment(group, slot, buffer, start))
                    self._cut_own(group, slot, buffer, start)
            self._views = [views.get(slot, slot.local) for slot in slots]
            for travelling in self.travelling.values():
                segments += travelling.segments
        # How the all-gathers fill parts of the buffers; None if there is nothing to gather. The second of two plans is for
        # when all ranks hold the same. [Note: what the others hold] (coded_parameters.py)
        self.plans = _plans(line, segments, [coded.segments for coded in self.coded])
        self._inner: tuple[list[Tensor], list[Tensor]] = ([], [])
        inner = self._inner_segments(groups)
        self.inner_plans = _plans(line, inner, [coded.inner_segments for coded in self.coded])
        # Storages that lose their memory between uses, each with its bytes, and the numbers of references to it from here and
        # from tensors that are lent.
        self._freed: list[tuple[torch.UntypedStorage, int, int, int]] | None = None
        # Not those of simulated tensors, memory that torch's allocator did not give, and what a subclass allocates.
        if all(type(b) is Tensor and b.untyped_storage().resizable() for b, _ in transient) and not self.travelling:
            storages = [(buffer.untyped_storage(), lent) for buffer, lent in transient]
            self._freed = [(each, each.nbytes(), _references(each._cdata), lent) for each, lent in storages]
        for travelling in self.travelling.values():
            self._add(travelling.outputs)

    def _inner_segments(self, groups: Sequence[Group]) -> list[Segment]:
        """How the all-gather over the second axis fills parts on the first axis that are kept."""
        segments: list[Segment] = []
        for group in groups:
            for slot in group.slots if group.inner is not None and group.kind.gather is None else ():
                path = slot.path
                assert group.inner is not None and path.sublayout is not None
                own = group.inner.range(slot, path.inner_start, path.local_numel)
                if own.data_ptr() != slot.flat.data_ptr():
                    self._inner[0].append(own)
                    self._inner[1].append(slot.flat)
                segments.append(path.inner_segment(group.inner.range(slot, 0, path.sublayout.padded_numel)))
        return segments

    def fill_inner(self) -> None:
        """Copies this rank's own parts into the kept parts on the first axis."""
        if self._inner[0]:
            torch._foreach_copy_(*self._inner)

    def _cut_own(self, group: Group, slot: Slot, buffer: Tensor, start: int) -> None:
        """Notes that this rank's own part must be copied, if it rests elsewhere and the all-gather does not copy it."""
        path = slot.path
        if group.inner is not None:
            assert path.layout is not None
            inner_start = start + path.rank * path.layout.shard_numel
            self._copied[0].append(buffer.narrow(0, inner_start, path.inner_numel))
            self._copied[1].append(group.inner.range(slot, 0, path.inner_numel))
            return
        if group.record is None and group.kind.rests is not Rests.IN_WHOLE and not group.kind.is_gathered_from_rest:
            self._copied[0].append(buffer.as_strided((path.local_numel,), (1,), start + path.start))
            self._copied[1].append(slot.flat)

    def fill_own(self) -> None:
        """Copies this rank's own parts into the buffers, but those in another tier that could not be read."""
        if self._copied[0]:
            torch._foreach_copy_(*self._copied)
        for record, runs in self._away:
            read = record.read
            if read is record.codes or read.fetched is None:  # `coded_parameters.py` takes codes
                continue
            places = [place for place, _, _ in runs[read]]
            values = [read.values(first, last) for _, first, last in runs[read]]
            if places[0].device.type == "cpu":
                torch._foreach_copy_(places, values)
            else:
                stream = side_stream(places[0].device)
                self._arriving[stream] = read.leaving = stream.copy_all(places, values)
                self.beside = stream.there

    def note_beside(self) -> None:
        """What was coded on the stream of copies from the host is waited for with them."""
        if self.beside is not None:
            self._arriving = {stream: self.beside.record_event() for stream in self._arriving}

    def wait_for_own(self) -> None:
        """Makes the device wait for copies from the host that are under way."""
        self.beside = None
        while self._arriving:
            stream, end = self._arriving.popitem()
            stream.wait_for(end)

    def make_products(self) -> None:
        """After the all-gather: tensor subclasses make what modules see from the bytes that arrived. (extended.py)"""
        for i, travelling in self.travelling.items():
            self._views[i], made = travelling.arrived()
            self._add(made)

    def _add(self, made: Sequence[Tensor]) -> None:
        """Treats memory that a tensor subclass allocated as buffers of the unit, so that autograd does not keep it."""
        unit = self._unit()
        assert unit is not None, "a unit that is gone has gathered"
        for buffer in made:
            remember_buffer(buffer, self, unit, len(self.buffers))
            self.buffers.append(buffer)

    def tensors(self) -> list[Tensor]:
        """The whole parameters, one for each slot of the unit: new tensors on the buffers."""
        if self.travelling:
            return [Travelling.shown(v) if i in self.travelling else v.data for i, v in enumerate(self._views)]
        return [view.data for view in self._views]

    def free(self) -> bool:
        """Takes the memory from the buffers, until `renew`.

        Returns:
            False if somebody else holds a part of them, who keeps it: the caller then drops this object.
        """
        if self._freed is None:
            return False
        if self.lent is not None and not self.lent.is_untouched():
            self.lent = None
        lends = self.lent is not None
        for storage, _, references, lent in self._freed:
            if _references(storage._cdata) != references + lends * lent or not storage.resizable():
                return False  # storages that numpy has seen are not resizable: an array must not lose its memory
        for storage, *_ in self._freed:
            storage.resize_(0)
        return True

    @property
    def lends(self) -> bool:
        """Whether tensors on the buffers may be kept from step to step."""
        return self._freed is not None

    def renew(self) -> None:
        """Gives the buffers memory again."""
        assert self._freed is not None, "buffers that cannot be freed were kept"
        for storage, nbytes, *_ in self._freed:
            storage.resize_(nbytes)


def _runs(group: Group, buffer: Tensor, starts: Mapping[Slot, int], record: Record) -> list[_Run]:
    """This rank's own parts of a buffer, as few as may be copied each as one: memory of the buffer, and the numbers of the
    first and the last tensor of the record that come there. They lie in both at the same distances, close together."""
    runs: list[tuple[int, int, int, int]] = []  # elements of the buffer, first and last tensor
    shift = None
    for number, slot in enumerate(group.slots):
        start, before = starts[slot] + slot.path.start, shift
        shift = start * buffer.itemsize - record.starts[number]
        joins = shift == before and record.forms[number].dtype == buffer.dtype and start - runs[-1][1] < _CLOSE_NUMEL
        begin, _, first, _ = runs.pop() if joins else (start, 0, number, number)
        runs.append((begin, start + slot.path.local_numel, first, number))
    return [(buffer.as_strided((end - begin,), (1,), begin), first, last) for begin, end, first, last in runs]


def _plans(
    line: Line, segments: list[Segment], coded: Sequence[tuple[list[Segment], list[Segment]]]
) -> tuple[Any, Any]:
    """The plans of all-gathers of some segments beside those of groups that travel in a format."""
    both = [[*segments, *(each for pair in coded for each in pair[at])] for at in (False, True)]
    with torch.inference_mode(False):  # a message's memory outlives the forward, too
        plan = line.gather_plan(both[0]) if both[0] else None
        return plan, plan if both[0] == both[1] else line.gather_plan(both[1])


def _segment(group: Group, slot: Slot, buffer: Tensor, start: int) -> Segment:
    """The place of a whole parameter in its buffer, for the all-gather."""
    path = slot.path
    route = path.route if group.inner is None else path.route[:1]  # the hop before is made already
    source = slot.flat if group.kind.is_gathered_from_rest else None
    return Segment(buffer, path.numel, path.piece_numel, route, start=start, source=source)
