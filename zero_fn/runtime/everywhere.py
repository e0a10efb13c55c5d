"""Does something that may fail on one rank alone, and lets every rank know."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from math import prod

import torch
from torch import Tensor

from zero_fn.errors import StorageError
from zero_fn.hierarchy import Links
from zero_fn.mesh import Axis
from zero_fn.runtime.registry import slot_of

__all__ = ["everywhere", "is_shared"]


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
        bits = torch.zeros(prod(axis.size for axis in axes), dtype=torch.uint8, device=axes[0].device_type)
        own = 0
        for axis in reversed(axes):
            own = own * axis.size + axis.rank
        bits[own] = failure is not None
        transport.any(bits, f"how it went: {what}").wait()
        failed = bits.nonzero().flatten().tolist()
        if failed and failure is None:
            along = " x ".join(map(str, reversed(axes)))
            failure = StorageError(
                f"{what} failed on rank {', '.join(map(str, failed))} of axis {along}.",
                here=f"rank {own}, where it went well",
                why="ranks would go on from different states",
                fix="see the error of that rank; start all ranks again from the last checkpoint",
            )
    if failure is not None:
        raise failure


def is_shared(parameters: Iterable[Tensor]) -> bool:
    """Whether other ranks hold these parameters, or other shards of them."""
    return bool(_transports(parameters))


def _transports(parameters: Iterable[Tensor]) -> list[tuple[Links, tuple[Axis, ...]]]:
    found: dict[int, tuple[Links, tuple[Axis, ...]]] = {}
    for parameter in parameters:
        slot = slot_of(parameter)
        unit = slot.unit() if slot is not None and slot.unit is not None else None
        axes = unit.step.assignment.axes if unit is not None else ()
        if unit is not None and prod(axis.size for axis in axes) > 1:
            found.setdefault(id(unit.step), (unit.step.transport, axes))
    return list(found.values())
