"""Functions, values and exceptions as bytes that another process can read: cloudpickle, with refusals that help."""

from __future__ import annotations

import contextlib
import importlib
import io
import pickle
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import CodeType, ModuleType
from typing import Any

import cloudpickle  # type: ignore[import-untyped]
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from zero_fn.errors import StateError, ZeroError

__all__ = ["SendError", "brief", "dumps", "dumps_exception", "loads", "pack", "sentence"]


class SendError(ZeroError, TypeError):
    """A function, an argument or a result cannot move between processes."""


def pack(
    fn: Callable[..., Any], args: Sequence[object], kwargs: dict[str, object], by_value: ModuleType | None = None
) -> bytes:
    """A call as bytes; `loads` gives `(fn, args, kwargs)`.

    Args:
        fn: By reference if it is importable, else by value, with the globals and closures it uses.
        args: Positional arguments.
        kwargs: Keyword arguments.
        by_value: A module whose functions and classes travel by value although they are importable.

    Raises:
        SendError: Something cannot be pickled; names it.
    """
    was_registered = by_value is not None and by_value.__name__ in cloudpickle.list_registry_pickle_by_value()
    if by_value is not None and not was_registered:
        cloudpickle.register_pickle_by_value(by_value)
    try:
        return dumps((fn, tuple(args), kwargs))
    except Exception as error:
        named = {"the function": fn, **{f"argument {i}": a for i, a in enumerate(args)}, **kwargs}
        culprit = next((name for name, value in named.items() if not _is_picklable(value)), "the arguments together")
        raise SendError(
            sentence(f"{culprit} cannot be sent to the ranks."),
            value=brief(named.get(culprit)),
            error=f"{type(error).__name__}: {error}",
            fix="build it inside the function, on each rank",
        ) from error
    finally:
        if by_value is not None and not was_registered:
            cloudpickle.unregister_pickle_by_value(by_value)


class _Pickler(cloudpickle.Pickler):  # type: ignore[misc]
    """Refuses what is bound to the processes of a job: it would arrive, and fail obscurely at its first use."""

    def reducer_override(self, value: object) -> object:
        if isinstance(value, DeviceMesh | dist.ProcessGroup):
            raise pickle.PicklingError(f"a {type(value).__name__}, alone or in a DTensor, belongs to its ranks")
        if isinstance(value, ModuleType) and type(value) is not ModuleType and sys.modules.get(value.__name__) is value:
            return importlib.import_module, (value.__name__,)  # `torch.ops`, which cloudpickle takes for an object
        if isinstance(value, CodeType):
            return _code_of, (value.co_filename, *self.dispatch_table[CodeType](value))
        return super().reducer_override(value)


def _code_of(filename: str, make: Callable[..., CodeType], args: tuple[object, ...]) -> CodeType:
    """Code that says which file it is from, so that tracebacks of ranks show lines: cloudpickle forgets it since 3.1.3."""
    return make(*args).replace(co_filename=filename)


def dumps(value: object) -> bytes:
    """Any value as bytes; what pickle raises, for what cannot be, and for meshes and process groups."""
    buffer = io.BytesIO()
    _Pickler(buffer).dump(value)
    return buffer.getvalue()


def loads(pickled: bytes) -> Any:
    """The value that `dumps` or `pack` made bytes of."""
    return cloudpickle.loads(pickled)


def _is_picklable(value: object) -> bool:
    try:
        dumps(value)
    except Exception:
        return False
    return True


def brief(value: object) -> str:
    """The first line of `repr`, cut to 80 characters."""
    try:
        text = repr(value)
    except Exception:
        text = object.__repr__(value)
    text = text.splitlines()[0] if text else text
    return text if len(text) <= 80 else f"{text[:77]}..."


def dumps_exception(error: BaseException) -> bytes:
    """An exception as bytes, of its own type if that can be, also when its `__init__` takes more than `args`."""
    attributes = {name: value for name, value in vars(error).items() if _is_picklable(value)}
    args = tuple(value if _is_picklable(value) else brief(value) for value in error.args)
    for candidate in (error, _Rebuilt(type(error), args, attributes)):
        with contextlib.suppress(Exception):
            pickled = dumps(candidate)
            if type(loads(pickled)) is type(error):
                return pickled
    unknown = StateError(
        f"A rank raised an exception that cannot be sent: {type(error).__name__}.",
        message=brief(str(error)),
        fix="the traceback of the rank is the cause of this error",
    )
    return dumps(unknown)


@dataclass(frozen=True, slots=True)
class _Rebuilt:
    """Pickles as an exception that is rebuilt without its `__init__`."""

    cls: type[BaseException]
    args: tuple[object, ...]
    attributes: dict[str, object]

    def __reduce__(self) -> tuple[object, ...]:
        return _rebuild, (self.cls, self.args, self.attributes)


def _rebuild(cls: type[BaseException], args: tuple[object, ...], attributes: dict[str, object]) -> BaseException:
    error = cls.__new__(cls, *args)
    error.args = args
    error.__dict__.update(attributes)
    return error


def sentence(text: str) -> str:
    """The text with a capital at its start and the rest unchanged."""
    return text[0].upper() + text[1:]
