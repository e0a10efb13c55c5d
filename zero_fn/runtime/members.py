"""Parameters and modules that are added to a model after a transform.

They belong to no unit, so each rank would train them with its own gradients. The next forward refuses them, and so does
`zf.check`. A forward first compares the children and the numbers of parameters of all modules with those of the forward
before; only if they differ does it look at each parameter.
"""

from __future__ import annotations

from itertools import chain, repeat
from operator import is_

from torch import nn
from torch.jit import ScriptModule

from zero_fn.errors import PlacementError
from zero_fn.runtime.slot import slot_of
from zero_fn.runtime.transformed import Transformed

__all__ = ["forget_if_changed", "forget_members", "refuse_late", "refuse_new"]

_MEMBERS = "_zero_fn_members"  # in the `__dict__` of the transformed module: only that may keep its modules alive


class _Members:
    """The children and parameters of all modules of a model, as they were at some time."""

    __slots__ = ("_found", "_modules", "_parameters")

    def __init__(self, root: nn.Module) -> None:
        modules = [module.__dict__ for module in root.modules() if not isinstance(module, ScriptModule)]
        self._modules = [module["_modules"] for module in modules]
        self._parameters = [module["_parameters"] for module in modules]
        self._found = self._now()

    def are_as_before(self) -> bool:
        """Whether modules hold the same children, and parameters in the same places. Takes 0.1 us for each module."""
        return self._now() == self._found

    def _now(self) -> tuple[list[nn.Module], list[int], list[bool]]:
        """All children; the number of parameters of each module; which parameters are None."""
        parameters = chain.from_iterable(map(dict.values, self._parameters))
        return (
            [*chain.from_iterable(map(dict.values, self._modules))],
            [*map(len, self._parameters)],
            [*map(is_, parameters, repeat(None))],
        )


def forget_members(module: nn.Module) -> None:
    """Forgets what the modules below this one held: the next forward looks at each parameter."""
    module.__dict__.pop(_MEMBERS, None)


def forget_if_changed(transformed: Transformed) -> None:
    """Forgets what the modules of a model held if they hold something else now, so that removed modules are freed."""
    root = transformed.root()
    members = root.__dict__.get(_MEMBERS) if root is not None else None
    if root is not None and members is not None and not members.are_as_before():
        forget_members(root)


def refuse_new(transformed: Transformed) -> None:
    """Refuses what was added to a model since the last call; see `refuse_late`."""
    root = transformed.root()
    if root is not None and _MEMBERS not in root.__dict__ and refuse_late(transformed):
        root.__dict__[_MEMBERS] = _Members(root)


def refuse_late(transformed: Transformed) -> bool:
    """Looks at all parameters of a transformed model, unless whole parameters are registered in their place. Units have
    followed moved parameters before.

    Returns:
        Whether it looked.

    Raises:
        PlacementError: A parameter belongs to no unit, or to another place of the model.
    """
    root = transformed.root()
    if root is None or any(unit.shown.leaves is not None for unit in transformed.live_units()):
        return False
    for name, module in root.named_modules():
        for attribute, parameter in module._parameters.items():
            if isinstance(parameter, nn.Parameter) and not _is_known(parameter, module, attribute):
                raise PlacementError(
                    f"{f'{name}.{attribute}'.lstrip('.')!r} was added after the transform.",
                    parameter=f"{str(parameter.dtype).removeprefix('torch.')}{list(parameter.shape)}",
                    why="it would be trained on each rank alone and never reduced",
                    fix="add parameters and modules before the transform, or transform what you add: "
                    "zf.shard_params(added, axis)",
                )
    return True


def _is_known(parameter: nn.Parameter, module: nn.Module, attribute: str) -> bool:
    slot = slot_of(parameter)
    places = slot.places if slot is not None else ()
    return any(place._module() is module and place.attribute == attribute for place in places)
