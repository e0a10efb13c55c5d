"""Calls of a transformed module that run, and those that an interrupt has ended.

[Note: interrupted passes] A KeyboardInterrupt may come between any two lines, and torch calls no
hook after it. So a call is on the stack of the run (`calls`) with its frame before anything is
touched, and leaves it when everything is back. Whatever comes next (a call of the module, a verb, a
load, a backward, an optimizer) looks whether the frame of the outermost one still runs. If not,
nothing is known of what the forward has done, and all units are put at rest as a whole. The next
forward then compares over ranks what they hold. A backward is marked likewise
(`Backward.is_backward_open`).
"""

from __future__ import annotations

import sys
from threading import get_ident
from types import FrameType

from torch import Tensor

from zero_fn.errors import StateError
from zero_fn.runtime.ending import current_graph_task
from zero_fn.runtime.saved_tensor_hooks import drop_packing
from zero_fn.runtime.unit import ReadUse, UnitUse

__all__ = ["Call", "Calls", "in_two_threads", "still_runs"]


def still_runs(frame: FrameType) -> bool:
    """Whether a call has not ended.

    The frame must not be one of a generator; if the call has ended, its locals are gone.
    """
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
        # Whether a backward may come: the output is watched,
        # and gathered memory that autograd saves is packed.
        self.has_backward = False
        self.is_packing = False  # it has begun that
        self.depth = 0  # calls of the module inside this one


class Calls:
    """The calls of one transformed module that have not ended."""

    def __init__(self) -> None:
        self.forward: list[Call] = []  # of forwards, outermost first; none if all is at rest
        self.backward: list[Call] = []  # of forwards that checkpoints run again, in a backward
        # Weights that forwards have read of other units, oldest first.
        self.reads: list[ReadUse] = []
        self.thread = 0  # that has begun the last forward; it calls the backward, too

    @property
    def are_elsewhere(self) -> bool:
        """Whether a forward is open that another thread has called."""
        return bool(self.forward) and self.thread != get_ident() and current_graph_task() == -1

    def are_interrupted(self) -> bool:
        """Whether an interrupt has ended the forward that is open.

        Raises:
            StateError: It is running in another thread.
        """
        if not self.forward or not still_runs(self.forward[0].frame):
            return bool(self.forward)
        if self.thread != get_ident() and self.are_elsewhere:
            raise in_two_threads()
        return False

    def leave(self) -> None:
        """Leaves all calls, which an interrupt has ended.

        Those of forwards stay, until all that they touched is back.
        """
        packing = 0
        for call in (*self.forward, *self.backward):
            call.is_left = True
            packing += call.is_packing
        drop_packing(packing)
        self.reads = []


def in_two_threads() -> StateError:
    """The error for a module that is called while another thread calls it."""
    return StateError(
        "A transformed module was called while another thread runs it.",
        why="both would gather into the same memory, and free it",
        fix="call it in one thread at a time: lock = threading.Lock(); with lock: y = model(x)",
    )
