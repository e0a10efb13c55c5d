"""A census of a model: which parameters its modules held, and on which memory,
when a forward last looked at each of them.

What was added after the transform belongs to no unit, so each rank would train it with its own
gradients: the next forward refuses it, and so does `zf.check`. What was moved or replaced is
followed by its unit. A forward first compares the model with the census, which takes 0.1 us for a
module or a parameter, and looks at each parameter only if they differ.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain, repeat
from operator import attrgetter, call, is_

from torch import nn
from torch.distributed.tensor import DTensor
from torch.jit import ScriptModule

from zero_fn.errors import PlacementError
from zero_fn.runtime.slot import slot_of
from zero_fn.runtime.unit import Unit

__all__ = ["forget_members", "is_as_before", "note_members", "refuse_late"]

# Lies in the `__dict__` of the transformed module: only that may keep its modules alive.
_MEMBERS = "_zero_fn_members"

_parameter = attrgetter("parameter")
_known_local = attrgetter("local")
_local = attrgetter("_local_tensor")


class _Members:
    """The children and parameters of all modules of a model, as they were at some time."""

    def __init__(self, root: nn.Module, units: Sequence[Unit]) -> None:
        slots = [slot for unit in units for slot in unit.slots]
        places = [place for slot in slots for place in slot.places]
        modules = [
            module.__dict__ for module in root.modules() if not isinstance(module, ScriptModule)
        ]
        self._children = [module["_modules"] for module in modules]
        # Modules that were taken out of the model may be held by the user,
        # and are not to be held here.
        self._holders = [place._module for place in places]
        held = [module["_parameters"] for module in modules]
        held += [place.module._parameters for place in places if not place.is_gone]
        self._parameters = [*{id(each): each for each in held}.values()]
        self._slots = [slot for slot in slots if isinstance(slot.parameter, DTensor)]
        self._others = [slot for slot in slots if not isinstance(slot.parameter, DTensor)]
        self._placed = [slot.parameter for slot in self._slots]
        self._found = self._now()

    def __reduce__(self) -> tuple[type[None], tuple[()]]:
        return type(None), ()  # a copy of the model takes a census of its own

    def _now(self) -> tuple[list[nn.Module], list[bool], list[nn.Parameter | None]]:
        """All children; which modules of units are gone; all parameters."""
        return (
            [*chain.from_iterable(map(dict.values, self._children))],
            [*map(is_, map(call, self._holders), repeat(None))],
            [*chain.from_iterable(map(dict.values, self._parameters))],
        )

    def are_as_before(self) -> bool:
        """Whether modules hold the same children, and in the same places the same parameters,
        on the same memory."""
        now, found = self._now(), self._found
        return (
            now[:2] == found[:2]
            and len(now[2]) == len(found[2])
            and all(map(is_, now[2], found[2]))
            and all(map(is_, map(_parameter, self._slots), self._placed))
            and all(map(is_, map(_local, self._placed), map(_known_local, self._slots)))
            and all(slot.is_current() for slot in self._others)
        )


def is_as_before(root: nn.Module | None) -> bool:
    """Whether a model is as its last census found it.

    Else that is forgotten, so that removed modules are freed.
    """
    members = root.__dict__.get(_MEMBERS) if root is not None else None
    if root is None or members is None or members.are_as_before():
        return members is not None
    forget_members(root)
    return False


def note_members(root: nn.Module | None, units: Sequence[Unit]) -> None:
    """Takes the census of a model whose units have followed moved parameters,
    and refuses what is new; see `refuse_late`."""
    if root is not None and refuse_late(root, units):
        root.__dict__[_MEMBERS] = _Members(root, units)


def forget_members(module: nn.Module) -> None:
    """Forgets the census of a model: the next forward looks at each parameter."""
    module.__dict__.pop(_MEMBERS, None)


def refuse_late(root: nn.Module, units: Sequence[Unit]) -> bool:
    """Looks at all parameters of a transformed model, unless whole parameters
    are registered in their place.

    Units have followed moved parameters before.

    Returns:
        Whether it looked.

    Raises:
        PlacementError: A parameter belongs to no unit, or to another place of the model.
    """
    if any(unit.visible.leaves is not None for unit in units):
        return False
    for name, module in root.named_modules():
        for attribute, parameter in module._parameters.items():
            if isinstance(parameter, nn.Parameter) and not _is_known(parameter, module, attribute):
                dtype = str(parameter.dtype).removeprefix("torch.")
                raise PlacementError(
                    f"{f'{name}.{attribute}'.lstrip('.')!r} was added after the transform.",
                    parameter=f"{dtype}{list(parameter.shape)}",
                    why="it would be trained on each rank alone and never reduced",
                    fix="add parameters and modules before the transform, "
                    "or transform what you add: zf.shard_params(added, axis)",
                )
    return True


def _is_known(parameter: nn.Parameter, module: nn.Module, attribute: str) -> bool:
    slot = slot_of(parameter)
    places = slot.places if slot is not None else ()
    return any(place._module() is module and place.attribute == attribute for place in places)
