"""Plants one bug at a time in a copy of the project and runs the tests there: every bug must be caught.

    python -m tests.mutations                        # all, one after the other
    python -m tests.mutations --only wrong-divisor   # one, or several
    python -m tests.mutations --jobs 2

Prints a table. A bug that survives the whole test command, or makes it run out of time, is a fault of the tests: exit code 1.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from tests.mutations.bugs import BUGS, Bug, planted

ROOT = Path(__file__).resolve().parents[2]
ORDER = [
    *(f"tests/units/transport/test_{name}.py" for name in ("collectives", "arena", "agree")),
    "tests/units/values",
    *("property_tests", "tests/errors", "tests/promises", "tests"),
]
UNPLANTED = ["--ignore=tests/test_mutations.py"]  # it would see every bug, as a text


@dataclass(frozen=True, slots=True)
class Verdict:
    """What came of one bug.

    Attributes:
        bug: The bug.
        caught_by: The first test that failed; None if none did.
        seconds: Until then.
        note: Why no test is named.
    """

    bug: Bug
    caught_by: str | None
    seconds: float
    note: str = ""


def main() -> int:
    arguments = _arguments()
    chosen = [bug for bug in BUGS if not arguments.only or bug.name in arguments.only]
    unknown = set(arguments.only or ()) - {bug.name for bug in BUGS}
    if unknown or not chosen:
        sys.exit(f"no such bug: {', '.join(sorted(unknown))}")
    print(f"{'bug':<38} {'function':<40} {'seconds':>7}  caught by", flush=True)
    with ThreadPoolExecutor(arguments.jobs) as pool:
        verdicts = []
        for verdict in pool.map(lambda bug: _judge(bug, arguments.limit_s, arguments.likely), chosen):
            verdicts.append(verdict)
            caught = verdict.caught_by or f"SURVIVED {verdict.note}".strip()
            print(f"{verdict.bug.name:<38} {verdict.bug.where:<40} {verdict.seconds:7.1f}  {caught}", flush=True)
    survivors = [verdict for verdict in verdicts if verdict.caught_by is None]
    print(f"{len(verdicts) - len(survivors)} of {len(verdicts)} bugs were caught")
    for verdict in survivors:
        print(f"  {verdict.bug.name}: {verdict.bug.breaks}")
    return 1 if survivors else 0


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.mutations", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--only", nargs="+", metavar="NAME", help="names of bugs")
    parser.add_argument("--jobs", type=int, default=1, help="copies of the project at work at once")
    parser.add_argument("--limit-s", type=float, default=1800.0, help="seconds for the tests of one bug")
    parser.add_argument("--likely", action="store_true", help="only the tests that should see the bug: a quick look")
    return parser.parse_args()


def _judge(bug: Bug, limit_s: float, only_likely: bool) -> Verdict:
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="mutation-") as folder:
        root = Path(folder)
        _copy(root)
        path, text = planted(bug, root / "zero_fn")
        path.write_text(text)
        runs = [[bug.likely]] if only_likely else [[bug.likely], ORDER]
        for tests in runs:
            left_s = limit_s - (time.monotonic() - began)
            code, output = _run(root, tests, left_s)
            seconds = time.monotonic() - began
            if code is None:
                return Verdict(bug, None, seconds, "out of time")
            found = re.search(r"^(?:FAILED|ERROR) (\S+)", output, re.MULTILINE)
            if found:
                return Verdict(bug, found[1], seconds)
            if code:
                return Verdict(bug, None, seconds, f"pytest ended with {code}: {output[-300:]!r}")
        return Verdict(bug, None, seconds, "the likely tests only" if only_likely else "")


def _copy(root: Path) -> None:
    files = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, check=True, capture_output=True).stdout.decode()
    for name in filter(None, files.split("\0")):
        if (ROOT / name).is_file():
            (root / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, root / name)


def _run(root: Path, tests: list[str], limit_s: float) -> tuple[int | None, str]:
    """Exit code of pytest and what it printed; no code if it ran out of time."""
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-x",
        "-q",
        "-rfE",
        "--tb=no",
        "-p",
        "no:cacheprovider",
        *UNPLANTED,
        *tests,
    ]
    environ = {**os.environ, "PYTHONPATH": str(root), "PYTHONDONTWRITEBYTECODE": "1"}
    process = subprocess.Popen(
        command,
        cwd=root,
        env=environ,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        output, _ = process.communicate(timeout=max(limit_s, 1.0))
    except subprocess.TimeoutExpired:
        return None, ""
    finally:
        _end(process)
    return process.returncode, output


def _end(process: subprocess.Popen[str]) -> None:
    """Ends the tests and the ranks they have left behind."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


if __name__ == "__main__":
    sys.exit(main())
