"""Gradients of a unit: local sums, their reduction over ranks,
and the resting gradients they become.

    local        what autograd gave on this rank, summed over uses (and over
                 backwards while accumulating)
    reduced      the mean over ranks of this rank's piece, summed in the order of the ranks
    at rest      `.grad` of the resting parameter: a DTensor with the placement of the parameter

While `accumulate` sums, a marker stands as `.grad`. [Note: a pending gradient is part of .grad]

A parameter without a gradient on this rank contributes zeros, because other ranks may have a
gradient of it. Its `.grad` stays None only if no rank has one, as in a replica.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from operator import and_, or_

import torch
from torch import Tensor

from zero_fn.errors import PlacementError, StorageError
from zero_fn.runtime.gradient_hooks import gradient_hooks, parameter_hooks
from zero_fn.runtime.group import Group, dense_offsets
from zero_fn.runtime.pending_gradient import PendingGradient
from zero_fn.runtime.slot import Slot, trained
from zero_fn.runtime.sums import Sums, reduced
from zero_fn.runtime.wire_reduce import CodedGradient
from zero_fn.storage.pool import BufferPool
from zero_fn.tiers.offloaded_state import OffloadedState
from zero_fn.tiers.tier_tensor import TierTensor
from zero_fn.transport.line import Line, Work
from zero_fn.transport.trip import Trip
from zero_fn.values.dtensors import (
    as_plain,
    goes_through_dlpack,
    local_of,
    on_spec,
    rest_gradient,
    rested,
)

__all__ = ["GradientMemory", "Gradients", "Reduction", "settle_gradients"]


class Gradients:
    """Local gradient sums of one unit, in the order of its slots.

    Where the gradient rests in a whole buffer (ZeRO-1 and replicas), exact sums are made in that
    buffer: accumulating takes no memory beyond it.
    """

    def __init__(self, slots: Sequence[Slot], transport: Line, unit: str) -> None:
        self._slots = slots
        self._line = transport
        self._unit = unit
        self._memory: GradientMemory | None = None  # a change of `requires_grad` gives another
        # Whether gradients have come that lie as `_memory` says: it stays until they are taken.
        self._is_in_use = False
        self._taken: list[weakref.ref[torch.UntypedStorage]] = []  # buffers, of earlier memory too
        # The sum for each slot; None if it has no gradient yet.
        self.local: list[Tensor | None] = [None] * len(slots)
        self._is_owned = [False] * len(slots)
        self.is_empty = True  # no gradient is waiting
        # Markers by slot, in the form of the parameters as they rest now.
        self._markers: dict[int, PendingGradient] = {}
        # What stands as `.grad` of each slot while the sum is pending.
        self._marked: dict[int, PendingGradient] = {}

    def memory(self, present: Sequence[bool] = ()) -> GradientMemory:
        """The memory of the gradients of the parameters that are trained now, or `present`."""
        now = trained(self._slots)
        wanted = [*map(or_, now, present)] if present else now
        memory = self._memory
        if memory is None or memory.trained != wanted:
            memory = GradientMemory(self._slots, wanted, self._line, self._unit, self._taken)
        if not self._is_in_use:
            self._memory = memory
        return memory

    @property
    def are_wanted(self) -> bool:
        """Whether any parameter of the unit is trained."""
        return any(slot.parameter.requires_grad for slot in self._slots)

    def forget_layout(self) -> None:
        """Forgets the layout of gradients: parameters rest in other memory now."""
        self._memory = None
        self._is_in_use = False
        self._markers = {}

    def add(self, grads: Sequence[Tensor | None], *, exact: bool) -> None:
        """Adds the gradients of one use, which belong to autograd and may be shared:
        they are never written.

        `exact`: in the sum dtype from the first addend on, because several uses will come.

        Raises:
            PlacementError: A gradient is sparse.
        """
        for slot, grad in zip(self._slots, grads, strict=True):
            if grad is not None and grad.layout is not torch.strided:
                raise PlacementError(
                    "Sparse gradients cannot be reduced over an axis.",
                    parameter=slot,
                    unit=self._unit.removeprefix("unit "),
                    fix="compute it with sparse=False: F.embedding(tokens, weight)",
                )
        memory = self._memory = self.memory()
        self._is_in_use = True
        if self.is_empty and not exact and False not in memory.trained:
            self.local = list(grads)
            self._note_empty()
            return
        for i, (slot, grad) in enumerate(zip(self._slots, grads, strict=True)):
            # No gradient, or a parameter that was frozen since the forward:
            # autograd drops that, too.
            if grad is None or memory.places[i] is None:
                continue
            have = self.local[i]
            if have is not None and self._is_owned[i]:
                have.add_(grad)
            elif have is not None:
                self.local[i] = have.to(slot.kind.sum_dtype, copy=True).add_(grad)
                self._is_owned[i] = True
            elif exact:
                self.local[i] = self._room(i, slot, memory, grad.device).copy_(grad)
                self._is_owned[i] = True
            else:
                self.local[i] = grad
        self._note_empty()

    def _note_empty(self) -> None:
        self.is_empty = all(grad is None for grad in self.local)

    def add_pending(self, grads: Sequence[Tensor | None]) -> None:
        """Adds the gradients of one use to sums that stay on this rank when the backward ends.

        Markers stand as `.grad`.
        """
        self.forget_dropped()
        self.add(grads, exact=True)
        for i, slot in enumerate(self._slots):
            if self.local[i] is not None and i not in self._marked:
                marker = self._marker(i, slot)
                marker.earlier, slot.parameter.grad = slot.parameter.grad, marker
                self._marked[i] = marker

    def _marker(self, i: int, slot: Slot) -> PendingGradient:
        """The marker of a slot, made once for the memory that its parameter rests in."""
        marker = self._markers.get(i)
        if marker is None:
            marker = PendingGradient(slot, partial(_zero_sum, weakref.ref(self), i))
            self._markers[i] = marker
        return marker

    def forget_dropped(self) -> None:
        """Drops the sums whose marker the user removed: `zero_grad()`,
        or any other assignment to `.grad`."""
        for i, marker in list(self._marked.items()):
            if self._slots[i].parameter.grad is not marker:
                del self._marked[i]
                self.local[i], self._is_owned[i] = None, False
        self._note_empty()

    def unmark(self) -> None:
        """Puts the earlier gradients back in place of the markers.

        The sums stay, without those that the user dropped.
        """
        self.forget_dropped()
        for i, marker in self._marked.items():
            self._slots[i].parameter.grad, marker.earlier = marker.earlier, None
        self._marked = {}

    def has_pending(self) -> bool:
        """Whether this rank has local sums that the user did not drop."""
        self.forget_dropped()
        return not self.is_empty

    def take(self) -> list[Tensor | None]:
        """Hands over the local sums."""
        if self._marked:
            self.unmark()
        taken, self.local = self.local, [None] * len(self._slots)
        self._is_owned = [False] * len(self._slots)
        if self._memory is not None:
            self._memory.summed_in = None
        self.is_empty = True
        self._is_in_use = False
        return taken

    def reduce(self, *, exact: bool, present: Sequence[bool] = ()) -> Reduction:
        """Issues the reduction of the local sums, and lets go of them.

        `present`: whether any rank has a gradient, for each parameter; those that were frozen since
        count, too. `exact`: see `Reduction`.
        """
        memory = self._memory
        if memory is None or present or not self._is_in_use:
            memory = self.memory(present)
        buffers = memory.summed_in
        return Reduction(memory, self.take(), exact=exact, buffers=buffers)

    def _room(self, i: int, slot: Slot, memory: GradientMemory, device: torch.device) -> Tensor:
        place = memory.places[i]
        if (
            slot.path.keeps_whole_gradient
            and slot.kind.sum_dtype == slot.kind.gradient_dtype
            and slot.path.numel
            and place is not None
        ):
            if memory.summed_in is None:
                memory.summed_in = memory.allocate()
            return memory.summed_in[place.buffer].as_strided(
                slot.path.shape, slot.path.stride, place.offset
            )
        return torch.empty_strided(
            slot.path.shape, slot.path.stride, dtype=slot.kind.sum_dtype, device=device
        )


def _zero_sum(gradients: Callable[[], Gradients | None], i: int) -> None:
    held = gradients()
    local = held.local[i] if held is not None else None
    if local is not None:
        local.zero_()


class _GradientPlace:
    """Where the gradient of one slot lives in the gradient memory of its unit."""

    __slots__ = (
        "buffer",
        "dtypes",
        "is_quick",
        "number",
        "numel",
        "offset",
        "out",
        "resting",
        "slot",
    )

    def __init__(self, number: int, slot: Slot, buffer: int, offset: int) -> None:
        path = slot.path
        self.number = number  # of the slot
        self.slot = slot
        self.buffer = buffer  # its number
        self.offset = offset
        self.numel = path.gradient_room
        start, out_numel = 0, path.local_numel
        if path.layout is None:
            start, out_numel = path.segment(slot.flat).piece_bounds(path.rank)
        elif path.keeps_whole_gradient:
            start = path.start
        # The first element that the reduction of this rank's piece fills, and how many.
        self.out = offset + start, out_numel
        self.resting = (
            path.local_shape,
            path.local_stride,
            offset if path.layout is None else offset + start,
        )
        self.is_quick = goes_through_dlpack(slot.flat, path.local_shape)
        # Dtypes in which addends travel: those of sums that may round, and of exact ones.
        self.dtypes = slot.kind.compute_dtype, slot.kind.sum_dtype


class GradientMemory:
    """The gradient memory of the trained slots of a unit: one buffer per dtype,
    in which they lie as `dense_offsets` says."""

    def __init__(
        self,
        slots: Sequence[Slot],
        trained: Sequence[bool],
        line: Line,
        unit: str,
        taken: list[weakref.ref[torch.UntypedStorage]],
    ) -> None:
        self.trained = trained  # for each slot, whether it has a place here
        self.summed_in: list[Tensor] | None = None  # buffers in which the sums that wait are made
        self._line = line
        self._unit = unit
        # Sums of reductions that are not exact, and of those that are.
        self._sums: list[Sums | None] = [None, None]
        self._buffers: list[BufferPool] = []
        self._taken = taken  # buffers, weakly
        self.places: list[_GradientPlace | None] = [None] * len(slots)  # None of frozen ones
        by_dtype: dict[tuple[torch.dtype, torch.device], dict[Slot, int]] = {}
        for number, (slot, is_trained) in enumerate(zip(slots, trained, strict=True)):
            if is_trained:
                by_dtype.setdefault((slot.kind.gradient_dtype, slot.flat.device), {})[slot] = number
        for (dtype, device), members in by_dtype.items():
            numels = [slot.path.gradient_room for slot in members]
            offsets, total = dense_offsets(list(members), numels, dtype.itemsize)
            for slot, number in members.items():
                self.places[number] = _GradientPlace(
                    number, slot, len(self._buffers), offsets[slot]
                )
            self._buffers.append(BufferPool(total, dtype, device))
        self._placed = [place for place in self.places if place is not None]
        self._reduced = [
            at for at in self._placed if at.slot.path.numel and at.slot.kind.scatter is None
        ]
        self._coded = [
            at for at in self._placed if at.slot.path.numel and at.slot.kind.scatter is not None
        ]
        self.count = len(self._placed)
        # For each slot, whether its gradient is at rest after the reduction.
        self.at_once = [
            place is not None and place.slot.path.is_reduced_at_once for place in self.places
        ]

    def _rows(
        self, places: Sequence[_GradientPlace], local: Sequence[Tensor | None], *, exact: bool
    ) -> list[Tensor]:
        """What this rank contributes for each of these slots with elements, in order:
        zeros where it has no gradient."""
        rows: list[Tensor] = []
        for place in places:
            grad, dtype, path = local[place.number], place.dtypes[exact], place.slot.path
            if grad is None:
                grad = torch.zeros(path.shape, dtype=dtype, device=place.slot.flat.device)
            elif grad.dtype is not dtype:
                grad = grad.to(dtype)
            rows.append(grad if path.is_in_order else path.rows_of(grad))
        return rows

    def reduce(
        self, local: Sequence[Tensor | None], buffers: list[Tensor], *, exact: bool
    ) -> Work | Trip:
        """Begins the reduction of local gradients into these buffers. `exact`: see `Reduction`."""
        rows = self._rows(self._reduced, local, exact=exact)
        sums = self._sums[exact]
        if sums is None:  # made once
            contributions = []
            for place, own in zip(self._reduced, rows, strict=True):
                start, numel = place.out
                out = buffers[place.buffer].as_strided((numel,), (1,), start)
                contributions.append(
                    place.slot.path.contribution(own, out, place.slot.kind.sum_dtype)
                )
            sums = self._sums[exact] = Sums(contributions, buffers, self._line)
        what = f"gradients of {self._unit}"
        if sums.only is not None and not self._coded:
            line, plan = sums.only
            return line.reduce_scatter(plan, rows, buffers, what)
        coded = []
        contributed = self._rows(self._coded, local, exact=exact)
        for place, own in zip(self._coded, contributed, strict=True):
            start, numel = place.out
            if place.slot.path.layout is None:
                start, numel = place.offset, place.numel
            room = buffers[place.buffer].narrow(0, start, numel)
            coded.append(CodedGradient(place.slot, own, room))
        return Trip(reduced(sums, rows, coded, buffers, self._line, what))

    def regather(self, buffers: list[Tensor]) -> Work:
        """Issues the all-gather of gradients that rest replicated.

        A collective: all ranks call it in the same order.
        """
        segments = [
            place.slot.path.segment(buffers[place.buffer].narrow(0, place.offset, place.numel))
            for place in self._reduced
            if place.slot.path.layout is None and place.slot.path.size > 1
        ]
        return self._line.all_gather(segments, f"replicated gradients of {self._unit}")

    def resting(self, buffers: list[Tensor], wanted: Sequence[bool]) -> list[Tensor | None]:
        """The gradients in these buffers as they rest, for each slot;
        None of those that are not wanted, or frozen."""
        chosen = [place for place in self._placed if wanted[place.number]]
        pieces = [
            (buffers[at.buffer].as_strided(*at.resting), at.is_quick, at.slot.gradient_spec)
            for at in chosen
        ]
        grads = rested(pieces)
        found: list[Tensor | None] = [None] * len(self.places)
        for place, grad in zip(chosen, grads, strict=True):
            found[place.number] = grad
        return found

    def allocate(self) -> list[Tensor]:
        """Fresh buffers."""
        buffers = [buffer.take() for buffer in self._buffers]
        self._taken[:] = [taken for taken in self._taken if taken() is not None]
        self._taken += [weakref.ref(buffer.untyped_storage()) for buffer in buffers]
        return buffers

    def held(self) -> Iterator[torch.UntypedStorage]:
        """The buffers of which some gradient is still alive:
        each gradient at rest is a part of one."""
        return filter(None, (taken() for taken in self._taken))

    @property
    def padding_nbytes(self) -> int:
        """Bytes of the buffers beyond the elements of the gradients."""
        total = sum(buffer.numel * buffer.dtype.itemsize for buffer in self._buffers)
        return total - sum(
            at.slot.path.gradient_numel * at.slot.kind.gradient_dtype.itemsize
            for at in self._placed
        )


class Reduction:
    """One reduction of the gradients of a unit, under way."""

    def __init__(
        self,
        memory: GradientMemory,
        local: Sequence[Tensor | None],
        *,
        exact: bool,
        buffers: list[Tensor] | None = None,
    ) -> None:
        """Issues the reduce-scatter.

        Of `local`, which has a place for each parameter of the unit, None contributes zeros.
        `exact`: addends travel in the sum dtype, in place of the compute dtype; the sum is made in
        the sum dtype anyway. `buffers`: the gradient memory, if some of `local` lie in it already.
        """
        # For each slot, whether this rank contributed.
        self.has_local = [grad is not None for grad in local]
        # And whether that is at rest after the reduction: there is a gradient,
        # whatever other ranks have.
        self.local_at_once = [*map(and_, self.has_local, memory.at_once)]
        self._memory = memory
        self._buffers = memory.allocate() if buffers is None else buffers
        self._pending = memory.reduce(local, self._buffers, exact=exact)

    def wait(self) -> None:
        """Waits for the sums. Gradients that rest sharded are ready then."""
        self._pending.wait()

    def regather(self) -> Work | None:
        """Issues the all-gather of gradients that rest replicated, which are ready after it.

        A collective.
        """
        return self._memory.regather(self._buffers) if self._buffers else None

    def take(self, wanted: Sequence[bool]) -> list[Tensor | None]:
        """The gradients as they rest, for each slot; None of those that are not wanted, or frozen.

        Once all were taken, those that go to another tier keep no memory.
        """
        found = self._memory.resting(self._buffers, wanted)
        if wanted.count(True) == self._memory.count:
            self._buffers = []
        return found


def settle_gradients(
    slots: Sequence[Slot],
    groups: Iterable[Group],
    grads: Sequence[Tensor | None],
    offloaded: OffloadedState,
) -> None:
    """Makes `grads` the gradients of parameters, or adds them to those there are,
    which may be in their tier.

    Begins to write those that rest in another tier.
    """
    failure = _add_gradients(slots, grads)
    if failure is not None:
        offloaded.note(failure)
    for group in groups:
        record = group.gradient_record
        values = _take_gradients(group) if record is not None else {}
        if record is not None and values:
            offloaded.write_gradients(record, values)


def _take_gradients(group: Group) -> dict[int, Tensor]:
    """The gradients of a group that are in memory and belong into another tier, flat, by number.

    Tensors in that tier replace them as `.grad` of the parameters.
    """
    found: dict[int, Tensor] = {}
    for slot in group.slots:
        grad, place = slot.parameter.grad, slot.gradient_place
        if grad is None or place is None or isinstance(grad, PendingGradient):
            continue
        local, path = local_of(grad), slot.path
        if isinstance(local, TierTensor) or local.dtype != slot.kind.gradient_dtype:
            continue
        found[place.number] = path.flat_of(local)
        away = path.local_view(place)
        slot.parameter.grad = (
            away if slot.gradient_spec is None else on_spec(away, slot.gradient_spec)
        )
    return found


def _add_gradients(slots: Sequence[Slot], grads: Sequence[Tensor | None]) -> StorageError | None:
    """Adds reduced gradients to `.grad`; see `_add_gradient`.

    Returns the first failure of a tier that holds one.
    """
    later: list[tuple[Slot, Tensor]] = []
    with as_plain():
        for slot, grad in zip(slots, grads, strict=True):
            if grad is None:
                continue
            parameter = slot.parameter
            if (
                parameter.grad is None
                and not parameter._backward_hooks
                and not parameter._post_accumulate_grad_hooks
            ):
                parameter.grad = grad
            else:
                later.append((slot, grad))
    failure: StorageError | None = None
    for slot, grad in later:
        try:
            _add_gradient(slot, grad)
        except StorageError as error:
            failure = failure or error
    return failure


def _add_gradient(slot: Slot, grad: Tensor) -> None:
    """Adds a reduced gradient to `.grad`, and calls the user's hooks as autograd would:
    once, with the resting gradient."""
    parameter = slot.parameter
    if parameter._backward_hooks:
        for hook in gradient_hooks(parameter):
            replaced = hook(grad)
            grad = grad if replaced is None else replaced
    if parameter.grad is None:
        parameter.grad = grad
    else:
        rest_gradient(parameter)
        resting, added = local_of(parameter.grad), local_of(grad)
        resting.add_(added.cpu() if isinstance(resting, TierTensor) else added)
    if parameter._post_accumulate_grad_hooks:
        for post_hook in parameter_hooks(parameter):
            post_hook(parameter)
