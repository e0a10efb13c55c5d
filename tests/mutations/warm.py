"""pytest in forks of a process that has imported torch, or the package and its tests; and what a test runs of the package.

The fork server of the ranks is a fork of the same: a run costs its tests and not the imports.
"""

from __future__ import annotations

import ast
import builtins
import gc
import inspect
import json
import mmap
import os
import signal
import sys
import time
from contextlib import suppress
from importlib import import_module
from multiprocessing import forkserver, util
from pathlib import Path
from types import CodeType, FunctionType
from typing import Any

import pytest

from tests.mutations.__main__ import ROOT

__all__ = ["Notes", "Row", "add", "changes", "load", "noting", "rows", "run_pytest", "warm_up"]

Row = dict[str, Any]
Statements = list[tuple[str, int, int]]

_PRELOADED = ["torch.distributed.tensor", "torch.distributed.checkpoint", "torch._dynamo", "hypothesis", "numpy"]
_RAN_NBYTES = 1 << 17  # a byte for each statement of the package, shared with forks and with processes that tests start
_RAN_FD = os.memfd_create("ran")
os.truncate(_RAN_FD, _RAN_NBYTES)
_RAN = mmap.mmap(_RAN_FD, _RAN_NBYTES)
_SHARED = """import builtins, mmap, os
if not hasattr(builtins, "_ran"):
    with open(os.environ["MUTATIONS_RAN"], "r+b") as ran:
        builtins._ran = mmap.mmap(ran.fileno(), 0)
"""

_functions: dict[tuple[str, str, int], list[FunctionType]] = {}  # all that there are, by their code


def warm_up() -> None:
    """Imports what all runs import."""
    builtins._ran = _RAN  # type: ignore[attr-defined]
    os.environ["MUTATIONS_RAN"] = f"/proc/{os.getpid()}/fd/{_RAN_FD}"
    for name in _PRELOADED:
        import_module(name)


def noting(root: Path) -> Statements:
    """Makes the package at `root` note which of its statements run. Returns the file, first and last line of each."""
    statements: Statements = []
    for path in sorted((root / "zero_fn").rglob("*.py")):
        tree = ast.parse(path.read_text())
        tree.body = _noted(tree.body, str(path.relative_to(root)), statements, False)
        if path == root / "zero_fn/__init__.py":  # a process that a test starts begins there
            tree.body[1:1] = ast.parse(_SHARED).body  # after its docstring
        path.write_text(ast.unparse(ast.fix_missing_locations(tree)))
    return statements


def _noted(body: list[ast.stmt], file: str, statements: Statements, is_inside: bool) -> list[ast.stmt]:
    """Statements, with a note before each that stands in a function."""
    noted: list[ast.stmt] = []
    for number, statement in enumerate(body):
        is_text = isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant)
        if is_inside and not (is_text and number == 0):
            noted += ast.parse(f"_ran[{len(statements)}] = 1").body
            statements.append((file, statement.lineno, statement.end_lineno or statement.lineno))
        is_deeper = is_inside or isinstance(statement, ast.FunctionDef)
        for part in (statement, *getattr(statement, "handlers", ()), *getattr(statement, "cases", ())):
            for field in ("body", "orelse", "finalbody"):
                if getattr(part, field, None):
                    setattr(part, field, _noted(getattr(part, field), file, statements, is_deeper))
        noted.append(statement)
    return noted


class Notes:
    """A plugin of pytest: a line of JSON for each test that failed, and with `ran` for each that passed."""

    def __init__(self, path: Path, *, ran: bool) -> None:
        self._path, self._ran, self._began, self._is_well = path.absolute(), ran, 0.0, True

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_setup(self) -> None:
        self._began, self._is_well = time.monotonic(), True
        _RAN[:] = bytes(len(_RAN))

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        row: Row = {"test": report.nodeid, "seconds": round(time.monotonic() - self._began, 3)}
        self._is_well &= report.passed
        if report.failed:
            add(self._path, {**row, "failed": str(report.longrepr)[-400:]})
        elif self._ran and report.when == "teardown" and self._is_well:
            add(self._path, {**row, "hits": [number for number, byte in enumerate(_RAN[:]) if byte]})


def load(root: Path, files: list[str], log: Path) -> None:
    """Makes this process one that has imported the package at `root` and these files of tests."""
    _enter(root, log.absolute())
    pytest.main(["-q", "-n0", "-pno:cacheprovider", "--collect-only", *files])
    gc.unfreeze()
    for each in gc.get_objects():
        if type(each) is FunctionType:
            _functions.setdefault(_key(each.__code__), []).append(each)
    gc.freeze()


def changes(before: str, after: str, file: str) -> dict[tuple[str, str, int], CodeType] | None:
    """The code of the functions that differ between two sources; None if modules, classes or defaults do."""
    found: dict[tuple[str, str, int], CodeType] = {}
    todo = [(compile(before, file, "exec"), compile(after, file, "exec"))]
    while todo:
        old, new = todo.pop()
        inner = [[each for each in code.co_consts if isinstance(each, CodeType)] for code in (old, new)]
        others = [[repr(each) for each in code.co_consts if not isinstance(each, CodeType)] for code in (old, new)]
        if old.co_flags & inspect.CO_OPTIMIZED:
            if old != new:
                found[_key(old)] = new
        elif (old.co_code, old.co_names, *others[:1]) != (new.co_code, new.co_names, *others[1:]):
            return None
        if len(inner[0]) != len(inner[1]):
            return None
        todo += zip(*inner, strict=True)
    return found


def _key(code: CodeType) -> tuple[str, str, int]:
    return code.co_filename, code.co_qualname, code.co_firstlineno


def _enter(root: Path, log: Path) -> None:
    for fd in (1, 2):
        os.dup2(os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), fd)
    os.chdir(root)
    os.environ["PYTHONPATH"] = str(root)
    sys.path[:] = [str(root), *(entry for entry in sys.path if entry not in ("", str(ROOT), str(root)))]
    if "zero_fn" not in sys.modules:
        for name in [name for name in sys.modules if name.partition(".")[0] == "tests"]:
            del sys.modules[name]


def run_pytest(
    root: Path,
    arguments: list[str],
    plugin: object,
    log: Path,
    limit_s: float,
    codes: dict[tuple[str, str, int], CodeType] | None = None,
) -> int | None:
    """Exit code of pytest at `root` in a fork of this process; None if it ran out of time. `codes`: of functions."""
    root, log = root.absolute(), log.absolute()
    pid = os.fork()
    if pid == 0:
        code = 70
        try:
            os.setpgid(0, 0)
            _enter(root, log)
            for key, changed in (codes or {}).items():
                for function in _functions.get(key, ()):
                    function.__code__ = changed
            _start_fork_server()
            code = int(pytest.main(["-q", "-n0", "-pno:cacheprovider", "--tb=short", *arguments], plugins=[plugin]))
        finally:
            os._exit(code)
    end_s = time.monotonic() + limit_s
    try:
        while time.monotonic() < end_s:
            ended, status = os.waitpid(pid, os.WNOHANG)
            if ended:
                return os.waitstatus_to_exitcode(status)
            time.sleep(0.05)
        return None
    finally:
        with suppress(ProcessLookupError, ChildProcessError):
            os.killpg(pid, signal.SIGKILL)
            os.waitpid(pid, 0)


def _start_fork_server() -> None:
    spawn = util.spawnv_passfds

    def fork(path: bytes, arguments: list[str], fds: tuple[int, ...]) -> int:
        if "forkserver" not in arguments[-1]:  # the resource tracker
            return spawn(path, arguments, fds)  # type: ignore[arg-type]
        pid = os.fork()
        if pid == 0:
            try:
                for fd in map(int, os.listdir("/proc/self/fd")):
                    if fd > 2 and fd not in fds:
                        with suppress(OSError):
                            os.close(fd)
                exec(arguments[-1], {})
            finally:
                os._exit(0)
        return pid

    util.spawnv_passfds = fork  # type: ignore[assignment]
    forkserver.set_forkserver_preload([*_PRELOADED, "zero_fn.local.rank"])
    forkserver.ensure_running()
    util.spawnv_passfds = spawn


def rows(path: Path) -> list[Row]:
    """The lines of a file of JSON; none if it is not there."""
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def add(path: Path, row: Row) -> None:
    """Adds a line."""
    with path.open("a") as lines:
        lines.write(json.dumps(row) + "\n")
