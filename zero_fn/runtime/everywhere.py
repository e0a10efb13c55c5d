"""What may fail on one rank alone is told to every rank."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from math import prod
from typing import TypeVar

import torch
from torch import Tensor

from zero_fn.errors import StorageError
from zero_fn.hierarchy import Links, Waits
from zero_fn.mesh import Axis
from zero_fn.runtime.registry import slot_of

F = TypeVar("F", bound=Exception)

__all__ = ["Told", "everywhere", "is_cut", "is_shared", "tell"]


def everywhere(parameters: Iterable[Tensor], act: Callable[[], None], what: str) -> None:
    """Calls `act` on every rank, and raises on every rank if it raised on any.

    Communicates a byte per rank to each peer, and waits.

    Args:
        parameters: Resting parameters: the ranks of their axes are meant.
        act: What may fail.
        what: What it is, for the message: "A step of a streamed optimizer".

    Raises:
        StorageError: It failed on another rank.
        Exception: What it raised on this one.
    """
    failure: Exception | None = None
    try:
        act()
    except Exception as error:
        failure = error
    for transport, axes in _transports(parameters):
        found = tell(transport, axes, failure, what).failure(failure)
        failure = found if failure is None else failure
    if failure is not None:
        raise failure


class Told:
    """How it went on each rank, under way."""

    def __init__(self, bits: Tensor | None, pending: Waits | None, axes: Sequence[Axis], own: int, what: str) -> None:
        self._bits, self._pending, self._axes, self._own, self._what = bits, pending, axes, own, what

    def failure(self, own: F | None) -> F | StorageError | None:
        """Waits. The failure of this rank, or one that tells of that of another; None if all went well."""
        if self._pending is None or self._bits is None:
            return own
        self._pending.wait()
        failed = self._bits.nonzero().flatten().tolist()
        if own is not None or not failed:
            return own
        along = " x ".join(map(str, reversed(self._axes)))
        return StorageError(
            f"{self._what} failed on rank {', '.join(map(str, failed))} of axis {along}.",
            here=f"rank {self._own}, where it went well",
            why="ranks would go on from different states",
            fix="see the error of that rank; start all ranks again from the last checkpoint",
        )


def tell(transport: Links, axes: Sequence[Axis], failure: Exception | None, what: str) -> Told:
    """Tells the ranks of these axes whether something failed here. A collective.

    Communicates a byte per rank to each peer.
    """
    size = prod(axis.size for axis in axes)
    if size < 2:
        return Told(None, None, axes, 0, what)
    own = 0
    for axis in reversed(axes):
        own = own * axis.size + axis.rank
    bits = torch.zeros(size, dtype=torch.uint8, device=axes[0].device_type)
    bits[own] = failure is not None
    return Told(bits, transport.any(bits, f"how it went: {what}"), axes, own, what)


def is_shared(parameters: Iterable[Tensor]) -> bool:
    """Whether other ranks hold these parameters, or other shards of them."""
    return bool(_transports(parameters))


def is_cut(parameter: Tensor) -> bool:
    """Whether this rank has a part of a parameter, and others the rest."""
    slot = slot_of(parameter)
    return slot is not None and slot.layout is not None


def _transports(parameters: Iterable[Tensor]) -> list[tuple[Links, tuple[Axis, ...]]]:
    found: dict[int, tuple[Links, tuple[Axis, ...]]] = {}
    for parameter in parameters:
        slot = slot_of(parameter)
        unit = slot.unit() if slot is not None and slot.unit is not None else None
        axes = unit.step.assignment.axes if unit is not None else ()
        if unit is not None and prod(axis.size for axis in axes) > 1:
            found.setdefault(id(unit.step), (unit.step.transport, axes))
    return list(found.values())
