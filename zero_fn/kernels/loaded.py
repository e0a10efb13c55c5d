"""The compiled kernels of this process, or why there are none."""

from __future__ import annotations

import ctypes
import tempfile
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from zero_fn.kernels.cache import cache_folder, stored
from zero_fn.kernels.compiler import Compiler, CompilerError, found_compiler

__all__ = ["Library", "library"]

_SOURCES = tuple(sorted(Path(__file__).parent.glob("*.c")))


@dataclass(frozen=True, slots=True)
class Library:
    """Kernels, or their absence. Printed, it says which.

    Attributes:
        functions: The loaded library; its calls do not hold the interpreter. None if there is none.
        kept: The same for calls that do hold it, because they are shorter than the 5 ms that it may take to have it back
            from a thread that runs Python.
        says: Who compiled it, or why nobody did.
    """

    functions: ctypes.CDLL | None
    kept: ctypes.PyDLL | None
    says: str

    def __str__(self) -> str:
        return f"compiled kernels ({self.says})" if self.functions is not None else f"no kernels: {self.says}"


@cache
def library() -> Library:
    """The kernels, compiled and loaded at the first call of the process. Never raises: without them all goes on, slower."""
    try:
        compiler = found_compiler()
        functions = _loaded(compiler)
        return Library(functions, ctypes.PyDLL(functions._name, handle=functions._handle), compiler.version)
    except CompilerError as error:
        return Library(None, None, str(error))


def _loaded(compiler: Compiler) -> ctypes.CDLL:
    folder = cache_folder()
    if folder is not None:
        path = folder / f"{compiler.key(_SOURCES)}.so"
        for anew in (False, True):  # anew: the file is damaged, by a full disk or a crash
            try:
                stored(path, lambda target: compiler.compile(_SOURCES, target), anew=anew)
                return ctypes.CDLL(str(path))
            except OSError:  # not writable after all, or not to be loaded from there
                continue
    try:
        with tempfile.TemporaryDirectory(prefix="zero_fn.") as own:
            path = Path(own) / "kernels.so"
            compiler.compile(_SOURCES, path)
            return ctypes.CDLL(str(path))
    except OSError as error:
        raise CompilerError(f"what {compiler.command[0]} made could not be loaded: {error}") from error
