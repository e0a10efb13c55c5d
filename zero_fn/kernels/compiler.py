"""The compiled kernels of this process, or the reason why there are none.

The machine's C compiler makes a library of the sources beside this file, once for each user, and a
folder of the user keeps it. Code that is loaded from there runs with the rights of this process, so
a folder or file that another user owns or may write is not used. Without such a folder (a read-only
home, somebody else's) each process compiles for itself.

[Note: the digest in the name] The name of a kept library ends in the digest of its bytes. The
system loads a library that was cut short (a full disk, a power cut) without complaint, and the
process dies of SIGBUS when it touches a missing page. So a file whose bytes do not have the digest
in its name is removed and compiled anew.

A kernel is called by `call_kernel`, if `has_kernels` of the tensors that it reads and writes.
"""

from __future__ import annotations

import ctypes
import hashlib
import importlib.util
import os
import platform
import shlex
import shutil
import stat
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import torch
import xxhash
from torch import Tensor

__all__ = ["Library", "call_kernel", "has_kernels", "library"]

_SOURCES = tuple(sorted(Path(__file__).parent.glob("*.[ch]")))

_LANGUAGE = ("-std=c11", "-fPIC", "-shared", "-pthread")
# `-ffp-contract=off`: the sources say which products and sums share a rounding,
# since that is part of the result.
_ARITHMETIC = ("-O3", "-march=native", "-ffp-contract=off", "-fno-math-errno", "-fno-trapping-math")
_FLAGS = (*_LANGUAGE, *_ARITHMETIC)
_LIBRARIES = ("-lm",)
_DEADLINE_S = 120


@dataclass(frozen=True, slots=True)
class Library:
    """The kernels of this process, or the reason why there are none. Printed, it says so."""

    # The loaded library, whose calls release the interpreter lock; None if there is none.
    functions: ctypes.CDLL | None
    says: str  # the version of the compiler, or the reason

    def __str__(self) -> str:
        if self.functions is not None:
            return f"compiled kernels ({self.says})"
        return f"no kernels: {self.says}"


@cache
def library() -> Library:
    """The kernels, compiled and loaded at the first call of the process.

    Never raises: without them torch does their work.
    """
    try:
        compiler = found_compiler()
        return Library(_loaded(compiler), compiler.version)
    except CompilerError as error:
        return Library(None, str(error))


def has_kernels(*tensors: Tensor) -> bool:
    """Whether there are kernels, and all these tensors are in memory that they read.

    Simulated tensors are not.
    """
    is_real_memory = all(type(each) is Tensor and each.is_cpu for each in tensors)
    return is_real_memory and library().functions is not None


def call_kernel(name: str, *arguments: object, written: Sequence[Tensor | None] = ()) -> int:
    """Calls a kernel, where there is one, and returns what it does.

    Args:
        name: The function in C.
        arguments: A tensor becomes its address, a list of them an array of addresses that NULL
            ends, None is NULL, and an integer is int64_t. Others go as ctypes has them.
        written: What the kernel writes behind the back of torch. Autograd hears of it, so that it
            refuses to use values that it saved before. None is passed over.
    """
    found: int = getattr(library().functions, name)(*map(_in_c, arguments))
    torch.autograd.graph.increment_version(
        [each for each in written if each is not None and not each.is_inference()]
    )
    return found


def _in_c(argument: object) -> object:
    if isinstance(argument, Tensor):
        return ctypes.c_void_p(argument.data_ptr())
    if isinstance(argument, list):
        return _addresses(len(argument) + 1)(*[each.data_ptr() for each in argument])
    return ctypes.c_int64(argument) if isinstance(argument, int) else argument


@cache  # Python would make the type anew for each call
def _addresses(count: int) -> type[ctypes.Array[ctypes.c_void_p]]:
    return ctypes.c_void_p * count


def _loaded(compiler: Compiler) -> ctypes.CDLL:
    folder = cache_folder()
    if folder is not None:
        # The folder is not writable after all, or libraries in it may not be loaded.
        with suppress(OSError):
            return ctypes.CDLL(str(_kept_in(folder, compiler)))
    try:
        with tempfile.TemporaryDirectory(prefix="zero_fn.") as own:
            return ctypes.CDLL(str(_kept_in(Path(own), compiler)))
    except OSError as error:
        raise CompilerError(
            f"what {compiler.command[0]} made could not be loaded: {error}"
        ) from error


def _kept_in(folder: Path, compiler: Compiler) -> Path:
    """The library in a folder, compiled into it if it is not there.

    Processes that do so at once see all of it or nothing.
    """
    key = compiler.key(_SOURCES)
    for found in folder.glob(f"{key}-*.so"):
        if is_ours(found) and found.name == f"{key}-{_digest(found)}.so":
            return found
        found.unlink(missing_ok=True)  # [Note: the digest in the name]
    with tempfile.TemporaryDirectory(prefix=".", dir=folder) as own:
        made = Path(own) / "kernels.so"
        compiler.compile(_SOURCES, made)
        made.chmod(0o700)
        with made.open("rb") as file:
            os.fsync(file.fileno())
        return made.replace(folder / f"{key}-{_digest(made)}.so")


def _digest(path: Path) -> str:
    return xxhash.xxh3_128_hexdigest(path.read_bytes())


def cache_folder() -> Path | None:
    """The folder of compiled libraries, made if it is missing;
    None if it cannot be this user's alone."""
    base = os.environ.get("XDG_CACHE_HOME")
    with suppress(OSError, RuntimeError):  # RuntimeError: no home
        folder = (Path(base) if base else Path.home() / ".cache") / "zero_fn" / "kernels"
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        if is_ours(folder) and os.access(folder, os.R_OK | os.W_OK | os.X_OK):
            return folder
    return None


def is_ours(path: Path) -> bool:
    """Whether this user owns a file or folder, and no other user may write it.

    Links are not followed.
    """
    try:
        found = path.lstat()
    except OSError:
        return False
    return (
        not stat.S_ISLNK(found.st_mode)
        and found.st_uid == os.getuid()
        and not found.st_mode & (stat.S_IWGRP | stat.S_IWOTH)
    )


class CompilerError(Exception):
    """There is no compiler, or it fails. `library` catches this and shows the reason."""


@dataclass(frozen=True, slots=True)
class Compiler:
    """A C compiler."""

    command: tuple[str, ...]
    version: str  # the first line that it prints for `--version`

    def key(self, sources: Sequence[Path]) -> str:
        """A digest of all that decides what it makes of these sources: them,
        the flags, itself, and the processor."""
        digest = hashlib.sha256()
        for part in (*self.command, self.version, *_FLAGS, *_LIBRARIES, cpu_identity()):
            digest.update(part.encode() + b"\0")
        for source in sources:
            digest.update(source.read_bytes() + b"\0")
        return digest.hexdigest()[:32]

    def compile(self, sources: Sequence[Path], target: Path) -> None:
        """Compiles sources into a shared library.

        Raises:
            CompilerError: It failed.
        """
        # These sources include the others.
        compiled = [str(source) for source in sources if source.suffix == ".c"]
        _run([*self.command, *_FLAGS, "-o", str(target), *compiled, *_LIBRARIES])


def found_compiler() -> Compiler:
    """The compiler that `CC` names, else the first of cc, gcc and clang, else the clang in the
    package `ziglang` (the extra `compiler`), where the machine has none.

    With `CC` set to nothing there is none.

    Raises:
        CompilerError: There is none, or it does not run.
    """
    named = os.environ.get("CC")
    if named is not None:
        command = tuple(shlex.split(named))
        if not command:
            raise CompilerError("CC is set to nothing")
        if shutil.which(command[0]) is None:
            raise CompilerError(f"CC names {command[0]!r}, which is not there")
    else:
        first = next(filter(None, map(shutil.which, ("cc", "gcc", "clang"))), None)
        if first is not None:
            command = (first,)
        elif importlib.util.find_spec("ziglang") is not None:
            command = (sys.executable, "-m", "ziglang", "cc")
        else:
            raise CompilerError("no C compiler was found (`pip install ziglang` brings one)")
    return Compiler(command, _run([*command, "--version"]).partition("\n")[0].strip())


def _run(command: list[str]) -> str:
    environment = {**os.environ, "LC_ALL": "C"}
    try:
        done = subprocess.run(
            command,
            capture_output=True,
            text=True,
            errors="replace",
            env=environment,
            timeout=_DEADLINE_S,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise CompilerError(f"{command[0]} does not run: {error}") from error
    if done.returncode:
        said = next(
            (line for line in done.stderr.splitlines() if "error" in line),
            done.stderr.strip()[-200:],
        )
        raise CompilerError(
            f"{command[0]} failed with {done.returncode}: {said or 'it said nothing'}"
        )
    return done.stdout


def cpu_identity(cpuinfo: Path = Path("/proc/cpuinfo")) -> str:
    """A text that differs between processors for which `-march=native`
    means different instructions."""
    wanted = ("model name", "flags", "CPU implementer", "CPU part", "Features")
    try:
        block = cpuinfo.read_text().partition("\n\n")[0]  # of the first core
    except OSError:  # no Linux
        return " ".join((platform.machine(), platform.processor()))
    return "\n".join(
        [platform.machine(), *(line for line in block.splitlines() if line.startswith(wanted))]
    )
