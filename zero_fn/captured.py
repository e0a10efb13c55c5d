"""Functions in a module that refer to it by a closure: in the copy they refer to the copy.

    self.act = lambda x: F.linear(x, self.inner.weight)
    old = layer.forward; layer.forward = lambda x: 2 * old(x)
    layer.register_forward_hook(lambda module, args, output: output * model.scale)

`copy.deepcopy` takes functions as they are, so those of a copied module would go on with the parameters of before the
transform: they would get the gradients, and nobody would step them. Here cells, defaults and arguments that reach a copied
module are made anew; all others stay shared. A parameter itself that is held in such a place cannot follow, and is refused.
"""

from __future__ import annotations

import copy
import functools
from collections import deque
from collections.abc import Iterator, Mapping
from types import CellType, FunctionType, MethodType, SimpleNamespace
from typing import Any

from torch import Tensor, nn

from zero_fn.errors import PlacementError

__all__ = ["Captured"]

_REGISTERED = ("_parameters", "_buffers", "_modules")
_ATOMS = frozenset((bool, int, float, str, type(None), Tensor))


class Captured:
    """What functions in a copied module refer to.

    Args:
        copies: The copy of each module, by the `id` of the original.
        parameters: Names of trained parameters, which the originals and the copies share still, by `id`.
        memo: Of the deep copy.
    """

    def __init__(
        self, copies: Mapping[int, nn.Module], parameters: Mapping[int, str], memo: dict[int, Any] | None = None
    ) -> None:
        self._copies, self._parameters, self._memo = copies, parameters, memo
        self._made: dict[int, Any] = {}

    def rebind(self, twin: nn.Module) -> None:
        """Lets functions in attributes and hooks of a copied module refer to copies.

        Raises:
            PlacementError: A function, or a container that is not a flat list or dict of the module that registers it, holds
                a trained parameter.
        """
        for name, child in twin.named_modules():
            own = {id(parameter) for parameter in child._parameters.values()}
            for attribute, value in child.__dict__.items():
                if type(value) not in _ATOMS and attribute not in _REGISTERED and not _is_empty(value):
                    self._refuse_parameters(f"{name}.{attribute}".lstrip("."), value, own)
                    child.__dict__[attribute] = self.rebound(value)

    def rebound(self, value: Any) -> Any:
        """The same, with copies in place of originals; the value itself if it reaches none."""
        if id(value) in self._made:
            return self._made[id(value)]
        if not any(id(found) in self._copies for found in _reached(value)):
            return value
        if isinstance(value, nn.Module):
            return self._copies[id(value)]
        if isinstance(value, FunctionType):
            return self._function(value)
        if isinstance(value, MethodType):
            return MethodType(self.rebound(value.__func__), self.rebound(value.__self__))
        if isinstance(value, functools.partial):
            arguments = (self.rebound(argument) for argument in value.args)
            named = {key: self.rebound(argument) for key, argument in value.keywords.items()}
            twin = type(value)(self.rebound(value.func), *arguments, **named)
            vars(twin).update({key: self.rebound(attribute) for key, attribute in vars(value).items()})
            return twin
        return self._container(value)

    def _function(self, function: FunctionType) -> FunctionType:
        cells = function.__closure__
        changed = {i: CellType() for i, cell in enumerate(cells or ()) if self._is_stale(cell)}
        closure = None if cells is None else tuple(changed.get(i, cell) for i, cell in enumerate(cells))
        twin = FunctionType(function.__code__, function.__globals__, function.__name__, None, closure)
        self._made[id(function)] = twin  # first: it may refer to itself
        for i, cell in changed.items():
            assert cells is not None
            cell.cell_contents = self.rebound(cells[i].cell_contents)
        twin.__defaults__ = self.rebound(function.__defaults__)
        twin.__kwdefaults__ = self.rebound(function.__kwdefaults__)
        twin.__dict__.update({key: self.rebound(value) for key, value in vars(function).items()})
        for attribute in ("__qualname__", "__module__", "__doc__", "__annotations__"):
            setattr(twin, attribute, getattr(function, attribute))
        return twin

    def _is_stale(self, cell: CellType) -> bool:
        return any(id(found) in self._copies for content in _content(cell) for found in _reached(content))

    def _container(self, value: Any) -> Any:
        """Another one: the original's functions may hold this one too."""
        if isinstance(value, tuple | set | frozenset):
            items = [self.rebound(item) for item in value]
            return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
        self._made[id(value)] = twin = copy.copy(value)
        names: Any = vars(twin) if isinstance(twin, SimpleNamespace) else twin
        for key, item in list(names.items() if isinstance(names, dict) else enumerate(names)):
            names[key] = self.rebound(item)
        return twin

    def _refuse_parameters(self, path: str, value: object, own: set[int]) -> None:
        flat = list(value) if isinstance(value, list) else list(value.values()) if isinstance(value, dict) else []
        followed = own & {id(item) for item in flat}  # such a list follows its parameters: see `Place`
        for found in _reached(value):
            if id(found) in self._parameters and id(found) not in followed:
                fqn = self._parameters[id(found)]
                raise PlacementError(
                    f"{path!r} holds the parameter {fqn!r} itself.",
                    parameter=fqn,
                    why="a transform puts another parameter in its place, which a closure, a partial function or a container "
                    "does not follow: it would go on with the old values, and nobody would train them",
                    fix="read it where it is used: lambda x: F.linear(x, self.layer.weight); a flat list or dict of the "
                    "module that registers the parameters follows them",
                )


def _is_empty(value: object) -> bool:
    """Most attributes of modules are empty dicts of hooks."""
    return isinstance(value, dict | list | tuple) and not value


def _content(cell: CellType) -> list[object]:
    try:
        return [cell.cell_contents]
    except ValueError:  # nothing was assigned yet
        return []


def _reached(value: object) -> Iterator[object]:
    """Modules and parameters that a value holds: in closures, partial functions and containers, but not inside objects."""
    return (found for found in _held(value) if isinstance(found, nn.Module | Tensor))


def _held(value: object, seen: set[int] | None = None) -> Iterator[object]:
    seen = set() if seen is None else seen
    if id(value) in seen:
        return
    seen.add(id(value))
    yield value
    for part in _parts(value):
        yield from _held(part, seen)


def _parts(value: object) -> list[Any]:
    if isinstance(value, FunctionType):
        cells = [content for cell in value.__closure__ or () for content in _content(cell)]
        return [*cells, value.__defaults__, value.__kwdefaults__, *vars(value).values()]
    if isinstance(value, MethodType):
        return [value.__func__, value.__self__]
    if isinstance(value, functools.partial):
        return [value.func, *value.args, *value.keywords.values(), *vars(value).values()]
    if isinstance(value, dict):
        return list(value.values())
    if isinstance(value, list | tuple | deque | set | frozenset):
        return list(value)
    if isinstance(value, SimpleNamespace):
        return list(vars(value).values())
    return []
