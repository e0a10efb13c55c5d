"""The names of a unit's parameters in its modules: what is seen under them, besides the registered parameters."""

from __future__ import annotations

import weakref
from collections.abc import Sequence

from torch import Tensor, nn

from zero_fn.runtime.slot import Place, Slot

__all__ = ["Names"]


class Names:
    """Every module attribute that holds a parameter of a unit.

    A tensor in the `__dict__` of a module hides the registered parameter of the same name, which stays registered.
    """

    __slots__ = ("_aliased", "_by_module")

    def __init__(self, slots: Sequence[Slot]) -> None:
        self._by_module: list[tuple[weakref.ref[nn.Module], list[tuple[str, int]]]] = []
        self._aliased: list[tuple[Place, int]] = []  # lists of the module hold the parameter too
        numbers: dict[int, int] = {}
        for i, slot in enumerate(slots):
            for place in slot.places:
                if place.aliases:
                    self._aliased.append((place, i))
                    continue
                number = numbers.setdefault(id(place.module), len(self._by_module))
                if number == len(self._by_module):
                    self._by_module.append((weakref.ref(place.module), []))
                self._by_module[number][1].append((place.attribute, i))

    def show(self, tensors: Sequence[Tensor]) -> None:
        """Lets modules see `tensors`, one for each slot. A module that is gone sees nothing: its graph outlived it."""
        for reference, names in self._by_module:
            module = reference()
            if module is not None:
                seen = module.__dict__
                for name, i in names:
                    seen[name] = tensors[i]
        for place, i in self._aliased:
            place.shadow(tensors[i])

    def hide(self) -> None:
        """Undoes `show`."""
        for reference, names in self._by_module:
            module = reference()
            if module is not None:
                seen = module.__dict__
                for name, _ in names:
                    seen.pop(name, None)
        for place, _ in self._aliased:
            place.unshadow()
