"""Operations on DTensors that are done in another way, in the table in which DTensor looks for operations of its own.

Several may stand around one operation: each is given what the next one does. Most of them leave tensors alone that do not
lie on a mesh that a transform was given.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, TypeGuard

from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

__all__ = ["Around", "around", "is_ours", "note_mesh"]

Around = Callable[[Callable[..., object], tuple[Any, ...], dict[str, Any]], object]
"""Takes the operation as it would be done otherwise, and its arguments."""

_around: dict[Any, list[Around]] = {}
_meshes: set[DeviceMesh] = set()


def note_mesh(mesh: DeviceMesh) -> None:
    """From now on tensors of this mesh are ours."""
    _meshes.add(mesh)


def is_ours(tensor: object) -> TypeGuard[DTensor]:
    """Whether it is a DTensor on a mesh that a transform was given."""
    return isinstance(tensor, DTensor) and tensor.device_mesh in _meshes


def around(operation: Any, act: Around) -> None:
    """From now on `act` is called in place of an operation on DTensors. Does nothing the second time.

    An operation that others have an own way for is left to them.
    """
    if operation not in _around and operation in _table():
        return
    acts = _around.setdefault(operation, [])
    if act not in acts:
        acts.append(act)
    _table()[operation] = _run


def _run(operation: Callable[..., object], args: tuple[Any, ...], kwargs: dict[str, Any]) -> object:
    return _nested(operation, 0, *args, **kwargs)


def _nested(operation: Callable[..., object], depth: int, *args: Any, **kwargs: Any) -> object:
    acts = _around[operation]
    if depth < len(acts):
        return acts[depth](partial(_nested, operation, depth + 1), args, kwargs)
    del _table()[operation]  # from here on DTensor's own way
    try:
        return operation(*args, **kwargs)
    finally:
        _table()[operation] = _run


def _table() -> dict[Any, Callable[..., Any]]:
    return DTensor._op_dispatcher._custom_op_handlers
