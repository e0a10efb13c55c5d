"""Bytes sent per rank and step, from schedules.

A gather over n ranks sends this rank's shard to n - 1 peers; a reduce-scatter sends every peer its piece: (n - 1)/n Ψ b
each. How often a unit is gathered is read off the schedule, by running its events on a table of phases.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence

from zero_fn.runtime.slot import Slot
from zero_fn.schedule import (
    Enter,
    Exit,
    Reshard,
    Trace,
    Unshard,
    Use,
    backward_schedule,
    backward_trace,
    forward_schedule,
)

__all__ = ["gathers", "nested_trace", "sent_nbytes"]


def nested_trace(units: Sequence[int]) -> Trace:
    """The trace of a model whose first unit is the root and whose others run one after the other inside it."""
    root, *blocks = units
    inner = [bracket for unit in blocks for bracket in (Enter(Use(unit)), Exit(Use(unit)))]
    return (Enter(Use(root)), *inner, Exit(Use(root)))


def gathers(
    trace: Trace,
    *,
    is_transient: Callable[[int], bool],
    stays: Callable[[int], bool],
    is_trained: Callable[[int], bool],
    backwards: int,
) -> Counter[int]:
    """How often each unit is gathered in a step.

    Args:
        trace: Of one forward.
        is_transient: Whether a unit is freed between uses.
        stays: Whether it stays gathered from forward to backward.
        is_trained: Whether any of its parameters is; frozen units before the first trained one have no backward.
        backwards: Microbatches accumulated in the step.
    """
    counts: Counter[int] = Counter()
    for unit in {bracket.use.unit for bracket in trace}:
        if not is_transient(unit):
            counts[unit] = 1
    gathered: set[int] = set()
    forward = forward_schedule(trace, keeps_last=True)
    backward = backward_schedule(backward_trace(_with_backward(trace, is_trained)), reduces=lambda _: False)
    for _ in range(backwards):
        for events, in_forward in ((forward, True), (backward, False)):
            for event in events:
                if isinstance(event, Unshard) and is_transient(event.unit) and event.unit not in gathered:
                    gathered.add(event.unit)
                    counts[event.unit] += 1
                elif isinstance(event, Reshard) and not (in_forward and stays(event.unit)):
                    gathered.discard(event.unit)
        gathered.clear()  # a backward ends with every transient unit at rest
    return counts


def _with_backward(trace: Trace, is_trained: Callable[[int], bool]) -> Trace:
    """The brackets of the uses whose outputs need gradients: those that end after a trained unit began."""
    begun = False
    taking_part: set[Use] = set()
    for bracket in trace:
        begun |= is_trained(bracket.use.unit)
        if begun and isinstance(bracket, Exit):
            taking_part.add(bracket.use)
    return tuple(bracket for bracket in trace if bracket.use in taking_part)


def sent_nbytes(slots: Sequence[Slot], *, times_gathered: int, is_exact: bool, pads: bool) -> int:
    """Bytes this rank sends in a step for the parameters of one unit.

    Args:
        slots: Its parameters.
        times_gathered: How often it is gathered.
        is_exact: Whether gradients travel in the dtype of their sum.
        pads: Whether the transport sends padding.
    """
    total = 0
    for slot in slots:
        peers = slot.size - 1
        if not peers or not slot.numel:
            continue
        numel = slot.piece_numel * slot.size if pads else slot.numel
        own = slot.piece_numel if pads else _own_piece_numel(slot)
        if slot.layout is not None:
            total += times_gathered * own * peers * slot.compute_dtype.itemsize
        if slot.parameter.requires_grad:
            wire = slot.sum_dtype if is_exact else slot.compute_dtype
            total += (numel - own) * wire.itemsize
            if slot.layout is None:
                total += own * peers * slot.dtype.itemsize
    return total


def _own_piece_numel(slot: Slot) -> int:
    start = min(slot.rank * slot.piece_numel, slot.numel)
    return min(slot.piece_numel, slot.numel - start)
