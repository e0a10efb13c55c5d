"""The C compiler of this machine, and what its output depends on."""

from __future__ import annotations

import hashlib
import importlib.util
import os
import platform
import shlex
import shutil
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

__all__ = ["Compiler", "CompilerError", "cpu_identity", "found_compiler"]

# `-ffp-contract=off`: which products and sums are fused is part of the result, so the sources say it.
_FLAGS = (
    "-std=c11",
    "-O3",
    "-march=native",
    "-ffp-contract=off",
    "-fno-math-errno",
    "-fno-trapping-math",
    "-fPIC",
    "-shared",
    "-pthread",
)
_LIBRARIES = ("-lm",)
_DEADLINE_S = 120


class CompilerError(Exception):
    """There is no compiler, or it does not compile. Says why in a line; caught in `library`."""


@dataclass(frozen=True, slots=True)
class Compiler:
    """A C compiler.

    Attributes:
        command: How it is called.
        version: The first line of what it says of itself.
    """

    command: tuple[str, ...]
    version: str

    def key(self, sources: Sequence[Path]) -> str:
        """A digest of all that decides what it makes of these sources: them, the flags, itself, and the processor."""
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
        _run([*self.command, *_FLAGS, "-o", str(target), *map(str, sources), *_LIBRARIES])


def found_compiler() -> Compiler:
    """The compiler that `CC` names, else the first of cc, gcc and clang, else the clang in the package `ziglang` (the extra
    `compiler`), where the machine has none. With `CC` set to nothing there is none.

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
            command, capture_output=True, text=True, errors="replace", env=environment, timeout=_DEADLINE_S
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise CompilerError(f"{command[0]} does not run: {error}") from error
    if done.returncode:
        said = next((line for line in done.stderr.splitlines() if "error" in line), done.stderr.strip()[-200:])
        raise CompilerError(f"{command[0]} failed with {done.returncode}: {said or 'it said nothing'}")
    return done.stdout


def cpu_identity(cpuinfo: Path = Path("/proc/cpuinfo")) -> str:
    """What tells processors apart for which `-march=native` differs."""
    wanted = ("model name", "flags", "CPU implementer", "CPU part", "Features")
    try:
        block = cpuinfo.read_text().partition("\n\n")[0]  # of the first core
    except OSError:  # no Linux
        return " ".join((platform.machine(), platform.processor()))
    return "\n".join([platform.machine(), *(line for line in block.splitlines() if line.startswith(wanted))])
