"""Operations on DTensors that are done in another way, in the table in which DTensor looks for operations of its own.

Several may stand around one operation: each is given what the next one does. Most of them leave tensors alone that do not
lie on a mesh that a transform was given.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeGuard

from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

__all__ = ["Otherwise", "around", "is_ours", "note_mesh"]


class Otherwise:
    """An operation as it is done by what stands next to the one who is asked, and at last by DTensor or who asked before us.

    Attributes:
        operation: The overload of torch.
    """

    __slots__ = ("_depth", "operation")

    def __init__(self, operation: Any, depth: int) -> None:
        self.operation, self._depth = operation, depth

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        acts = _around[self.operation]
        if self._depth < len(acts):
            return acts[self._depth](Otherwise(self.operation, self._depth + 1), args, kwargs)
        if self.operation in _others:
            return _others[self.operation](self.operation, args, kwargs)
        _table().pop(self.operation, None)  # from here on DTensor's own way
        try:
            return self.operation(*args, **kwargs)
        finally:
            _table()[self.operation] = _run

    def named(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
        """Its arguments by name, in the order of its schema, with defaults."""
        arguments = self.operation._schema.arguments
        given = {argument.name: argument.default_value for argument in arguments}
        return given | dict(zip(given, args, strict=False)) | kwargs


Act = Callable[[Otherwise, tuple[Any, ...], dict[str, Any]], object]
"""Takes the operation as it would be done otherwise, and its arguments."""

_around: dict[Any, list[Act]] = {}
_others: dict[Any, Callable[..., object]] = {}  # what stood in the table before
_meshes: set[DeviceMesh] = set()


def note_mesh(mesh: DeviceMesh) -> None:
    """From now on tensors of this mesh are ours."""
    _meshes.add(mesh)


def is_ours(tensor: object) -> TypeGuard[DTensor]:
    """Whether it is a DTensor on a mesh that a transform was given."""
    return isinstance(tensor, DTensor) and tensor.device_mesh in _meshes


def around(act: Act, *operations: Any) -> None:
    """From now on `act` is called in place of operations on DTensors. Does nothing the second time."""
    for operation in operations:
        if operation not in _around and operation in _table():
            _others[operation] = _table()[operation]
        acts = _around.setdefault(operation, [])
        if act not in acts:
            acts.append(act)
        _table()[operation] = _run


def _run(operation: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> object:
    return Otherwise(operation, 0)(*args, **kwargs)


def _table() -> dict[Any, Callable[..., Any]]:
    return DTensor._op_dispatcher._custom_op_handlers
