"""Functions in a module that hold modules or parameters of it: refused,
because a copy of the module does not copy them.

    self.act = lambda x: F.linear(x, self.inner.weight)         refused
    old = layer.forward; layer.forward = lambda x: 2 * old(x)   followed: a forward that is replaced
                                                                is a forward

`copy.deepcopy` takes functions as they are. A function in a copied module would go on calling the
old modules: these would get the gradients, and no optimizer would step them. What `deepcopy` does
follow may hold modules: bound methods, partial functions, containers and objects. Parameters are
followed in flat lists and dicts of the module that registers them.
"""

from __future__ import annotations

import functools
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from types import CellType, FunctionType, MethodType, SimpleNamespace
from typing import Any

from torch import Tensor, nn

from zero_fn.errors import LayoutError, PlacementError
from zero_fn.runtime.gradient_hooks import gradient_hooks, parameter_hooks
from zero_fn.values.units import NamedParameter

__all__ = ["follow_forwards", "rebound", "refuse_captured"]

_COMPILED = "_torchdynamo_orig_callable"  # what functions that torch.compile made have
_REGISTERED = ("_parameters", "_buffers", "_modules")
# torchao replaces it on modules whose weight it quantized: a text, and nothing that computes.
_PRINTED = ("extra_repr",)
_ATOMS = frozenset((bool, int, float, str, type(None), Tensor))


def refuse_captured(
    twin: nn.Module, modules: Mapping[int, str], parameters: Sequence[NamedParameter]
) -> None:
    """Refuses functions that would go on with old modules or parameters, in attributes,
    hooks, and hooks of parameters.

    Raises:
        LayoutError: A function holds an old module, in its closure or as a default.
        PlacementError: A function or a container holds a trained parameter.
    """
    trained = {
        id(named.parameter): named.fqn for named in parameters if named.parameter.requires_grad
    }
    for name, child in twin.named_modules():
        own = {id(parameter) for parameter in child._parameters.values()}
        for attribute, value in child.__dict__.items():
            if type(value) in _ATOMS or attribute in (*_REGISTERED, *_PRINTED) or _is_empty(value):
                continue
            path, followed = f"{name}.{attribute}".lstrip("."), own & _flat(value)
            for found in _held(value):
                _refuse_module(path, found, modules)
                if id(found) in trained and id(found) not in followed:
                    raise _holds_parameter(path, trained[id(found)])
    for named in parameters:
        for hook in (*gradient_hooks(named.parameter), *parameter_hooks(named.parameter)):
            for found in () if _is_bound(hook) else _held(hook):
                _refuse_module(f"a hook of {named.fqn}", found, modules)


def follow_forwards(twin: nn.Module, memo: Mapping[int, Any]) -> None:
    """Rebuilds each function that stands in place of a module's `forward`,
    so that it holds modules of the copy.

    trl, accelerate and profilers wrap a forward like that: their function holds the module, or the
    method that it replaces. `memo`: the copy of each module, by `id`.
    """
    for child in twin.modules():
        own = child.__dict__.get("forward")
        if own is not None and _is_stale(own, memo):
            child.__dict__["forward"] = _following(own, memo, {})


def _is_stale(value: object, memo: Mapping[int, Any]) -> bool:
    """Whether a value holds old modules."""
    return any(isinstance(found, nn.Module) and id(found) in memo for found in _held(value))


def _following(value: Any, memo: Mapping[int, Any], made: dict[int, Any]) -> Any:
    """The same function, method or partial function, with modules of the copy in it.

    A function of torch.compile stays as it is, and is refused later.
    """
    if isinstance(value, nn.Module):
        return memo.get(id(value), value)
    if isinstance(value, MethodType):
        return MethodType(
            _following(value.__func__, memo, made), _following(value.__self__, memo, made)
        )
    if isinstance(value, functools.partial):
        args = [_following(arg, memo, made) for arg in value.args]
        named = {name: _following(arg, memo, made) for name, arg in value.keywords.items()}
        partial = functools.partial(_following(value.func, memo, made), *args, **named)
        partial.__dict__.update(
            (name, _following(each, memo, made)) for name, each in vars(value).items()
        )
        return partial
    if (
        not isinstance(value, FunctionType)
        or hasattr(value, _COMPILED)
        or not _is_stale(value, memo)
    ):
        return value
    if id(value) not in made:
        cells = [CellType() for _ in value.__closure__ or ()]
        twin = FunctionType(value.__code__, value.__globals__, value.__name__, None, tuple(cells))
        made[id(value)] = functools.update_wrapper(twin, value)  # first: it may hold itself
        for cell, before in zip(cells, value.__closure__ or (), strict=True):
            for content in _content(before):
                cell.cell_contents = _following(content, memo, made)
        twin.__defaults__ = (
            tuple(_following(each, memo, made) for each in value.__defaults__ or ()) or None
        )
        twin.__kwdefaults__ = value.__kwdefaults__ and {
            name: _following(each, memo, made) for name, each in value.__kwdefaults__.items()
        }
        twin.__dict__.clear()
        twin.__dict__.update(
            (name, _following(each, memo, made)) for name, each in value.__dict__.items()
        )
    return made[id(value)]


def rebound(hook: Any, memo: Mapping[int, Any]) -> Any:
    """A hook of a parameter, for the parameter that takes its place:
    a method of a copied module becomes one of the copy."""
    if _is_bound(hook):
        return MethodType(hook.__func__, memo.get(id(hook.__self__), hook.__self__))
    return hook


def _is_bound(hook: object) -> bool:
    return isinstance(hook, MethodType) and isinstance(hook.__self__, nn.Module)


def _refuse_module(path: str, found: object, modules: Mapping[int, str]) -> None:
    if isinstance(found, nn.Module) and id(found) in modules:
        raise LayoutError(
            f"{path!r} is, or holds, a function that holds the module "
            f"{modules[id(found)] or 'root'!r}.",
            module=type(found).__name__,
            why="a transform returns a copy of the module, and the function would still call the "
            "old module: that one would get the gradients, and no optimizer trains it",
            fix="take the module from the argument, as a hook can; or self.act = "
            "functools.partial(act, self.inner), or types.MethodType(act, self), which a "
            "transform copies with the module. Call torch.compile after the transform",
        )


def _holds_parameter(path: str, fqn: str) -> PlacementError:
    return PlacementError(
        f"{path!r} holds the parameter {fqn!r} itself.",
        parameter=fqn,
        why="a transform puts a new parameter in its place, and a closure, a partial function or "
        "a container keeps the old one: it would read old values, which no optimizer trains",
        fix="hold the module, and read its weight when it is used: functools.partial(act, "
        "self.layer), and layer.weight in act; a flat list or dict in the module that registers "
        "the parameters works. Call torch.compile after the transform",
    )


def _flat(value: object) -> set[int]:
    """The ids of what a flat list or dict holds. Such a one follows its parameters, see `Place`."""
    items = value if isinstance(value, list) else value.values() if isinstance(value, dict) else ()
    return set(map(id, items))


def _is_empty(value: object) -> bool:
    """Most attributes of modules are empty dicts of hooks."""
    return isinstance(value, dict | list | tuple) and not value


def _held(value: object, seen: set[int] | None = None) -> Iterator[object]:
    """A value and all that it holds, in closures, partial functions and containers,
    but not inside objects."""
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


def _content(cell: CellType) -> list[object]:
    try:
        return [cell.cell_contents]
    except ValueError:  # nothing was assigned yet
        return []
