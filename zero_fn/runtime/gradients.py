"""Gradients of a unit: local sums, their reduction over ranks, and the resting gradients they become.

    local        what autograd gave on this rank, summed over uses (and over backwards while accumulating)
    reduced      the mean over ranks of this rank's piece, summed in the order of the ranks
    at rest      `.grad` of the resting parameter: a DTensor with the placement of the parameter

While `accumulate` sums, a marker stands as `.grad`. [Note: a pending gradient is part of .grad]

A parameter that gets no gradient on this rank contributes zeros, because other ranks may have one; it stays without
gradient only if no rank has one, as in a replica.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from zero_fn.errors import PlacementError
from zero_fn.resting import local_of, on_spec, rest_gradient, way_to_be_alone
from zero_fn.runtime.group import dense_offsets
from zero_fn.runtime.hooks import gradient_hooks, parameter_hooks
from zero_fn.runtime.pending_gradient import PendingGradient
from zero_fn.runtime.side_stream import on_host
from zero_fn.runtime.slot import Slot
from zero_fn.runtime.tier_tensor import TierTensor
from zero_fn.storage.recycled import Recurring
from zero_fn.transport.links import Links, Waits
from zero_fn.transport.segment import Contribution, Contributions

__all__ = ["GradientMemory", "Gradients", "Reduction", "add_gradient"]


class Gradients:
    """Local gradient sums of one unit, in the order of its slots.

    Where the gradient rests in a whole buffer (ZeRO-1 and replicas), exact sums are made in that buffer: accumulating takes
    no memory beyond it.

    Attributes:
        local: The sum for each slot; None if it has no gradient yet.
        is_empty: Whether no gradient is waiting.
    """

    __slots__ = (
        "__weakref__",
        "_buffers",
        "_buffers_memory",
        "_is_owned",
        "_marked",
        "_markers",
        "_memory",
        "_slots",
        "_trained",
        "_transport",
        "_unit",
        "is_empty",
        "local",
    )

    def __init__(self, slots: Sequence[Slot], transport: Links, unit: str) -> None:
        self._slots, self._transport, self._unit = slots, transport, unit
        self._trained: list[bool] = []  # which parameters `_memory` is for
        self._memory: GradientMemory | None = None
        self.local: list[Tensor | None] = [None] * len(slots)
        self._is_owned = [False] * len(slots)
        self.is_empty = True
        self._buffers: list[Tensor] | None = None
        self._buffers_memory: GradientMemory | None = None  # whose layout the buffers have
        self._markers: dict[int, tuple[Tensor, PendingGradient]] = {}  # by slot, with the memory it was made for
        self._marked: dict[int, PendingGradient] = {}  # by slot: what stands as `.grad` while the sum is pending

    def memory(self) -> GradientMemory:
        """The layout of the gradients of the parameters that are trained now."""
        trained = [slot.parameter.requires_grad for slot in self._slots]
        if self._memory is None or self._trained != trained:
            taken = self._memory.taken if self._memory is not None else []
            self._memory = GradientMemory([slot for slot in self._slots if slot.parameter.requires_grad], taken)
            self._trained = trained
        return self._memory

    @property
    def are_wanted(self) -> bool:
        """Whether any parameter of the unit is trained."""
        return any(slot.parameter.requires_grad for slot in self._slots)

    def forget_layout(self) -> None:
        """Parameters have other memory."""
        self._memory = None

    def add(self, grads: Sequence[Tensor | None], *, exact: bool) -> None:
        """Adds what one use gave.

        Args:
            grads: One per slot. They belong to autograd and may be shared, so they are never written.
            exact: Sum in the sum dtype from the first addend on: several will come.

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
        memory = self.memory()
        if self.is_empty and not exact and len(memory.ranges) == len(self._slots):
            self.local = list(grads)
            self._note_empty()
            return
        for i, (slot, grad) in enumerate(zip(self._slots, grads, strict=True)):
            if grad is None or slot not in memory.ranges:  # frozen since the forward, as autograd then drops it
                continue
            have = self.local[i]
            if have is not None and self._is_owned[i]:
                have.add_(grad)
            elif have is not None:
                self.local[i] = have.to(slot.kind.sum_dtype, copy=True).add_(grad)
                self._is_owned[i] = True
            elif exact:
                self.local[i] = self._room(slot, memory, grad.device).copy_(grad)
                self._is_owned[i] = True
            else:
                self.local[i] = grad
        self._note_empty()

    def _note_empty(self) -> None:
        self.is_empty = all(grad is None for grad in self.local)

    def add_pending(self, grads: Sequence[Tensor | None]) -> None:
        """Adds what one use gave to sums that stay on this rank when the backward ends. Markers stand as `.grad`."""
        self.forget_dropped()
        self.add(grads, exact=True)
        for i, slot in enumerate(self._slots):
            if self.local[i] is not None and i not in self._marked:
                marker = self._marker(i, slot)
                marker.earlier, slot.parameter.grad = slot.parameter.grad, marker
                self._marked[i] = marker

    def _marker(self, i: int, slot: Slot) -> PendingGradient:
        """The marker of a slot, made once for as long as its parameter rests where it does."""
        known = self._markers.get(i)
        if known is None or known[0] is not slot.flat:
            known = slot.flat, PendingGradient(slot, partial(_zero_sum, weakref.ref(self), i))
            self._markers[i] = known
        return known[1]

    def forget_dropped(self) -> None:
        """Drops the sums whose marker the user removed: `zero_grad()`, or any other assignment to `.grad`."""
        for i, marker in list(self._marked.items()):
            if self._slots[i].parameter.grad is not marker:
                del self._marked[i]
                self.local[i], self._is_owned[i] = None, False
        self._note_empty()

    def unmark(self) -> None:
        """Shows the gradients of before again in place of the markers. The sums stay, without those the user dropped."""
        self.forget_dropped()
        for i, marker in self._marked.items():
            self._slots[i].parameter.grad, marker.earlier = marker.earlier, None
        self._marked = {}

    def has_pending(self) -> bool:
        """Whether gradients wait on this rank that the user did not drop."""
        self.forget_dropped()
        return not self.is_empty

    def take(self) -> tuple[list[Tensor | None], list[Tensor] | None, GradientMemory | None]:
        """The local sums, which the unit no longer holds; the buffers in which some of them lie, and their layout."""
        if self._marked:
            self.unmark()
        taken = self.local, self._buffers, self._buffers_memory
        self.local, self._buffers, self._buffers_memory = [None] * len(self._slots), None, None
        self._is_owned = [False] * len(self._slots)
        self.is_empty = True
        return taken

    def reduce(self, *, exact: bool, present: Sequence[bool] | None = None) -> Reduction:
        """Issues the reduction of the local sums, which the unit then no longer holds.

        Args:
            exact: See `Reduction`.
            present: For each parameter, whether any rank has a gradient; of parameters frozen since, too.
        """
        memory, slots = self.memory(), self._slots
        if present is not None and any(
            has_any and slot not in memory.ranges for slot, has_any in zip(slots, present, strict=True)
        ):
            memory = GradientMemory(
                [slot for slot, has_any in zip(slots, present, strict=True) if has_any or slot in memory.ranges]
            )
        local, buffers, theirs = self.take()
        buffers = buffers if theirs is memory else None
        return Reduction(slots, memory, local, self._transport, self._unit, exact=exact, buffers=buffers)

    def reduce_given(self, grads: Sequence[Tensor | None]) -> Reduction:
        """Issues the reduction of these gradients."""
        return Reduction(self._slots, self.memory(), grads, self._transport, self._unit, exact=True)

    def _room(self, slot: Slot, memory: GradientMemory, device: torch.device) -> Tensor:
        if (
            slot.path.keeps_whole_gradient
            and slot.kind.sum_dtype == slot.dtype
            and slot.path.numel
            and slot in memory.ranges
        ):
            if self._buffers_memory is not memory:  # none yet, or parameters were frozen since
                self._buffers, self._buffers_memory = memory.allocate(), memory
            assert self._buffers is not None
            place = memory.ranges[slot]
            return self._buffers[place.buffer].as_strided(slot.path.shape, slot.path.stride, place.offset)
        return torch.empty_strided(slot.path.shape, slot.path.stride, dtype=slot.kind.sum_dtype, device=device)


def _zero_sum(gradients: Callable[[], Gradients | None], i: int) -> None:
    held = gradients()
    local = held.local[i] if held is not None else None
    if local is not None:
        local.zero_()


class _Range:
    """Where the gradient of one slot lives in the gradient memory of its unit.

    Attributes:
        buffer: Number of its buffer.
        offset, numel: Its range of the buffer, in elements.
        out: First element and number of elements that the reduction of this rank's piece fills.
        resting: Size, stride and offset of the gradient as it rests.
        alone: Puts it on a storage of its own.
    """

    __slots__ = ("alone", "buffer", "numel", "offset", "out", "resting")

    def __init__(self, slot: Slot, buffer: int, offset: int, numel: int) -> None:
        self.buffer, self.offset, self.numel = buffer, offset, numel
        start, out_numel = 0, slot.path.local_numel
        if slot.path.layout is None:
            start, out_numel = slot.path.segment(slot.flat).piece_bounds(slot.path.rank)
        elif slot.path.keeps_whole_gradient:
            start = slot.path.start
        self.out = offset + start, out_numel
        self.alone = way_to_be_alone(slot.flat, slot.path.local_shape)
        self.resting = (
            slot.path.local_shape,
            slot.path.local_stride,
            offset if slot.path.layout is None else offset + start,
        )


class GradientMemory:
    """The gradient memory of the trained slots of a unit: one buffer per dtype, in which they lie as `dense_offsets` says.

    Attributes:
        ranges: Where each slot has its gradient.
        taken: Buffers, weakly; with those that the unit took before others of its parameters were trained.
    """

    def __init__(self, slots: Sequence[Slot], taken: Sequence[weakref.ref[torch.UntypedStorage]] = ()) -> None:
        self.ranges: dict[Slot, _Range] = {}
        self._memos: tuple[dict[type, Any], dict[type, Any]] = {}, {}
        self._buffers: list[Recurring] = []
        self.taken = list(taken)
        by_dtype: dict[tuple[torch.dtype, torch.device], list[Slot]] = {}
        for slot in slots:
            by_dtype.setdefault((slot.dtype, slot.flat.device), []).append(slot)
        for (dtype, device), members in by_dtype.items():
            offsets, total = dense_offsets(members, [slot.path.gradient_room for slot in members], dtype.itemsize)
            for slot in members:
                self.ranges[slot] = _Range(slot, len(self._buffers), offsets[slot], slot.path.gradient_room)
            self._buffers.append(Recurring(total, dtype, device))
        self._reduced = [(slot, self.ranges[slot]) for slot in slots if slot.path.numel]
        self._numel = sum(slot.path.numel for slot, _ in self._reduced)

    def contributions(self, rows: list[Tensor], buffers: list[Tensor], *, exact: bool) -> Contributions:
        """The contributions of all slots with elements, in order, `exact` or not, to sums in `buffers`."""

        def make(at: int, rows: Tensor) -> Contribution:
            slot, place = self._reduced[at]
            start, numel = place.out
            out = buffers[place.buffer].as_strided((numel,), (1,), start)
            return slot.path.contribution(rows, out, slot.kind.sum_dtype)

        return Contributions(rows, buffers, make, self._numel, self._memos[exact])

    def allocate(self) -> list[Tensor]:
        """Fresh buffers."""
        buffers = [buffer.take() for buffer in self._buffers]
        self.taken = [taken for taken in self.taken if taken() is not None]
        self.taken += [weakref.ref(buffer.untyped_storage()) for buffer in buffers]
        return buffers

    def held(self) -> Iterator[torch.UntypedStorage]:
        """The buffers in which a gradient is still alive: those at rest show each a part of one."""
        return filter(None, (taken() for taken in self.taken))

    @property
    def padding_nbytes(self) -> int:
        """Bytes of the buffers beyond the elements of the gradients."""
        total = sum(buffer.numel * buffer.dtype.itemsize for buffer in self._buffers)
        return total - sum(slot.path.gradient_numel * slot.dtype.itemsize for slot in self.ranges)


class Reduction:
    """One reduction of the gradients of a unit, under way.

    Attributes:
        has_local: For each slot, whether this rank contributed a gradient.
    """

    def __init__(
        self,
        slots: Sequence[Slot],
        memory: GradientMemory,
        local: Sequence[Tensor | None],
        transport: Links,
        unit: str,
        *,
        exact: bool,
        buffers: list[Tensor] | None = None,
    ) -> None:
        """Issues the reduce-scatter.

        Args:
            slots: The parameters of a unit.
            memory: Memory of its trained parameters; frozen ones are left out.
            local: Local gradients of these parameters; None contributes zeros.
            transport: The transport of the unit.
            unit: Its name, for errors.
            exact: Whether addends travel in the sum dtype; else in the compute dtype, and are summed in the sum dtype.
            buffers: The gradient memory, if some of `local` lie in it already.
        """
        self.has_local = [grad is not None for grad in local]
        self._transport, self._memory, self._unit = transport, memory, unit
        self._buffers = memory.allocate() if buffers is None else buffers
        self._regathered: Waits | None = None
        rows: list[Tensor] = []
        for slot, grad in zip(slots, local, strict=True):
            if slot not in memory.ranges or not slot.path.numel:
                continue
            dtype = slot.kind.sum_dtype if exact else slot.kind.compute_dtype
            if grad is not None and grad.dtype is dtype and slot.path.is_in_order:
                rows.append(grad)
                continue
            if grad is None:
                grad = torch.zeros(slot.path.shape, dtype=dtype, device=slot.flat.device)
            elif grad.dtype != dtype:
                grad = grad.to(dtype)
            rows.append(slot.path.rows_of(grad))
        contributions = memory.contributions(rows, self._buffers, exact=exact)
        self._pending = transport.reduce_scatter(contributions, f"gradients of {unit}")

    def wait(self) -> None:
        """Waits for the sums: gradients that rest sharded are ready."""
        self._pending.wait()

    def regather(self) -> None:
        """Issues the all-gather of gradients that rest replicated. A collective: all ranks call it in the same order."""
        segments = [
            slot.path.segment(self._buffers[place.buffer].narrow(0, place.offset, place.numel))
            for slot, place in self._memory.ranges.items()
            if slot.path.layout is None and slot.path.numel and slot.path.size > 1
        ]
        if segments:
            self._regathered = self._transport.all_gather(segments, f"replicated gradients of {self._unit}")

    def wait_regathered(self) -> None:
        """Waits for what `regather` issued: gradients that rest replicated are ready."""
        if self._regathered is not None:
            self._regathered.wait()

    def release(self) -> None:
        """Lets go of the memory: every gradient was taken, and those that rest elsewhere hold none of it."""
        self._buffers = []

    @property
    def is_released(self) -> bool:
        """Whether every gradient was taken."""
        return not self._buffers

    def is_frozen(self, slot: Slot) -> bool:
        """Whether a slot takes no part."""
        return slot not in self._memory.ranges

    def resting(self, slot: Slot) -> Tensor | None:
        """The gradient of one slot as it rests; None if it is frozen."""
        place = self._memory.ranges.get(slot)
        if place is None:
            return None
        grad = place.alone(self._buffers[place.buffer].as_strided(*place.resting))
        return grad if slot.spec is None else on_spec(grad, slot.spec)


def add_gradient(slot: Slot, grad: Tensor) -> None:
    """Adds a reduced gradient to `.grad`, firing the user's hooks as autograd would: once, with the resting gradient."""
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
        resting.add_(on_host(added, slot.kind.compute_dtype) if isinstance(resting, TierTensor) else added)
    if parameter._post_accumulate_grad_hooks:
        for post_hook in parameter_hooks(parameter):
            post_hook(parameter)
