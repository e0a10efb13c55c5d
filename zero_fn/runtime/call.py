"""Calls of a transformed module that run, and those that an interrupt has ended.

[Note: interrupted passes] A KeyboardInterrupt may come between any two lines, and torch calls no hook after it. So a call is
on the stack of the run (`calls`) with its frame before anything is touched, and leaves it when everything is back. Whatever
comes next (a call of the module, a verb, a load, a backward, an optimizer) looks whether the frame of the outermost one still
runs. If not, nothing is known of what the forward has done, and all units are put at rest as a whole. The next forward then
compares over ranks what they hold. A backward is marked likewise (`Backward.is_backward_open`).
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from types import FrameType

from torch import Tensor

from zero_fn.runtime.passes import UnitUse

__all__ = ["Call", "left_packing", "still_runs"]


def still_runs(frame: FrameType) -> bool:
    """Whether a call has not ended. The frame must not be one of a generator; if the call has ended, its locals are gone."""
    try:
        frame.clear()
    except RuntimeError:  # it is executing
        return True
    return False


class Call:
    """A call that enters a unit."""

    __slots__ = (
        "depth",
        "error_before",
        "frame",
        "has_backward",
        "in_backward",
        "is_left",
        "is_outermost",
        "is_packing",
        "is_transforming",
        "tensors",
        "use",
    )

    def __init__(self, frame: FrameType, *, in_backward: bool, is_transforming: bool) -> None:
        self.frame = frame  # stays until the call has ended
        self.in_backward = in_backward  # a checkpoint runs a forward again
        self.is_transforming = is_transforming  # it runs inside a transform of torch.func
        self.is_outermost = False  # it began the pass
        self.is_left = False  # an interrupt has ended it, and the pass was left
        self.error_before = sys.exception()  # which is being handled
        self.use: UnitUse | None = None  # None in a block in which whole parameters are registered
        self.tensors: list[Tensor] = []  # the whole parameters, as modules see them
        # Whether a backward may come: the output is watched, and gathered memory that autograd saves is packed.
        self.has_backward = False
        self.is_packing = False  # it has begun that
        self.depth = 0  # calls of the module inside this one


def left_packing(calls: Iterable[Call]) -> int:
    """Leaves calls that an interrupt has ended. Returns how many of them were packing."""
    packing = 0
    for call in calls:
        call.is_left = True
        packing += call.is_packing
    return packing
