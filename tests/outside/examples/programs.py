"""Programs that are run one after another as scripts, by one interpreter: torch is imported once, and once for all ranks."""

from __future__ import annotations

import contextlib
import io
import json
import os
import runpy
import subprocess
import sys
import traceback
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

__all__ = ["ROOT", "Interpreter", "Said"]

ROOT = Path(__file__).resolve().parents[3]


class Said(NamedTuple):
    """What a program printed, and how it ended: 0, or the number or text that it gave to `sys.exit`, or a traceback."""

    out: str
    ended: int | str


class Interpreter:
    """A process that runs scripts, each as `__main__` and with the folder of the examples in its path.

    Args:
        folder: The current folder of all programs and of the ranks that they start.
    """

    def __init__(self, folder: Path) -> None:
        environ = {"PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'examples'}", "OMP_NUM_THREADS": "1"}
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

    def run(self, script: Path, *arguments: object, environ: Mapping[str, str] | None = None) -> Said:
        """Runs a script until it ends."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps([str(script), list(map(str, arguments)), dict(environ or {})]) + "\n")
        self._process.stdin.flush()
        answer = self._process.stdout.readline()
        assert answer, Path(self._log.name).read_text()[-3000:]
        return Said(*json.loads(answer))

    def close(self) -> None:
        """Ends the process."""
        self._process.communicate()
        self._log.close()


def main() -> None:
    """Runs what is asked for on stdin, and answers on stdout."""
    answers = sys.stdout
    for line in sys.stdin:
        script, arguments, environ = json.loads(line)
        before, printed = dict(os.environ), io.StringIO()
        sys.argv = [script, *arguments]
        os.environ.update(environ)
        ended: int | str = 0
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
