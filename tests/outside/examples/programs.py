"""Programs that are run as scripts, one after another by one interpreter or on a pool of ranks: torch is imported once."""

from __future__ import annotations

import contextlib
import io
import json
import os
import runpy
import subprocess
import sys
import traceback
from pathlib import Path
from typing import NamedTuple
from unittest.mock import patch

import torch.distributed as dist

__all__ = ["ROOT", "Interpreter", "Said", "run_on_a_rank"]

ROOT = Path(__file__).resolve().parents[3]


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
            changed.enter_context(patch.object(dist, "destroy_process_group"))  # the pool needs it
            changed.enter_context(contextlib.redirect_stdout(printed))
            exec(compile(program, name, "exec"), {"__name__": "__main__"})
    finally:
        os.chdir(before)
    return printed.getvalue()


class Interpreter:
    """A process that runs scripts, each as `__main__`.

    Args:
        folder: The current folder of all programs and of the ranks that they start.
    """

    def __init__(self, folder):
        environ = {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
        self._log = (folder / "log").open("w+")
        self._process = subprocess.Popen(
            [sys.executable, "-m", __name__],
            cwd=folder,
            env=os.environ | environ,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            text=True,
        )

    def run(self, script, *arguments, environ=None):
        """Runs a script until it ends."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps([str(script), list(map(str, arguments)), dict(environ or {})]) + "\n")
        self._process.stdin.flush()
        answer = self._process.stdout.readline()
        assert answer, Path(self._log.name).read_text()[-3000:]
        return Said(*json.loads(answer))

    def close(self):
        """Ends the process."""
        self._process.communicate()
        self._log.close()


def main():
    """Runs what is asked for on stdin, and answers on stdout."""
    answers = sys.stdout
    for line in sys.stdin:
        script, arguments, environ = json.loads(line)
        before, printed = dict(os.environ), io.StringIO()
        sys.argv = [script, *arguments]
        os.environ.update(environ)
        ended = 0
        try:
            with contextlib.redirect_stdout(printed), contextlib.redirect_stderr(printed):
                runpy.run_path(script, run_name="__main__")
        except SystemExit as end:
            ended = end.code or 0
        except BaseException:
            ended = traceback.format_exc()
        os.environ.clear()
        os.environ.update(before)
        print(json.dumps([printed.getvalue(), ended]), file=answers, flush=True)


if __name__ == "__main__":
    main()
