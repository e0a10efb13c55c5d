"""Gradients of a unit: local sums, their reduction over ranks, and the resting gradients they become.

    local        what autograd gave on this rank, summed over uses (and over backwards while accumulating)
    reduced      the mean over ranks of this rank's piece, summed in the order of the ranks
    at rest      `.grad` of the resting parameter: a DTensor with the placement of the parameter

A parameter that gets no gradient on this rank contributes zeros, because other ranks may have one; it stays without
gradient only if no rank has one, as in a replica.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from zero_fn.collectives import Contribution, Pending, Segment, Transport
from zero_fn.layout import aligned_offsets
from zero_fn.resting import local_of, resting_tensor
from zero_fn.runtime.slot import Slot

__all__ = ["Gradients", "Reduction", "gradient_padding_nbytes", "settle"]


class Gradients:
    """Local gradient sums of one unit, in the order of its slots."""

    __slots__ = ("_is_owned", "_slots", "local")

    def __init__(self, slots: Sequence[Slot]) -> None:
        self._slots = slots
        self.local: list[Tensor | None] = [None] * len(slots)
        self._is_owned = [False] * len(slots)

    def add(self, grads: Sequence[Tensor | None], *, exact: bool) -> None:
        """Adds what one use gave.

        Args:
            grads: One per slot. They belong to autograd and may be shared, so they are never written.
            exact: Sum in the sum dtype from the first addend on: several will come.
        """
        for i, (slot, grad) in enumerate(zip(self._slots, grads, strict=True)):
            if grad is None:
                continue
            have = self.local[i]
            if have is not None and self._is_owned[i]:
                have.add_(grad)
            elif have is not None:
                self.local[i] = have.to(slot.sum_dtype, copy=True).add_(grad)
                self._is_owned[i] = True
            elif exact:
                whole = torch.empty_strided(slot.shape, slot.stride, dtype=slot.sum_dtype, device=grad.device)
                self.local[i] = whole.copy_(grad)
                self._is_owned[i] = True
            else:
                self.local[i] = grad

    def take(self) -> list[Tensor | None]:
        """The local sums, which the unit no longer holds."""
        local, self.local = self.local, [None] * len(self._slots)
        self._is_owned = [False] * len(self._slots)
        return local

    @property
    def is_empty(self) -> bool:
        """Whether no gradient is waiting."""
        return all(grad is None for grad in self.local)


class Reduction:
    """One reduction of the gradients of a unit, under way.

    Attributes:
        has_local: For each slot, whether this rank contributed a gradient.
    """

    def __init__(
        self, slots: Sequence[Slot], local: Sequence[Tensor | None], transport: Transport, *, exact: bool
    ) -> None:
        """Issues the reduce-scatter.

        Args:
            slots: The parameters of a unit.
            local: Their local gradients; None contributes zeros. Frozen parameters are left out.
            transport: Of the unit.
            exact: Whether addends travel in the sum dtype; else in the compute dtype, and are summed in the sum dtype.
        """
        self.has_local = [grad is not None for grad in local]
        self._transport = transport
        self._slots = slots
        self._taking_part = [slot for slot in slots if slot.parameter.requires_grad]
        self._ranges = _gradient_memory(self._taking_part)
        self._regathered: Pending | None = None
        by_slot = dict(zip(slots, local, strict=True))
        contributions = []
        for slot in self._taking_part:
            if not slot.numel:
                continue
            dtype = slot.sum_dtype if exact else slot.compute_dtype
            grad = by_slot[slot]
            if grad is None:
                flat = torch.zeros(slot.numel, dtype=dtype, device=slot.flat.device)
            else:
                flat = slot.flatten(grad if grad.dtype == dtype else grad.to(dtype))
            addend = slot.segment(flat)
            contributions.append(Contribution(addend, self._piece(slot), slot.sum_dtype))
        self._pending = transport.reduce_scatter(contributions)

    def wait(self) -> None:
        """Waits for the sums; issues the all-gather of gradients that rest replicated."""
        self._pending.wait()
        segments = [
            slot.segment(self._ranges[slot])
            for slot in self._taking_part
            if slot.layout is None and slot.numel and slot.size > 1
        ]
        if segments and self._regathered is None:
            self._regathered = self._transport.all_gather(segments)

    def resting(self, slot: Slot) -> Tensor | None:
        """The gradient of one slot as it rests, after `wait` and, if it rests replicated, `wait_replicated`."""
        if slot not in self._ranges:
            return None
        whole = self._ranges[slot]
        flat = whole.narrow(0, 0, slot.numel) if slot.layout is None else self._piece(slot)
        view = slot.local_view(flat)
        return view if slot.spec is None else resting_tensor(view, slot.spec)

    def wait_replicated(self) -> None:
        """Waits until gradients that rest replicated are whole."""
        if self._regathered is not None:
            self._regathered.wait()

    def _piece(self, slot: Slot) -> Tensor:
        """Where the reduced piece of this rank goes."""
        whole = self._ranges[slot]
        if slot.layout is None:
            return Segment(whole, slot.numel, slot.piece_numel).piece(slot.rank)
        start = slot.rank * slot.layout.shard_numel if slot.keeps_whole_gradient else 0
        return whole.narrow(0, start, slot.local_numel)


def settle(slot: Slot, grad: Tensor) -> None:
    """Adds a reduced gradient to `.grad`, firing the user's hooks as autograd would: once, with the resting gradient."""
    parameter = slot.parameter
    for hook in tuple((parameter._backward_hooks or {}).values()):
        replaced = hook(grad)
        grad = grad if replaced is None else replaced
    if parameter.grad is None:
        parameter.grad = grad
    else:
        local_of(parameter.grad).add_(local_of(grad))
    for post_hook in tuple((parameter._post_accumulate_grad_hooks or {}).values()):
        post_hook(parameter)


def gradient_padding_nbytes(slots: Sequence[Slot]) -> int:
    """Bytes that alignment and uneven cuts add to the gradients of these slots on this rank."""
    total = 0
    for (dtype, _), members in _by_dtype(slots).items():
        allocated = aligned_offsets([_range_numel(slot) for slot in members], dtype.itemsize)[-1]
        total += (allocated - sum(slot.gradient_numel for slot in members)) * dtype.itemsize
    return total


def _range_numel(slot: Slot) -> int:
    return slot.piece_numel * (slot.size if slot.keeps_whole_gradient else 1)


def _by_dtype(slots: Sequence[Slot]) -> dict[tuple[torch.dtype, torch.device], list[Slot]]:
    members: dict[tuple[torch.dtype, torch.device], list[Slot]] = {}
    for slot in slots:
        members.setdefault((slot.dtype, slot.flat.device), []).append(slot)
    return members


def _gradient_memory(slots: Sequence[Slot]) -> dict[Slot, Tensor]:
    """A flat range for the gradient of each slot, back to back in one buffer per dtype."""
    ranges: dict[Slot, Tensor] = {}
    for (dtype, device), members in _by_dtype(slots).items():
        numels = [_range_numel(slot) for slot in members]
        *offsets, total = aligned_offsets(numels, dtype.itemsize)
        buffer = torch.empty(total, dtype=dtype, device=device)
        for slot, offset, numel in zip(members, offsets, numels, strict=True):
            ranges[slot] = buffer.narrow(0, offset, numel)
    return ranges
