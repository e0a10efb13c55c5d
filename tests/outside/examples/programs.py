"""Programs that are run as scripts, in processes that are forked with torch, or on a pool of ranks."""

from __future__ import annotations

import contextlib
import io
import os
import runpy
import shlex
import subprocess
import sys
import traceback
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist

from tests.support.ranks import hide_slow_imports
from tests.support.resident import in_new_process

__all__ = [
    "ALONE",
    "ROOT",
    "TORCHRUN",
    "Said",
    "printed",
    "run_alone",
    "run_on_a_rank",
    "said_on_ranks",
    "skip_without",
]

ROOT = Path(__file__).resolve().parents[3]
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node"]
ALONE = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
"""What torchrun would tell the only rank."""


def skip_without(*packages, extra):
    """Skips a file. Nothing is imported: every process that collects tests would wait for it."""
    if any(find_spec(package) is None for package in packages):
        pytest.skip(f"the extra [{extra}] is not installed", allow_module_level=True)


def printed(*command, cwd=None, **environ):
    """What a command prints that ends well."""
    environ = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"} | environ
    how = {"cwd": cwd, "env": environ, "capture_output": True, "text": True, "timeout": 250}
    done = subprocess.run([*map(str, command)], **how, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def said_on_ranks(case, folder, line):
    """What the ranks of a pool print that run a file of examples/ with arguments, in a folder of their own."""
    name, *arguments = shlex.split(line)
    program = (ROOT / "examples" / name).read_text(encoding="utf-8")
    return "".join(case.run(run_on_a_rank, program, name, str(folder), *arguments))


class Said(NamedTuple):
    """What a program printed, and how it ended: 0, or the number or text that it gave to `sys.exit`, or a traceback."""

    out: str
    ended: int | str


def run_on_a_rank(program, name, folder, *arguments):
    """Runs a program on a rank of a pool, as torchrun would, in a folder of its own for all ranks; what it prints."""
    before, printed = os.getcwd(), io.StringIO()
    rank, size = str(dist.get_rank()), str(dist.get_world_size())
    told = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": size, "LOCAL_WORLD_SIZE": size}
    os.chdir(folder)
    try:
        if state := sys.modules.get("accelerate.state"):  # of the program before
            state.AcceleratorState._reset_state(True)
        with contextlib.ExitStack() as changed:
            changed.enter_context(patch.dict(os.environ, told))
            changed.enter_context(patch.object(sys, "argv", [name, *arguments]))
            beside = str((ROOT / "examples" / name).parent)  # where Python looks first
            changed.enter_context(patch.object(sys, "path", [beside, *sys.path]))
            changed.enter_context(patch.object(dist, "destroy_process_group"))  # the pool needs it
            changed.enter_context(contextlib.redirect_stdout(printed))
            exec(compile(program, name, "exec"), {"__name__": "__main__"})
    finally:
        os.chdir(before)
    return printed.getvalue()


def run_alone(folder, script, *arguments, environ=None):
    """Runs a script in a process of its own, which is forked where torch is imported already: what it said."""
    return Said(*in_new_process(_as_main, str(folder), str(script), [*map(str, arguments)], environ or {}))


def _as_main(folder, script, arguments, environ):
    os.chdir(folder)
    os.environ.update(environ)
    torch.set_num_threads(1)
    hide_slow_imports()
    sys.argv = [script, *arguments]
    said, ended = io.StringIO(), 0
    with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
        try:
            runpy.run_path(script, run_name="__main__")
        except SystemExit as end:
            ended = end.code or 0
        except BaseException:
            ended = traceback.format_exc()
    return said.getvalue(), ended
