"""Bytes sent per rank and step, from schedules.

A gather over n ranks sends this rank's shard to n - 1 peers; a reduce-scatter sends every peer its piece: (n - 1)/n Ψ b
each. How often a unit is gathered is read off the schedule, by running its events on a table of phases.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence

from zero_fn.runtime.kind import Lifetime
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

__all__ = ["gathers", "nested_trace", "sent_nbytes", "with_backward"]


def nested_trace(units: Mapping[int, str]) -> Trace:
    """The trace of a model whose units run in order, each inside the one that contains it by name; the root is the first."""
    trace: list[Enter | Exit] = []
    around: list[int] = []
    for unit, name in units.items():
        while around and not _contains(units[around[-1]], name):
            trace.append(Exit(Use(around.pop())))
        trace.append(Enter(Use(unit)))
        around.append(unit)
    return (*trace, *(Exit(Use(unit)) for unit in reversed(around)))


def _contains(outer: str, name: str) -> bool:
    return not outer or name.startswith(f"{outer}.")


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
    backward = backward_schedule(backward_trace(with_backward(trace, is_trained)), reduces=lambda _: False)
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


def with_backward(trace: Trace, is_trained: Callable[[int], bool]) -> Trace:
    """The brackets of the uses whose outputs need gradients: those that end after a trained unit began."""
    begun = False
    taking_part: set[Use] = set()
    for bracket in trace:
        begun |= is_trained(bracket.use.unit)
        if begun and isinstance(bracket, Exit):
            taking_part.add(bracket.use)
    return tuple(bracket for bracket in trace if bracket.use in taking_part)


def sent_nbytes(slots: Sequence[Slot], *, times_gathered: int, is_exact: bool, pads: bool) -> Counter[str]:
    """Bytes this rank sends in a step for the parameters of one unit, by the name of the axis.

    Over two axes the first carries what one axis would, and the second what is left to be gathered or summed of this
    rank's piece on the first.

    Args:
        slots: Its parameters.
        times_gathered: How often it is gathered.
        is_exact: Whether gradients travel in the dtype of their sum.
        pads: Whether the transport sends padding.
    """
    total: Counter[str] = Counter()
    for slot in slots:
        if not slot.path.numel or not slot.path.hops:
            continue
        first = slot.path.hops[0].axis
        whole = _Cut(slot.path.numel, slot.path.piece_numel, slot.path.rank, slot.path.size, pads=pads)
        total[first.name] += _sent_along_first(slot, whole, times_gathered, is_exact=is_exact)
        if len(slot.path.hops) > 1:
            second = slot.path.hops[1].axis
            own = whole.own_numel
            largest = slot.path.sublayout.shard_numel if slot.path.sublayout is not None else -(-own // second.size)
            part = _Cut(own, largest, second.rank, second.size, pads=pads)
            total[second.name] += _sent_along_second(
                slot, part, 1 if slot.kind.inner is Lifetime.ALWAYS else times_gathered
            )
    return +total


class _Cut:
    """What one axis sends of a range that it cuts into pieces.

    Attributes:
        own_numel: Elements of this rank's piece, without padding.
        gathered, scattered: Elements sent by an all-gather and by a reduce-scatter.
    """

    def __init__(self, numel: int, largest: int, rank: int, size: int, *, pads: bool) -> None:
        self.own_numel = min(largest, numel - min(rank * largest, numel))
        self.gathered = (largest if pads else self.own_numel) * (size - 1)
        self.scattered = largest * (size - 1) if pads else numel - self.own_numel


def _sent_along_first(slot: Slot, whole: _Cut, times_gathered: int, *, is_exact: bool) -> int:
    total = times_gathered * whole.gathered * slot.kind.compute_dtype.itemsize if slot.path.layout is not None else 0
    if slot.parameter.requires_grad:
        total += whole.scattered * (slot.kind.sum_dtype if is_exact else slot.kind.compute_dtype).itemsize
        if slot.path.layout is None:
            total += whole.gathered * slot.dtype.itemsize
    return total


def _sent_along_second(slot: Slot, part: _Cut, times_gathered: int) -> int:
    total = times_gathered * part.gathered * slot.kind.compute_dtype.itemsize if slot.path.sublayout is not None else 0
    if slot.parameter.requires_grad:
        total += part.scattered * slot.kind.sum_dtype.itemsize
        if slot.path.sublayout is None:
            total += part.gathered * slot.dtype.itemsize
    return total
