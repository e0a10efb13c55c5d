"""What modules see under the names of a unit's parameters, besides the registered resting ones."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch import Tensor, nn

from zero_fn.runtime.names import Names
from zero_fn.runtime.slot import Slot
from zero_fn.runtime.uncompiled import uncompiled

__all__ = ["Shown"]


class Shown:
    """What modules see under the names of a unit's parameters.

    Attributes:
        swapped: Tensors that stand in for parameters in the running forward, by number: `torch.func.functional_call`.
        unsharded_values: Whole values, in a block of `unsharded`.
        leaves: Whole parameters that are registered in place of the resting ones, in a block that gathers once.
        last_entry: The entry at which the last forward with gradients began, weakly.
        backward_entry: While backward is in the unit, the entry at which its forward began; else None.
        needed_in: The backward (its graph task) that has put it there.
        is_left: Whether a backward inside that one has run its nodes: it may be resharded once that one goes on.
    """

    def __init__(self, slots: Sequence[Slot]) -> None:
        self._names, self._count = Names(slots), len(slots)
        self.swapped: dict[int, Tensor] = {}
        self.unsharded_values: list[Tensor] | None = None
        self.leaves: list[nn.Parameter] | None = None
        self.last_entry: Callable[[], object] = _no_entry
        self.backward_entry: object = None
        self.needed_in, self.is_left = -1, False
        self._in_backward: list[Tensor] = []

    @property
    def is_replaced(self) -> bool:
        """Whether the running forward uses other tensors in place of every parameter."""
        return bool(self.swapped) and len(self.swapped) == self._count

    @property
    def is_ours(self) -> bool:
        """Whether forwards read the gathered parameters: nothing stands in for them."""
        return self.unsharded_values is None and self.leaves is None and not self.is_replaced

    @uncompiled
    def show(self, tensors: Sequence[Tensor]) -> None:
        """Lets modules see `tensors`, one for each parameter."""
        self._names.show(tensors)

    @uncompiled
    def hide(self) -> None:
        """Undoes `show`. While backward is in the unit modules see again what it has shown."""
        if self._in_backward:
            self._names.show(self._in_backward)
        else:
            self._names.hide()

    def show_in_backward(self, tensors: list[Tensor], entry: object) -> None:
        """As `show`, until `leave_backward`, for the backward of a forward that began at `entry`."""
        self._in_backward, self.backward_entry = tensors, entry
        self.show(tensors)

    def leave_backward(self) -> list[Tensor]:
        """Undoes `show_in_backward`. Returns what was shown."""
        tensors, self._in_backward = self._in_backward, []
        self.backward_entry, self.is_left = None, False
        self.hide()
        return tensors

    def hide_from_backward(self) -> None:
        """Lets modules see resting parameters, whatever backward has shown them."""
        if self.backward_entry is not None:
            self._names.hide()


def _no_entry() -> None:
    """Of a unit that has not run."""
