"""What modules see under the names of a unit's parameters, besides the registered resting ones.

[Note: names] A tensor in the `__dict__` of a module hides the registered parameter of the same
name, which stays registered.

[Note: changed values] An embedding with `max_norm`, a clamp, or a codebook with running means
changes its parameters in a forward. A forward computes with copies of its parameters, which are
dropped. So a change of one is refused, at every stage, when the forward ends: torch counts changes
in place. It counts none through `.data`, which are lost (docs/limits.md).
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from operator import attrgetter

from torch import Tensor, nn

from zero_fn.errors import PlacementError
from zero_fn.runtime.ending import current_graph_task
from zero_fn.runtime.slot import Slot
from zero_fn.runtime.uncompiled import uncompiled

__all__ = ["VisibleParameters"]

_version = attrgetter("_version")


@dataclass(slots=True)
class VisibleInBackward:
    """What modules see from the moment at which backward reaches a unit
    until the unit is resharded."""

    tensors: list[Tensor]
    entry: object  # at which the forward began
    task: int  # the backward that needs them: its graph task
    is_left: bool = (
        # A backward nested in the open one has run the unit's nodes:
        # resharded once the outer one goes on.
        False
    )


class VisibleParameters:
    """What modules see under the names of a unit's parameters."""

    def __init__(self, slots: Sequence[Slot]) -> None:
        self._slots = slots
        self._by_module: list[tuple[weakref.ref[nn.Module], list[tuple[str, int]]]] = []
        numbers: dict[int, int] = {}
        for i, slot in enumerate(slots):
            for place in slot.places:
                number = numbers.setdefault(id(place.module), len(self._by_module))
                if number == len(self._by_module):
                    self._by_module.append((weakref.ref(place.module), []))
                self._by_module[number][1].append((place.attribute, i))
        # Of each module the names of its parameters, and these.
        self.by_module = [
            (reference, [name for name, _ in names], [slots[i] for _, i in names])
            for reference, names in self._by_module
        ]
        self._aliased = [
            (place, i) for i, slot in enumerate(slots) for place in slot.places if place.aliases
        ]
        # Whole parameters that are registered in place of the resting ones,
        # in a block that gathers once.
        self.leaves: list[nn.Parameter] | None = None
        # The entry point at which the last forward with gradients began, weakly.
        self.last_entry: Callable[[], object] = _no_entry
        self.in_backward: VisibleInBackward | None = None  # while backward is in the unit

    @uncompiled
    def show(self, tensors: Sequence[Tensor]) -> None:
        """Lets modules see `tensors`, one for each parameter.

        Modules that are gone see nothing: a graph may outlive them.
        """
        for reference, names in self._by_module:
            module = reference()
            if module is not None:
                seen = module.__dict__
                for name, i in names:
                    seen[name] = tensors[i]
        for place, i in self._aliased:
            place.set_aliases(tensors[i])

    @uncompiled
    def hide(self) -> None:
        """Undoes `show`.

        While backward is in the unit, modules see the tensors of `show_in_backward` again.
        """
        if self.in_backward is not None:
            self.show(self.in_backward.tensors)
        else:
            self._show_registered()

    def show_in_backward(self, tensors: list[Tensor], entry: object) -> None:
        """Lets modules see `tensors` until `leave_backward`,
        in the backward of a forward that began at `entry`."""
        self.in_backward = VisibleInBackward(tensors, entry, current_graph_task())
        self.show(tensors)

    def leave_backward(self) -> None:
        """Undoes `show_in_backward`."""
        self.in_backward = None
        self._show_registered()

    def hide_from_backward(self) -> None:
        """Lets modules see resting parameters, in place of the tensors of `show_in_backward`."""
        if self.in_backward is not None:
            self._show_registered()

    def start_over(self) -> None:
        """Lets modules see registered parameters, whatever an interrupted pass lets them see."""
        self.in_backward = None
        self._show_registered()

    def _show_registered(self) -> None:
        for reference, names in self._by_module:
            module = reference()
            if module is not None:
                seen = module.__dict__
                for name, _ in names:
                    if name in seen:
                        del seen[name]
        for place, _ in self._aliased:
            if not place.is_gone and (registered := place.registered) is not None:
                place.set_aliases(registered)

    @uncompiled
    def require_unchanged(self, unit: str, tensors: Sequence[Tensor]) -> None:
        """Refuses in-place changes of the tensors that modules saw under the names of parameters.
        [Note: changed values]

        The whole parameters that a block has registered may be changed: they are the user's. Others
        had version 0 when the pass began.

        Raises:
            PlacementError: One was changed in place.
        """
        if self.leaves is None and not any(map(_version, tensors)):
            return
        for number, tensor in enumerate(tensors):
            if (self.leaves is not None and tensor.is_inference()) or not tensor._version:
                continue
            slot = self._slots[number]
            if self.leaves is not None and slot.kind.compute_dtype == slot.dtype:
                continue
            raise PlacementError(
                f"The forward changed {slot.fqn!r} in place.",
                parameter=slot,
                unit=unit or "root",
                why="a forward computes with a copy, on each rank another: "
                "the change would be lost, or differ between ranks",
                fix="change it between steps: with torch.no_grad(): parameter.clamp_(...); keep "
                "running means in a buffer; instead of max_norm: with zf.unsharded(model, "
                "writeback=True), torch.no_grad(): weight.renorm_(2, 0, 1.0)",
            )


def _no_entry() -> None:
    """The last entry point of a unit that has not run."""
