"""Functions, values and exceptions as bytes for another process: cloudpickle,
with errors that say what to do."""

from __future__ import annotations

import builtins
import importlib
import io
import pickle
import sys
import types
from collections.abc import Callable
from importlib.machinery import EXTENSION_SUFFIXES
from types import CodeType, ModuleType

import cloudpickle  # type: ignore[import-untyped]
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from zero_fn.errors import ZeroError

__all__ = ["SendError", "dumps", "dumps_exception"]

_FIX = (
    "build it inside the function, on each rank; return plain tensors and numbers: "
    "value.full_tensor(), value.item()"
)


class SendError(ZeroError, TypeError):
    """A function, an argument or a result cannot move between processes."""


class _Pickler(cloudpickle.Pickler):  # type: ignore[misc]
    def reducer_override(self, value: object) -> object:
        # It would fail obscurely at its first use.
        if isinstance(value, DeviceMesh | dist.ProcessGroup):
            raise pickle.PicklingError(
                f"a {type(value).__name__}, alone or in a DTensor, belongs to its ranks"
            )
        if isinstance(value, BaseException) and type(value).__reduce__ is BaseException.__reduce__:
            # `__init__` may need more than `args`.
            return _rebuild, (type(value), value.args, vars(value))
        if (
            isinstance(value, ModuleType)
            and type(value) is not ModuleType
            and sys.modules.get(value.__name__) is value
        ):
            # `torch.ops`, which cloudpickle pickles by value.
            return importlib.import_module, (value.__name__,)
        # cloudpickle 3.1.3 drops the file name, by which tracebacks find source lines.
        if isinstance(value, CodeType):
            return _code_of, (value.co_filename, *self.dispatch_table[CodeType](value))
        if isinstance(value, type) and value.__module__ == "builtins" and not _is_of_python(value):
            # A compiled class, which does not say where it is.
            return _imported, (_module_with(value), value.__name__)
        return super().reducer_override(value)


def _is_of_python(cls: type) -> bool:
    return vars(builtins).get(cls.__name__) is cls or any(
        cls is other for other in vars(types).values()
    )


def _module_with(cls: type) -> str:
    """The module from which a class can be imported: the compiled one
    that makes it, if there is one.

    Raises:
        PicklingError: There is none. cloudpickle would send the class by value,
            and the ranks could not build it.
    """
    holders = {
        name: vars(module)
        for name, module in sys.modules.copy().items()
        if isinstance(module, ModuleType)
    }
    names = [
        name
        for name, held in holders.items()
        if name != "__main__" and held.get(cls.__name__) is cls
    ]
    if not names:
        raise pickle.PicklingError(
            f"the class {cls.__name__!r} is compiled, and no module has it under this name"
        )
    return max(
        names,
        key=lambda name: str(holders[name].get("__file__")).endswith(tuple(EXTENSION_SUFFIXES)),
    )


def _imported(module: str, name: str) -> object:
    return vars(importlib.import_module(module))[name]


def _rebuild(
    cls: type[BaseException], args: tuple[object, ...], attributes: dict[str, object]
) -> BaseException:
    error = cls.__new__(cls, *args)
    error.args = args
    error.__dict__.update(attributes)
    return error


def _code_of(filename: str, make: Callable[..., CodeType], args: tuple[object, ...]) -> CodeType:
    return make(*args).replace(co_filename=filename)


def dumps(value: object, what: str = "A value") -> bytes:
    """A value as bytes, or a `SendError` about `what`.

    Importable functions go by name, others with what they refer to.
    """
    buffer = io.BytesIO()
    try:
        _Pickler(buffer).dump(value)
    except Exception as error:
        raise SendError(
            f"{what} cannot be sent.", error=f"{type(error).__name__}: {error}", fix=_FIX
        ) from error
    return buffer.getvalue()


def dumps_exception(error: BaseException) -> bytes:
    """An exception as bytes.

    If it cannot be sent or rebuilt, a `SendError` that quotes it, as bytes.
    """
    try:
        pickled = dumps(error)
        pickle.loads(pickled)
    except Exception as failed:
        raised, why = (
            f"{type(each).__name__}: {each}" for each in (error, failed.__cause__ or failed)
        )
        return dumps(
            SendError("What a rank raised cannot be sent.", raised=raised, error=why, fix=_FIX)
        )
    return pickled
